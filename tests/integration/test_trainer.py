"""The trainer's client on a real buffer: order, ranks, ownership, restarts, rewinds."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock.config import Config
from penstock.consumers.subscription import ownership
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, OwnershipLost, ProtocolError, PublishError, WaitTimeout
from penstock.payloads.store import PayloadStore
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.causes import BatchNotCut, GroupsMissing, RankNotJoined, RanksAbsent, RewindUnpublished
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import LeaseHeld
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    admit,
    buffering,
    jobs_of,
    kill,
    make_config,
    publish,
    step,
    until,
    until_waits,
    waits,
)


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    """Batches of one group, nothing too old."""
    staleness = {"mode": "async", "bound": 20}
    return make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, trainer={"batch_groups": 1})


@pytest.fixture
def worker(client: redis.Redis, keys: Keys) -> Player:
    return Player(client, keys)


@pytest.fixture
def buffer(config: Config) -> Iterator[None]:
    with buffering(config):
        yield


def state_at(keys: Keys, n: int) -> dict[str, Any]:
    return {"run": keys.run, "subscription": "actor", "batch": n}


def is_lost(trainer: Trainer) -> bool:
    """True once its heartbeat has seen that another one owns the subscription."""
    try:
        trainer.session.subscriber.ownership.check()
    except OwnershipLost:
        return True
    return False


def begin(trainer: Trainer, client: redis.Redis, keys: Keys, groups: int) -> None:
    """First version, and so many groups of it."""
    publish(trainer)
    admit(client, keys, groups)
    Player(client, keys).work(groups, 1)


# --- restarts -----------------------------------------------------------------------------------------------------


class Lineage:
    """A trainer that dies at a named step, and what its weights have seen: a checkpoint keeps both."""

    def __init__(self, config: Config, client: redis.Redis, keys: Keys) -> None:
        self.config, self.client, self.keys = config, client, keys
        self.saved: tuple[dict[str, Any], list[str]] = (state_at(keys, 0), [])

    def train(self, steps: int, die_at: str = "") -> list[str]:
        """Restore, train until ``steps`` are in the weights, a checkpoint every two; or die in step 3 or 4."""
        trainer = Trainer(self.config, prefetch=1).__enter__()
        state, seen = self.saved
        seen = list(seen)
        trainer.load_state_dict(state)
        publish(trainer, len(seen))

        def dies(point: str, at: int) -> bool:
            if (point, at) != (die_at, len(seen)):
                return False
            kill(trainer, self.client)
            return True

        while len(seen) < steps:
            batch = trainer.next(timeout=PATIENCE_S)
            if dies("next", 2):
                return seen
            seen += jobs_of(batch)
            trainer.commit(batch)
            if dies("commit", 3):
                return seen
            publish(trainer, len(seen))
            if dies("publish", 3):
                return seen
            if len(seen) % 2 == 0:
                state = trainer.state_dict()
                if dies("state", 4):
                    return seen
                self.saved = (state, list(seen))
                if dies("saved", 4):
                    return seen
                trainer.checkpointed()
                if dies("checkpointed", 4):
                    return seen
        trainer.close()
        return seen


@pytest.mark.usefixtures("buffer")
@pytest.mark.parametrize("point", ["next", "commit", "publish", "state", "saved", "checkpointed"])
def test_I5_a_trainer_killed_anywhere_trains_every_group_once_in_its_lineage(
    config: Config, client: redis.Redis, keys: Keys, point: str
) -> None:
    play.subscribe(client, keys, size=1, gb=1, model=play.MODEL)
    admit(client, keys, 7)
    Player(client, keys).work(7, 0)
    lineage = Lineage(config, client, keys)
    died_with = lineage.train(6, die_at=point)
    assert len(died_with) == {"next": 2, "commit": 3, "publish": 3}.get(point, 4)
    whole = lineage.train(6)
    assert whole == [f"d/0/{i}" for i in range(6)]
    assert whole[: len(died_with)] == died_with, "the same batches again, in the same order"
    until(lambda: play.counter(client, keys, "retired") == 6)
    assert audit(client, keys).ok


@pytest.mark.usefixtures("buffer")
def test_T1_next_and_tick_refuse_until_the_restored_weights_are_published(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config) as trainer:
        begin(trainer, client, keys, 3)
        step(trainer)
        trainer.load_state_dict(state_at(keys, 0))
        with pytest.raises(ProtocolError, match="Publish the restored weights before the next batch"):
            trainer.next(timeout=1)
        with pytest.raises(ProtocolError, match="Publish the restored weights before tick"):
            trainer.tick()
        publish(trainer)
        step(trainer)


@pytest.mark.usefixtures("buffer")
def test_T1_nothing_new_is_cut_between_a_rewind_and_its_publication(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    """Another rank may ask before rank 0 has published; the clock still shows an abandoned version."""
    with Trainer(config) as trainer:
        begin(trainer, client, keys, 2)
        step(trainer)
        trainer.load_state_dict(state_at(keys, 0))
        owner, gen = client.hmget(keys.sub("actor"), "owner", "gen")
        assert run(client, scripts.ask(keys, "actor", 2, owner.decode(), int(gen)))
        until_waits(client, keys, "buffer:actor", RewindUnpublished)
        assert client.xlen(keys.batches("actor")) == 1
        publish(trainer)
        step(trainer)
        assert step(trainer).train_version == 4


@pytest.mark.usefixtures("buffer")
def test_T1_uncut_groups_of_abandoned_versions_are_dropped_and_cut_batches_come_again(
    config: Config, client: redis.Redis, keys: Keys, worker: Player
) -> None:
    with Trainer(config) as trainer:
        begin(trainer, client, keys, 2)
        seen = [step(trainer).digest]  # version 2
        admit(client, keys, 5)
        a, b, c, d, e = worker.lease(5, version=2)
        worker.answer(a, [1])
        worker.answer(b, [2])
        worker.answer(c, [1, 2])
        worker.answer(d, [2], ks=[0])  # committed under a version that is about to be abandoned
        trainer.load_state_dict(state_at(keys, 0))
        assert publish(trainer) == 3
        assert client.hget(keys.sub("actor"), "abandoned") == b"2-2"
        again = step(trainer)
        assert [again.digest] == seen
        worker.answer(d, [3], ks=[1])
        worker.answer(e, [3])
        fresh = [step(trainer) for _ in range(3)]
        assert [jobs_of(batch) for batch in fresh] == [["d/0/1"], [a.job], [e.job]]
        assert [batch.train_version for batch in fresh] == [4, 5, 6]
        assert [batch.manifest.staleness_max for batch in fresh] == [1, 2, 3], "v3 held the weights of v1 again"
        with pytest.raises(WaitTimeout):
            trainer.next(timeout=0.3)
        sub = client.hgetall(keys.sub("actor"))
        assert (sub[b"drop:rewound"], sub[b"disposed"]) == (b"3", b"3")
        until(lambda: play.counter(client, keys, "dropped") == 3)
    assert audit(client, keys).ok


@pytest.mark.usefixtures("buffer")
def test_T1_a_rewind_of_a_rewind_abandons_what_both_left_and_numbers_never_go_back(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config) as trainer:
        begin(trainer, client, keys, 9)
        seen = [step(trainer).digest for _ in range(3)]  # versions 2, 3, 4
        trainer.load_state_dict(state_at(keys, 2))
        trainer.load_state_dict(state_at(keys, 1))  # two in a row, as of a trainer that died in between
        assert publish(trainer, 1) == 5  # the weights of version 2
        assert client.hget(keys.sub("actor"), "abandoned") == b"4-4,3-4"
        assert step(trainer).digest == seen[1]  # version 6
        trainer.load_state_dict(state_at(keys, 0))
        assert publish(trainer, 0) == 7  # the weights of version 1
        again = [step(trainer) for _ in range(3)]  # versions 8, 9, 10
        assert [batch.digest for batch in again] == seen
        fresh = step(trainer)
        assert fresh.train_version == 10
        assert fresh.manifest.staleness_max == 3, "1 = 7, then 8, 9, 10; all others were abandoned"
        staleness = np.asarray(fresh.padded()["staleness"])
        assert staleness.max() == 3
        trainer.load_state_dict(state_at(keys, 4))
        assert publish(trainer, 4) == 12
        last = step(trainer)
        assert (last.train_version, last.manifest.staleness_max) == (12, 4), "12 holds the weights of 11"


@pytest.mark.usefixtures("buffer")
def test_rewinds_that_cannot_be_are_refused_with_what_to_do(config: Config, client: redis.Redis, keys: Keys) -> None:
    with Trainer(config) as trainer:
        begin(trainer, client, keys, 3)
        step(trainer)
        with pytest.raises(ProtocolError, match="Call state_dict"):
            trainer.checkpointed()
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: play.counter(client, keys, "retired") == 1)
        with pytest.raises(
            ProtocolError, match=r"cannot rewind to batch 0, because batches up to 1 are retired: restore a"
        ):
            trainer.load_state_dict(state_at(keys, 0))
        with pytest.raises(ProtocolError, match="checkpoint is at batch 7, but Redis has only 1 committed batches"):
            trainer.load_state_dict(state_at(keys, 7))
        with pytest.raises(ConfigError, match="checkpoint belongs to subscription 'critic'"):
            trainer.load_state_dict({**state_at(keys, 0), "subscription": "critic"})


# --- commits ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("buffer")
def test_I5_only_the_next_batch_in_its_own_bytes_can_be_committed(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config) as trainer, Trainer(config, name="other") as other:
        begin(trainer, client, keys, 3)
        first, second = trainer.next(timeout=PATIENCE_S), trainer.next(timeout=PATIENCE_S)
        with pytest.raises(ProtocolError, match=r"Batch 2 .* the next batch to commit is 1"):
            trainer.commit(second)
        with pytest.raises(ProtocolError, match="belongs to subscription 'actor': commit it to that trainer"):
            other.commit(first)
        trainer.commit(first)
        trainer.commit(first)
        with pytest.raises(ProtocolError, match="it was not cut"):
            trainer.session.subscriber.commit(9, first.digest)
        with pytest.raises(ProtocolError, match=r"Redis has another batch of this number.*rewind to a checkpoint"):
            trainer.session.subscriber.commit(2, first.digest)
        trainer.commit(second)
    assert client.hget(keys.sub("actor"), "cursor") == b"2"


@pytest.mark.usefixtures("buffer")
def test_a_damaged_or_missing_manifest_is_an_error_not_a_wait(config: Config, client: redis.Redis, keys: Keys) -> None:
    with Trainer(config) as trainer:
        begin(trainer, client, keys, 3)
        for _ in range(2):
            trainer.next(timeout=PATIENCE_S)
        key = keys.batches("actor")
        (_, fields) = client.xrange(key)[1]
        client.xdel(key, "1-0")
        trainer.session.subscriber.rewind(0)
        with pytest.raises(ProtocolError, match=r"Batch 1 of subscription 'actor' is gone \(the next is 2-0\)"):
            trainer.session.subscriber.read(1, 1.0)
        client.xadd(key, {**fields, b"m": fields[b"m"] + b"x"}, id="3-0")
        with pytest.raises(ProtocolError, match=r"manifest of batch 3 .* is damaged"):
            trainer.session.subscriber.read(3, 1.0)


@pytest.mark.usefixtures("buffer")
def test_T2_T13_tick_moves_the_clock_with_the_same_weights_and_ages_samples(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config) as trainer:
        begin(trainer, client, keys, 2)
        before = client.xrevrange(keys.weights("policy"), count=1)[0][1][b"p"]
        trainer.commit(trainer.next(timeout=PATIENCE_S))
        assert trainer.tick() == 2
        old, new = (
            Publication.from_bytes(raw)
            for raw in (before, client.xrevrange(keys.weights("policy"), count=1)[0][1][b"p"])
        )
        assert (new.path, new.index, new.version, new.through) == (old.path, old.index, 2, 1)
        assert not client.hget(keys.sub("actor"), "repeats"), "versions that age nothing"
        with pytest.raises(PublishError, match="a version consumed it already"):
            trainer.tick()


def test_tick_without_a_version_says_what_to_do(config: Config) -> None:
    with Trainer(config) as trainer, pytest.raises(PublishError, match="publish its weights before tick"):
        trainer.tick()


# --- waiting ------------------------------------------------------------------------------------------------------


def test_I8_next_times_out_with_a_sentence_says_what_it_waits_for_and_goes_on(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config) as trainer:
        publish(trainer)
        assert trainer.next_nowait() is None
        with pytest.raises(WaitTimeout, match=r"Batch 1 .* did not arrive within 1.2 s: .*`penstock why`"):
            trainer.next(timeout=1.2)
        assert waits(client, keys)["trainer:actor"] == BatchNotCut("actor", 1)
        with buffering(config):
            begin_again(client, keys, 2)
            assert trainer.next(timeout=PATIENCE_S).n == 1
            assert "trainer:actor" not in waits(client, keys)
            until(lambda: (batch := trainer.next_nowait()) is not None and batch.n == 2)


def begin_again(client: redis.Redis, keys: Keys, groups: int) -> None:
    worker = Player(client, keys)
    admit(client, keys, groups)
    worker.work(groups, worker.clock)


@pytest.mark.usefixtures("buffer")
def test_prefetched_batches_come_in_order_and_nobody_waits_for_them_aloud(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Trainer(config, prefetch=2) as trainer:
        begin(trainer, client, keys, 3)
        first = trainer.next(timeout=PATIENCE_S)
        until(lambda: client.xlen(keys.batches("actor")) == 3)
        trainer.commit(first)
        publish(trainer, 1)
        assert [step(trainer).n for _ in range(2)] == [2, 3]
        assert trainer.next_nowait() is None
        # The thread that looks ahead has read in vain for longer than a moment; the trainer does not wait.
        until(lambda: client.hget(keys.sub("actor"), "ask") == b"5")
        until_waits(client, keys, "buffer:actor", GroupsMissing, have=0, size=1)
        assert "trainer:actor" not in waits(client, keys)
        with pytest.raises(WaitTimeout):
            trainer.next(timeout=1.2)
        assert waits(client, keys)["trainer:actor"] == BatchNotCut("actor", 4)
        begin_again(client, keys, 1)
        assert trainer.next(timeout=PATIENCE_S).n == 4


@pytest.mark.usefixtures("buffer")
def test_a_commit_beside_the_thread_that_fetches_ahead_is_no_lost_write(
    config: Config, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has its answer of how far Redis is; before it looks at it, the trainer commits."""
    with Trainer(config) as trainer:
        begin(trainer, client, keys, 1)
        batch = trainer.next(timeout=PATIENCE_S)
        manifests = trainer.session.subscriber._manifests
        do = manifests._control.do

        def commit_behind(work: Any) -> Any:
            answer = do(work)
            monkeypatch.undo()
            trainer.commit(batch)
            return answer

        monkeypatch.setattr(manifests._control, "do", commit_behind)
        manifests._check_lost()
        assert trainer.session.subscriber.cursor == 1
        client.hset(keys.sub("actor"), "cursor", 0)
        with pytest.raises(ProtocolError, match=r"Redis has 0 committed batches .* but this trainer committed 1"):
            manifests._check_lost()


