"""Samples of several parts on their way through a real Redis: committed, cut, read, trained, recorded."""

import contextlib
from pathlib import Path

import redis

from penstock import payloads
from penstock.consumers.batch.recording import load
from penstock.consumers.trainer import Trainer
from penstock.history.reader import HistoryReader
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease, run
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import PATIENCE_S, admit, buffering, make_config, publish, until
from tests.integration.test_recorder import recording
from tests.parted_samples import Turn, make_sample, turn

#: Of samples 0 and 1 of each job. The last part of sample 0 was begun, and has no answer.
PARTS = [[turn(2, 2, 1), turn(4, 3, 1), Turn(1, ())], [turn(2, 4, 1)]]


def answer(client: redis.Redis, keys: Keys, held: RawLease) -> str:
    """Commit both samples of a job, whose payloads share a key; return that."""
    job = Job.from_bytes(held.body)
    samples = [make_sample(k, parts, float(k), job.id, job.n) for k, parts in enumerate(PARTS)]
    data, metas = payloads.pack(samples, token=held.token, server="control", worker="w1")
    key = keys.payload(samples[0].id, held.token)
    client.set(key, data)
    records = [(meta.k, meta.oldest, meta.to_bytes()) for meta in metas]
    assert run(client, scripts.commit(keys, held.job, held.token, records)).outcome == "ready"
    return key


def test_T10_T11_a_sample_of_several_parts_is_trained_as_rows_and_counted_once(
    client: redis.Redis, keys: Keys, redis_server: RedisServer, tmp_path: Path
) -> None:
    batches = {"save_batches": str(tmp_path / "batches" / "{rollout_id}.bin")}
    config = make_config(redis_server.url, keys.run, tmp_path, trainer={"batch_groups": 1}, debug=batches)
    run(client, scripts.record(keys, "first", lease_ms=1, backlog=100, patience_ms=60_000))
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2)
        stored = [answer(client, keys, held) for held in play.lease(client, keys, most=2, version=1)]
        batch = trainer.next(timeout=PATIENCE_S)
        arrays = batch.arrays()

        assert [row.sample for row in batch.all_rows] == ["d/0/0/0", "d/0/0/0.1", "d/0/0/1"]
        assert arrays["lengths"].tolist() == [4, 7, 6]
        sample = make_sample(0, PARTS[0])
        assert arrays["tokens"][0][:4].tolist() + arrays["tokens"][1].tolist() == sample.tokens[:11]
        assert arrays["loss_mask"].sum(axis=1).tolist() == [2, 3, 4]
        low, _, high = batch.advantages.tolist()
        assert batch.advantages.tolist() == [low, low, high]
        assert low == -high < 0
        assert batch.counts == {"loss_tokens": 9, "loss_samples": 3, "samples": 3, "groups": 1}
        trainer.commit(batch)
        trainer.state_dict()
        trainer.checkpointed()
        assert audit(client, keys).ok

        # The payload of the next one is lost before it is cut, or when it is read.
        client.delete(stored[1])
        publish(trainer, 1)
        second = trainer.next(timeout=PATIENCE_S)
        assert second.arrays()["loss_mask"].sum() == 0
        assert [row.sample for row in second.all_rows] == ["d/0/1/0", "d/0/1/0.1", "d/0/1/1"]
        assert client.hget(keys.counters, "payload_lost") == b"2"
        trainer.commit(second)
        trainer.state_dict()
        trainer.checkpointed()

        until(lambda: client.zcard(keys.unrecorded) == 2, "both groups to retire")
        ledger = play.drawn_to_train(client, keys)
        assert (ledger.heard, ledger.trained) == (18, 9)
        with recording(config):
            until(lambda: not client.exists(keys.unrecorded), "both groups to be recorded")

    assert load(batches["save_batches"], 1).payloads.keys() == {"d/0/0/0", "d/0/0/1"}
    with contextlib.closing(HistoryReader(config.run_dir / "history")) as reader:
        rows = {row.id: row for row in reader.each(arrays=True)}
        uses = {name: [(use.batch, use.loss_tokens) for use in reader.uses(name)] for name in rows}
    first = [rows[f"d/0/0/{name}"] for name in ("0", "0.1", "0.2", "1")]
    assert [row.fate for row in first] == ["trained", "trained", "masked", "trained"]
    assert [(row.prompt_length, row.num_generated, row.reward) for row in first] == [
        (2, 2, 0.0), (4, 3, 0.0), (1, 0, 0.0), (2, 4, 1.0),
    ]  # fmt: skip
    assert [None if row.tokens is None else row.tokens.tolist() for row in first[:3]] == [
        sample.tokens[:4], sample.tokens[4:11], sample.tokens[11:],
    ]  # fmt: skip
    assert [uses[row.id] for row in first] == [[(1, 2)], [(1, 3)], [(1, 0)], [(1, 4)]]
