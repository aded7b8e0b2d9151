"""A batch of which not one token bears loss is never cut: its groups go, booked by their reason, and others come."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.trainer import Trainer
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    buffering,
    jobs_of,
    make_config,
    make_sample,
    producing,
    publish,
    step,
    until,
    waits,
)
from tests.integration.test_requests import together


class Masker(Player):
    """A worker of which nothing can be trained on."""

    def mask(self, held: RawLease) -> None:
        """Every token bears no loss, as of samples that are too long."""
        self._commit(held, loss=False)

    def lose(self, held: RawLease) -> None:
        """The payload server forgets them before they are committed."""
        self._commit(held, stored=False)

    def fine(self, held: RawLease) -> None:
        self._commit(held)

    def next(self, how: Callable[[RawLease], None], count: int) -> list[str]:
        """Lease jobs one after the other, waiting for the gate, and answer each so."""
        jobs = []
        for _ in range(count):
            held = until(lambda: self.lease(1, version=self.clock), "a job to be admitted")[0]
            how(held)
            jobs.append(held.job)
        return jobs

    def _commit(self, held: RawLease, *, loss: bool = True, stored: bool = True) -> None:
        job, version = Job.from_bytes(held.body), self.clock
        samples = [make_sample(job, k, [version], 2) for k in range(job.n)]
        if not loss:
            for sample in samples:
                sample.loss_mask = [0] * len(sample.tokens)
        assert self.commit(held, samples, version, stored=stored).outcome == "ready"


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Callable[..., Config]:
    return lambda **sections: make_config(redis_server.url, keys.run, tmp_path, **sections)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (Masker.mask, "no_loss"),
        (Masker.lose, "payload_lost"),
    ],
    ids=["masked", "lost"],
)
@pytest.mark.parametrize("mode", ["sync", "one_step", "async"])
def test_T10_a_batch_without_a_loss_token_is_not_cut_and_the_gate_opens(
    make: Callable[..., Config], client: redis.Redis, keys: Keys, mode: str, how: Any, reason: str
) -> None:
    """Batches of two, bound 0 or 1: behind two groups that train nothing the gate would be closed for ever."""
    config = make(staleness={"mode": mode, "bound": 0 if mode == "sync" else 1})
    worker = Masker(client, keys)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        gone = worker.next(lambda held: how(worker, held), 2)
        trainer.next_nowait()
        until(lambda: client.hget(keys.sub("actor"), f"drop:{reason}") == b"2", "for both to be dropped")
        assert client.hget(keys.sub("actor"), "disposed") == b"2", "their places at the gate are free"
        until(lambda: getattr(waits(client, keys).get("buffer:actor"), "dropped", None) == {reason: 2})
        kept: list[str] = []
        while len(kept) < 2:
            kept += worker.next(worker.fine, 1)
        batch = step(trainer)
        assert batch.counts["loss_tokens"] > 0
        assert batch.n == 1, "nothing was cut of them"
        assert not set(jobs_of(batch)) & set(gone)
        assert batch.manifest.ledger["dropped"] == {reason: 2}
        until(lambda: play.counter(client, keys, "dropped") == 2, "for what nobody wants to go")
    report = audit(client, keys)
    assert report.recount.difference == 0
    assert report.lost == (4 if reason == "payload_lost" else 0)


def test_a_batch_with_one_loss_token_keeps_its_groups(
    make: Callable[..., Config], client: redis.Redis, keys: Keys
) -> None:
    config = make()
    worker = Masker(client, keys)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        jobs = worker.next(worker.mask, 1) + worker.next(worker.fine, 1)
        batch = step(trainer)
        assert sorted(jobs_of(batch)) == sorted(jobs), "advantages and counts are of whole groups"
        assert batch.counts["loss_samples"] == 2


def test_answers_that_nobody_trains_are_delivered_whatever_they_bear(
    make: Callable[..., Config], client: redis.Redis, keys: Keys
) -> None:
    config = make()
    worker = Masker(client, keys)
    with buffering(config), Requests(config, name="checks", lane="eval") as checks:
        client.hset(keys.clock, scripts.version_field(play.MODEL), 1)
        asked = [Request(prompt="p", n=2)]
        [rows] = together(lambda: checks.answer(asked, timeout=PATIENCE_S), lambda: worker.next(worker.mask, 1))
        assert [row.row.num_loss for row in rows] == [0, 0]