@pytest.mark.usefixtures("buffer")
def test_batches_are_laid_out_by_the_thread_that_fetches_ahead(config: Config, client: redis.Redis, keys: Keys) -> None:
    by: list[tuple[int, str]] = []

    def prepare(batch: Any) -> Any:
        by.append((batch.n, threading.current_thread().name.split("_")[0]))
        return batch.packed(64)

    with Trainer(config, prefetch=1, prepare=prepare) as trainer:
        begin(trainer, client, keys, 3)
        for n in (1, 2, 3):
            batch = step(trainer)
            assert batch.prepared[0]["tokens"].tolist() == batch.packed(64)[0]["tokens"].tolist()
            until(lambda n=n: n == 3 or len(by) > n, "the next one, fetched ahead")
    assert by == [(1, "MainThread"), (2, "prefetch"), (3, "prefetch")], "list each role once"


# --- ownership ----------------------------------------------------------------------------------------------------


def test_I5_a_second_trainer_of_the_same_name_is_refused_while_the_first_lives(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "OWNER_LEASE_S", 0.9)
    with Trainer(config), pytest.raises(ConfigError, match="is owned by a live trainer: stop it, or use"):
        Trainer(config).__enter__()
    with Trainer(config):
        pass  # given back: nobody waits


def test_I5_the_successor_of_a_killed_trainer_waits_for_its_lease_and_goes_on(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json())
    code = f"""
        import json, sys
        from penstock.consumers.subscription import ownership
        from penstock.consumers.trainer import Trainer
        from penstock.config import Config
        ownership.OWNER_LEASE_S = 2.0
        with Trainer(Config.model_validate(json.load(open({str(path)!r})))) as trainer:
            print("owns", flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"owns\n"
        victim.kill()
        victim.wait()
    monkeypatch.setattr(ownership, "OWNER_LEASE_S", 2.0)
    with ThreadPoolExecutor(1) as pool:
        trainer = Trainer(config)
        joined = pool.submit(trainer.__enter__)
        until_waits(client, keys, "trainer:actor", LeaseHeld)
        joined.result(PATIENCE_S)
    publish(trainer)
    trainer.close()
    assert client.hget(keys.clock, scripts.version_field("policy")) == b"1"


@pytest.mark.usefixtures("buffer")
def test_I3_a_trainer_that_lost_its_subscription_changes_nothing(
    config: Config, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "OWNER_LEASE_S", 0.6)
    with Trainer(config) as frozen:
        begin(frozen, client, keys, 2)
        batch = frozen.next(timeout=PATIENCE_S)
        client.delete(keys.owner("actor"))
        play.join(client, keys, "successor")
        before = client.hgetall(keys.sub("actor"))
        with pytest.raises(OwnershipLost):
            frozen.commit(batch)
        with pytest.raises(PublishError, match="belongs to another trainer"):
            publish(frozen)
        with pytest.raises(OwnershipLost):
            frozen.load_state_dict(state_at(keys, 0))
        frozen.session.clock.must_publish = False
        with pytest.raises(OwnershipLost):
            frozen.next(timeout=5)
        frozen.state_dict()
        with pytest.raises(OwnershipLost):
            frozen.checkpointed()
        until(lambda: is_lost(frozen), "the heartbeat to notice")
        assert client.hgetall(keys.sub("actor")) == before
    assert client.get(keys.owner("actor")) == b"successor", "leaving gives nothing of another's back"


# --- ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_keys(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Payload keys that this process's trainers read together."""
    asked: list[list[str]] = []
    read = PayloadStore.read

    def count(store: PayloadStore, names: list[str]) -> list[bytes | None]:
        asked.append(names)
        return read(store, names)

    monkeypatch.setattr(PayloadStore, "read", count)
    return asked


