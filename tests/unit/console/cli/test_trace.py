"""``penstock trace`` of a run that is over: what it prints, writes and refuses."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.console.cli.main import execute
from penstock.history.row import Use
from penstock.history.writer import HistoryWriter
from tests.missing import module
from tests.unit.console.read.trace.samples import sample
from tests.unit.console.web.run_files import make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = make_run(tmp_path, "demo")
    writer = HistoryWriter(folder / "history", 1, max_bytes=2**30)
    rows = [sample(k=k, prompt="\x1b[2J evil") for k in range(2)]
    writer.write(rows, [Use(one.job, one.k, "actor", 3, version=2) for one in rows])
    writer.close()
    return tmp_path


def traced(runs: Path, *arguments: str) -> int:
    return execute(["trace", *arguments, "--run", "demo", "--directory", str(runs)])


def test_a_job_is_told_in_words(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert traced(runs, "math/0/7/1") == 0
    out = capsys.readouterr().out
    assert "state: trained" in out
    assert "\x1b" not in out
    for words in ("failed reward_raised", "first token", "batch 3", "sample 1: 3 tokens, versions 3 to 4"):
        assert words in out
    assert "sample 0" not in out


def test_a_span_of_time_is_written_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "trace.json"
    span = "--from", "1970-01-01T00:16:40Z", "--to", "1100"
    assert traced(runs, "--perfetto", str(path), *span, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["events"] == len(json.loads(path.read_bytes())["traceEvents"]) > 20
    assert (told["from"], told["to"]) == ("1970-01-01T00:16:40Z", "1970-01-01T00:18:20Z")
    assert traced(runs, "--perfetto", str(path)) == 2
    assert "exists already" in capsys.readouterr().err
    assert traced(runs, "--perfetto", str(runs / "no" / "trace.json")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert traced(runs, "--perfetto", str(runs / "none.json"), "--from", "9000", "--to", "9001") == 0
    assert "Nothing is known of that time." in capsys.readouterr().err


class Collector(ThreadingHTTPServer):
    """A collector that accepts OTLP over HTTP, and keeps the spans."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.spans: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        service = module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        request = service.ExportTraceServiceRequest.FromString(body)
        self.server.spans += [span for one in request.resource_spans for of in one.scope_spans for span in of.spans]
        self.send_response(self.server.status if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(params=[200])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    server = Collector(request.param)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_span_of_time_is_sent_as_one_tree_per_job(
    runs: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    assert traced(runs, "--otlp", collector.url, "--from", "1000", "--to", "1100", "--json") == 0
    assert json.loads(capsys.readouterr().out)["spans"] == len(collector.spans)
    named: dict[str, list[Any]] = {}
    for span in collector.spans:
        named.setdefault(span.name, []).append(span)
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    (root,) = named["job"]
    assert root.parent_span_id == b""
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    samples = {span.span_id for span in named["sample"]}
    assert len(samples) == 2
    assert {span.parent_span_id for span in (*named["attempt"], *named["sample"])} == {root.span_id}
    assert {span.parent_span_id for span in (*named["decode"], *named["reward"], *named["train"])} == samples
    attempts = [{one.key: one.value.string_value for one in span.attributes} for span in named["attempt"]]
    assert {about["penstock.job"] for about in attempts} == {"math/0/7"}
    assert [about["penstock.end"].partition(" ")[0] for about in attempts] == ["crashed", "failed", "committed"]
    before = [span.span_id for span in collector.spans]
    collector.spans.clear()
    assert traced(runs, "--otlp", f"{collector.url}/v1/traces", "--from", "1000", "--to", "1100") == 0
    assert [span.span_id for span in collector.spans] == before


@pytest.mark.parametrize("collector", [400], indirect=True)
def test_a_collector_that_refuses_is_named(
    runs: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    assert traced(runs, "--otlp", collector.url, "--from", "1000", "--to", "1100") != 0
    assert f"The collector at {collector.url} did not accept spans" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of them"),
        (["--perfetto", "x", "--otlp", "http://h:1"], "one of them"),
        (["--otlp", "localhost:4318"], "--otlp is not the address of a collector"),
        (["--otlp", "http://user:secret@h:1"], "OTEL_EXPORTER_OTLP_HEADERS"),
        (["math/0/7", "--perfetto", "x"], "one of them"),
        (["math/0/7", "--last", "60s"], "--perfetto FILE writes"),
        (["math/0/8"], "knows nothing of"),
        (["evil"], "cannot trace 'evil'"),
        (["--perfetto", "x", "--last", "60y"], "invalid --last '60y'"),
        (["--perfetto", "x", "--last", "1m", "--from", "3"], "--from and --last"),
        (["--perfetto", "x", "--from", "noon"], "invalid --from 'noon'"),
        (["--perfetto", "x", "--from", "9", "--to", "8"], "before it begins"),
        (["--perfetto", "x", "--to", "nan"], "invalid --to 'nan'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(runs)
    assert traced(runs, *arguments) == 2
    assert says in capsys.readouterr().err
    assert not (runs / "x").exists()
