"""A payload server that dies and never comes back: its groups are held back, all others go on, a person gives it up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig
from penstock.console.cli.main import execute
from penstock.consumers.trainer import Trainer
from penstock.payloads import servers as payload_servers
from penstock.protocol.audit import audit
from penstock.records.causes import PayloadServersAway
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration.parts import matches, until, waits
from tests.integration.storage_parts import Parts, parts
from tests.integration.storage_rig import Rig, rig

__all__ = ["parts"]


def num_held_back(run_: Rig) -> int:
    """Groups that the buffer holds back for payload server p1."""
    cause = waits(run_.client, run_.keys).get("buffer:payloads")
    return cause.groups if matches(cause, PayloadServersAway, servers=("p1",)) else 0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """The control Redis and two payload servers."""
    made = [RedisServer(tmp_path / name) for name in ("control", "p1", "p2")]
    try:
        for server in made:
            server.start()
        yield made
    finally:
        for server in made:
            server.stop()


def train(run_: Rig, trainer: Trainer, batches: int) -> list[Any]:
    """Train so many batches; all of them."""
    got = []
    for _ in range(batches):
        batch = trainer.next(timeout=120)
        run_.trained += dict.fromkeys(row.job for row in batch.all_rows)
        trainer.commit(batch)
        run_.publish(trainer, batch.n)
        trainer.state_dict()
        trainer.checkpointed()
        got.append(batch)
    return got


def lost_in(batches: list[Any]) -> int:
    """Rows that are lost, whether the leader or the trainer found it."""
    return sum(len(set(batch.lost) | {row.sample for row in batch.all_rows if row.lost}) for batch in batches)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("patience", [False, True], ids=["a person", "patience"])
def test_I4_I8_a_dead_payload_server_holds_back_its_own_groups_until_it_is_lost(
    servers: list[RedisServer],
    parts: Parts,
    model_config: ModelConfig,
    publications: list[Publication],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    patience: bool,
) -> None:
    control, first, second = servers
    stores = {"url": control.url, "payload_servers": {"p1": first.url, "p2": second.url}}
    if patience:
        stores["payload_patience_s"] = 10.0
    # So wide that nothing is too old while it is held back.
    bound = {"mode": "async", "bound": 8}
    with rig(control, parts, model_config, publications[1], tmp_path, redis=stores, staleness=bound) as run_:
        target = ["--run", run_.keys.run, "--redis", control.url]
        buffer, *_ = [parts.start(name, run_.config) for name in ("buffer", "producer", "worker")]
        with Trainer(run_.config) as trainer:
            run_.publish(trainer)
            batches = train(run_, trainer, 2)
            # The gate is full, and what it let in is there: some of it lies on the server that dies.
            until(lambda: run_.counter("completed") >= 18, "the gate to be full", 400)
            first.kill()
            until(lambda: num_held_back(run_) > 0, "groups to be held back", 400)
            if not patience:
                assert execute(["why", *target]) == 0
                assert "penstock payloads lose p1" in capsys.readouterr().out
            buffer.restart()
            # A batch that was cut before may hold rows of it; who reads them waits, and nobody else.
            batches += train(run_, trainer, 3)
            parts.assert_alive()
            if not patience:
                assert lost_in(batches) == 0
                assert execute(["payloads", "lose", "p1", *target]) == 0
                assert "no part waits for it any more" in capsys.readouterr().out
            until(lambda: "p1" in payload_servers.read(run_.client, run_.keys).lost, "p1 to be lost", 400)
            batches += train(run_, trainer, 8)
            until(lambda: "p1" not in str(waits(run_.client, run_.keys)), "nobody to wait for it", 400)
            parts.assert_alive()
            assert execute(["payloads", "ls", "--json", *target]) == 0
            rows = {row["name"]: row["state"] for row in json.loads(capsys.readouterr().out)}
            assert rows == {"p1": "lost", "p2": "live"}
        assert len(run_.trained) == len(set(run_.trained))
        report = audit(run_.client, run_.keys)
        lost = run_.counter("payload_lost")
        assert (report.lost, report.duplicated) == (lost, 0), report.differences
        assert report.num_differences == (lost > 0), report.differences
        assert 0 < lost_in(batches) <= lost, "they come as rows with mask 0"