@pytest.mark.usefixtures("buffer")
def test_T14_each_rank_reads_only_its_own_payloads_and_the_last_one_moves_the_cursor(
    config: Config, client: redis.Redis, keys: Keys, read_keys: list[list[str]]
) -> None:
    wide = {"dp_size": 2, "batch_groups": 3}
    with Trainer(config, dp_rank=0, **wide) as zero, Trainer(config, dp_rank=1, **wide) as one:
        begin(zero, client, keys, 6)
        batches = [trainer.next(timeout=PATIENCE_S) for trainer in (zero, one)]
        assert batches[0].digest == batches[1].digest
        assert [len(names) for names in read_keys] == [3, 3]
        assert len({name for names in read_keys for name in names}) == 6
        assert [len(batch.rows) for batch in batches] == [3, 3]
        one.commit(batches[1])
        assert client.hget(keys.sub("actor"), "cursor") is None
        with pytest.raises(ProtocolError, match="the next batch to commit is 1"):
            one.commit(one.next(timeout=PATIENCE_S))
        with pytest.raises(WaitTimeout, match=r"Not every rank committed batch 1 within 0.7 s: check rank 1"):
            committed_alone(zero, batches[0], client, keys)
        assert client.hget(keys.sub("actor"), "cursor") == b"1"
        assert publish(zero) == 2


