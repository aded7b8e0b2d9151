"""Spans of all parts of a run make one tree per job, at a collector that takes OTLP."""

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors.torch import load_file

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration.fake_engine import FakeEngine
from tests.integration.parts import PATIENCE_S, buffering, producing
from tests.integration.worker_play import make_config, working
from tests.missing import module

#: opentelemetry.proto.trace.v1.Span
Span = Any


@pytest.fixture(autouse=True)
def _opentelemetry() -> None:
    module("opentelemetry.sdk.trace")


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, and keeps what came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, Span]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        service = module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        request = service.ExportTraceServiceRequest.FromString(body)
        for one in request.resource_spans:
            about = {each.key: each.value.string_value for each in one.resource.attributes}
            found = [span for scope in one.scope_spans for span in scope.spans]
            self.server.spans += [(about["service.instance.id"], span) for span in found]
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def train_one(config: Config, model: Path) -> list[str]:
    """Publish, and commit one batch; the jobs in it. Blocks."""
    with Trainer(config) as trainer:
        trainer.publish(load_file(next(model.glob("*.safetensors"))))
        batch = trainer.next(timeout=PATIENCE_S)
        trainer.commit(batch)
        return sorted({row.job for row in batch.manifest.rows})


async def test_spans_of_all_parts_are_one_tree_per_job(
    redis_server: RedisServer,
    keys: Keys,
    client: redis.Redis,
    model_config: ModelConfig,
    publications: list[Publication],
    fake: FakeEngine,
    collector: Collector,
    tmp_path: Path,
) -> None:
    lines = [json.dumps({"prompt": f"a{index}=", "label": "x"}) for index in range(50)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    config = make_config(
        redis_server.url, keys, model_config, tmp_path, engine={"url": fake.url}, telemetry={"traces": collector.url},
        data={"train": [{"name": "d", "path": str(tmp_path / "train.jsonl")}]}, trainer={"batch_groups": 2},
        staleness={"mode": "async", "bound": 1},
    )  # fmt: skip
    with buffering(config), producing(config):
        async with working(config):
            jobs = await asyncio.to_thread(train_one, config, Path(publications[1].path))

    traces: dict[bytes, list[tuple[str, Span]]] = defaultdict(list)
    for part, span in collector.spans:
        traces[span.trace_id].append((part, span))
    for job in jobs:
        (trace,) = [spans for spans in traces.values() if any(_about(span)["penstock.job"] == job for _, span in spans)]
        _check_tree(job, trace)


def _check_tree(job: str, trace: list[tuple[str, Span]]) -> None:
    named: dict[str, list[tuple[str, Span]]] = defaultdict(list)
    for part, span in trace:
        assert _about(span)["penstock.job"] == job
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        named[span.name].append((part.partition(" ")[0], span))
    assert {name: [part for part, _ in spans] for name, spans in sorted(named.items())} == {
        "attempt": ["worker"],
        "commit": ["worker"] * 2,
        "cut": ["buffer"],
        "generate": ["worker"] * 2,
        "job": ["producer"],
        "reward": ["worker"] * 2,
        "train": ["trainer"],
    }
    ((_, root),), ((_, attempt),) = named["job"], named["attempt"]
    assert root.parent_span_id == b""
    assert {span.parent_span_id for name in ("attempt", "cut", "train") for _, span in named[name]} == {root.span_id}
    assert {span.parent_span_id for name in ("generate", "reward", "commit") for _, span in named[name]} == {
        attempt.span_id
    }
    assert len({span.span_id for _, span in trace}) == len(trace)
    assert _about(attempt)["penstock.end"] == "committed"


def _about(span: Span) -> dict[str, str]:
    return {one.key: one.value.string_value for one in span.attributes}
