"""Samples that were committed together share one key: read whole, read in ranges, made permanent, lost and freed."""

from pathlib import Path
from typing import Any

import pytest
import redis

from penstock import payloads
from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.payloads.store import PayloadStore
from penstock.protocol import scripts
from penstock.protocol.scripts import RawLease, run
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    admit,
    buffering,
    make_config,
    make_sample,
    publish,
    until,
)


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return make_config(redis_server.url, keys.run, tmp_path, trainer={"batch_groups": 2})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Payload bytes that came by whole keys and by ranges."""
    num_bytes = {"whole": 0, "ranges": 0}
    for verb, kind in (("read", "whole"), ("read_ranges", "ranges")):
        original = getattr(PayloadStore, verb)

        def counted(store: PayloadStore, wanted: Any, *, original: Any = original, kind: str = kind) -> Any:
            values = original(store, wanted)
            num_bytes[kind] += sum(len(value or b"") for value in values)
            return values

        monkeypatch.setattr(PayloadStore, verb, counted)
    return num_bytes


def answer_together(client: redis.Redis, keys: Keys, held: RawLease) -> str:
    """Commit all samples of a job as a worker does whose answers end at once; the key they share."""
    job = Job.from_bytes(held.body)
    samples = [make_sample(job, k, [1], 2 + k) for k in range(job.n)]
    data, metas = payloads.pack(samples, token=held.token, server="control")
    key = keys.payload(samples[0].id, held.token)
    client.set(key, data, nx=True, ex=600)
    records = [(meta.k, meta.oldest, meta.to_bytes()) for meta in metas]
    assert run(client, scripts.commit(keys, held.job, held.token, records)).outcome == "ready"
    return key


def complete(trainer: Trainer, client: redis.Redis, keys: Keys, groups: int, n: int = 4) -> list[str]:
    publish(trainer)
    admit(client, keys, groups, n=n)
    return [answer_together(client, keys, held) for held in Player(client, keys).lease(groups, version=1)]


def tokens_of(batch: Any) -> dict[str, list[int]]:
    data = batch.arrays()
    return {
        row.sample: data["tokens"][i, : data["lengths"][i]].tolist() for i, row in enumerate(batch.rows) if not row.lost
    }


def expected(row: Any) -> list[int]:
    return [1, 2, 3] + [5 + row.k] * (2 + row.k)


def test_one_rank_reads_whole_keys_and_they_go_with_their_group(
    config: Config, client: redis.Redis, keys: Keys, asked: dict[str, int]
) -> None:
    with buffering(config), Trainer(config) as trainer:
        shared = complete(trainer, client, keys, 2)
        batch = trainer.next(timeout=PATIENCE_S)
        assert tokens_of(batch) == {row.sample: expected(row) for row in batch.rows}
        assert all(client.ttl(key) == -1 for key in shared), "made permanent at ingest"
        assert asked == {"whole": sum(client.strlen(key) for key in shared), "ranges": 0}
        trainer.commit(batch)
        publish(trainer)
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: not client.exists(*shared))


def test_T14_each_rank_reads_only_its_ranges_of_a_shared_key(
    config: Config, client: redis.Redis, keys: Keys, asked: dict[str, int]
) -> None:
    with (
        buffering(config),
        Trainer(config, dp_rank=0, dp_size=2) as zero,
        Trainer(config, dp_rank=1, dp_size=2) as one,
    ):
        shared = complete(zero, client, keys, 2)
        batches = [trainer.next(timeout=PATIENCE_S) for trainer in (zero, one)]
        found = tokens_of(batches[0]) | tokens_of(batches[1])
        assert found == {row.sample: expected(row) for row in batches[0].all_rows}
        assert asked["whole"] + asked["ranges"] == sum(client.strlen(key) for key in shared), "each byte once"
        assert asked["ranges"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_T10_a_shared_key_that_is_gone_loses_its_samples_once_each(
    config: Config, client: redis.Redis, keys: Keys, ranks: int
) -> None:
    with buffering(config), Trainer(config, dp_rank=0, dp_size=ranks) as trainer:
        shared = complete(trainer, client, keys, 2)
        until(lambda: all(client.ttl(key) == -1 for key in shared))
        client.delete(shared[0])
        batch = trainer.next(timeout=PATIENCE_S)
        gone = [row.sample for row in batch.rows if row.sample.rsplit("/", 1)[0] in shared[0]]
        assert sorted(batch.lost) == sorted(gone)
        assert play.counter(client, keys, "payload_lost") == len(gone)


def test_a_shared_key_that_is_gone_before_the_cut_makes_lost_rows(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config) as trainer:
        shared = complete(trainer, client, keys, 2)
        client.delete(shared[1])
        with buffering(config):
            batch = trainer.next(timeout=PATIENCE_S)
            assert [row.lost for row in batch.all_rows] == [False] * 4 + [True] * 4
            assert play.counter(client, keys, "payload_lost") == 4