def committed_alone(trainer: Trainer, batch: Any, client: redis.Redis, keys: Keys) -> None:
    """Publish while the other rank's bit is not there, then put it back."""
    bits = client.hget(keys.sub("actor"), "bits")
    client.hset(keys.sub("actor"), "bits", ":00")
    try:
        trainer.commit(batch)
        trainer.publish({"weight": np_tensor()}, timeout=0.7)
    finally:
        assert waits(client, keys)["trainer:actor"] == RanksAbsent(("rank 1",), "commit", 1)
        client.hset(keys.sub("actor"), "bits", bits)
        trainer.commit(batch)


def np_tensor() -> Any:
    import torch

    return torch.zeros(1)


@pytest.mark.usefixtures("buffer")
def test_T14_publish_waits_for_every_rank(config: Config, client: redis.Redis, keys: Keys) -> None:
    wide = {"dp_size": 2, "batch_groups": 2}
    with (
        Trainer(config, dp_rank=0, **wide) as zero,
        Trainer(config, dp_rank=1, **wide) as one,
        ThreadPoolExecutor(1) as pool,
    ):
        begin(zero, client, keys, 2)
        batches = [trainer.next(timeout=PATIENCE_S) for trainer in (zero, one)]
        zero.commit(batches[0])
        published = pool.submit(publish, zero)
        until_waits(client, keys, "trainer:actor", RanksAbsent, purpose="commit", batch=1)
        assert not published.done()
        one.commit(batches[1])
        assert published.result(PATIENCE_S) == 2
        assert zero.state_dict() == one.state_dict() == state_at(keys, 1) | {"version": 1}


@pytest.mark.usefixtures("buffer")
def test_T14_a_restart_at_another_size_splits_the_same_batch_anew(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    wide = {"batch_groups": 3}
    with Trainer(config, **wide) as alone:
        begin(alone, client, keys, 3)
        whole = alone.next(timeout=PATIENCE_S)
        kill(alone, client)
    with Trainer(config, dp_rank=0, dp_size=2, **wide) as zero:
        zero.load_state_dict(state_at(keys, 0))
        publish(zero)
        with Trainer(config, dp_rank=1, dp_size=2, **wide) as one:
            one.load_state_dict(state_at(keys, 0))
            halves = [trainer.next(timeout=PATIENCE_S) for trainer in (zero, one)]
            assert [half.digest for half in halves] == [whole.digest] * 2
            rows = sorted(row.sample for half in halves for row in half.rows)
            assert rows == sorted(row.sample for row in whole.all_rows)
            for trainer, half in zip((zero, one), halves, strict=True):
                trainer.commit(half)
            assert publish(zero) == 3


@pytest.mark.usefixtures("buffer")
def test_a_rank_follows_a_rewind_of_rank_0_and_stops_when_another_trainer_takes_over(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    wide = {"dp_size": 2, "batch_groups": 1}
    with Trainer(config, dp_rank=0, **wide) as zero, Trainer(config, dp_rank=1, **wide) as one:
        begin(zero, client, keys, 3)
        for trainer in (zero, one):
            trainer.commit(trainer.next(timeout=PATIENCE_S))
        zero.load_state_dict(state_at(keys, 0))
        one.load_state_dict(state_at(keys, 0))
        publish(zero)
        again = [trainer.next(timeout=PATIENCE_S) for trainer in (zero, one)]
        for trainer, batch in zip((zero, one), again, strict=True):
            trainer.commit(batch)
        assert client.hget(keys.sub("actor"), "cursor") == b"1"
        client.delete(keys.owner("actor"))
        play.join(client, keys, "successor")
        with pytest.raises(OwnershipLost):
            one.commit(again[1])


def test_a_rank_that_finds_no_rank_0_times_out_and_says_so(config: Config, client: redis.Redis, keys: Keys) -> None:
    lonely = Trainer(config, dp_rank=1, dp_size=2)
    with pytest.raises(WaitTimeout, match="timed out waiting for rank 0 of subscription actor to join"):
        lonely.session.subscriber.join(timeout_s=0.8)
    assert waits(client, keys)["trainer:actor/1"] == RankNotJoined("actor")
    lonely.close()
