"""The real buffer on a real Redis: what it cuts, waits for, masks, drops, keeps and lets go."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock.buffer.cutter import Cutter
from penstock.buffer.metrics import queue_metrics
from penstock.buffer.payload_servers import PayloadServers
from penstock.buffer.state import State
from penstock.config import RedisConfig
from penstock.consumers.trainer import Trainer
from penstock.errors import WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease, run
from penstock.protocol.waits import PublishedWaiting
from penstock.records.causes import CohortUnfinished, GroupsDue, GroupsMissing, NoPublication
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.worker_causes import LeaseHeld, NoJobs, RedisFull
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    Player,
    admit,
    buffering,
    jobs_of,
    kill,
    make_config,
    make_sample,
    publish,
    running,
    step,
    until,
    until_waits,
    wait_record,
    waits,
)

#: Section of a trainer whose subscription takes groups in the order of completion.
FIFO = {"subscription": {"sampler": "fifo"}}


def payloads_left(client: redis.Redis, keys: Keys) -> list[bytes]:
    return list(client.scan_iter(match=keys.of("payload:*").replace("{", "[{]"), count=1000))


def test_a_batch_is_cut_when_asked_for_and_retires_behind_its_checkpoint(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 4)
        Player(client, keys).work(4, 1)
        batch = step(trainer)
        assert jobs_of(batch) == ["d/0/0", "d/0/1"]
        assert (batch.train_version, batch.manifest.staleness_max) == (1, 0)
        assert client.xlen(keys.batches("actor")) == 1, "not cut before it is asked for"
        assert play.counter(client, keys, "retired") == 0, "a restored trainer may need it again"
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: play.counter(client, keys, "swept") == 2)
    assert len(payloads_left(client, keys)) == 4
    assert audit(client, keys).ok


# --- T4: late short answers overtake long ones --------------------------------------------------------------------


@contextlib.contextmanager
def overtaken(
    url: str, client: redis.Redis, keys: Keys, folder: Path, on_expiry: str, **sections: Any
) -> Iterator[tuple[Trainer, Player, list[RawLease]]]:
    """Two long groups, drawn since version 1, still run when the short ones of version 2 are complete."""
    staleness = {"mode": "async", "bound": 1, "on_expiry": on_expiry}
    config = make_config(url, keys.run, folder, staleness=staleness, **sections)
    worker = Player(client, keys)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 4)
        *long, third, fourth = worker.lease(4, version=1)
        for short in (third, fourth):
            worker.answer(short, [1])
        assert jobs_of(step(trainer)) == ["d/0/2", "d/0/3"]
        admit(client, keys, 2)
        worker.work(2, 2)
        yield trainer, worker, long


def test_T4_wait_cuts_only_when_what_is_due_has_come_and_says_so(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    with overtaken(redis_server.url, client, keys, tmp_path, "wait") as (trainer, worker, long):
        assert trainer.next_nowait() is None
        until_waits(client, keys, "buffer:actor", GroupsDue, running=2, version=1, batch=2)
        worker.answer(long[0], [1, 2])
        until_waits(client, keys, "buffer:actor", GroupsDue, running=1, version=1, batch=2)
        assert client.xlen(keys.batches("actor")) == 1, "three groups are ready, and still it waits"
        worker.answer(long[1], [1, 2])
        batch = step(trainer)
        assert sorted(jobs_of(batch)) == ["d/0/0", "d/0/1"]
        assert (batch.train_version, batch.manifest.staleness_max) == (2, 1)
        last = step(trainer)
        assert (jobs_of(last), last.manifest.staleness_max) == (["d/0/4", "d/0/5"], 1)
        assert client.hget(keys.sub("actor"), "disposed") is None, "no work was thrown away"


def cutter_of(client: redis.Redis, keys: Keys) -> tuple[State, Cutter]:
    """A leader's memory and its cutter, without the loop that feeds them."""
    leader = play.lead(client, keys)
    servers = PayloadServers(RedisConfig(url="redis://unused"), client)
    state = State(client, keys, servers, leader)
    state.load()
    return state, Cutter(client, keys, leader, state)


@pytest.mark.parametrize("sampler", ["oldest_version", "cohort"])
def test_T4_T5_a_cut_sees_what_completed_after_the_last_event(client: redis.Redis, keys: Keys, sampler: str) -> None:
    """What no longer runs when it is counted must be in the pool when it is looked up, or a younger one overtakes."""
    play.subscribe(client, keys, bound=1, gb=2, size=2, on_expiry="wait", sampler=sampler, model=play.MODEL)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    admit(client, keys, 4, cohorts=True)
    worker = Player(client, keys)
    *long, third, fourth = worker.lease(4, version=1)
    client.hset(keys.clock, scripts.version_field(play.MODEL), 2)
    for one in (third, fourth):
        worker.answer(one, [2])
    state, cutter = cutter_of(client, keys)
    run(client, scripts.ask(keys, "actor", 1, "owner-1", 0))
    state.refresh()
    due = CohortUnfinished(2, 2) if sampler == "cohort" else GroupsDue(2, version=1, batch=1)
    assert cutter.try_cut(state.subs["actor"]) == due
    for one in long:
        worker.answer(one, [1])
    assert cutter.try_cut(state.subs["actor"]) is None
    assert {client.hget(keys.group(one.job), "b:actor") for one in long} == {b"1"}


def test_T4_wait_with_fifo_takes_what_is_due_first(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    made = overtaken(redis_server.url, client, keys, tmp_path, "wait", trainer=FIFO)
    with made as (trainer, worker, long):
        for held in long:
            worker.answer(held, [1])
        assert sorted(jobs_of(step(trainer))) == ["d/0/0", "d/0/1"]
        assert sorted(jobs_of(step(trainer))) == ["d/0/4", "d/0/5"]
        assert client.hget(keys.sub("actor"), "disposed") is None


def test_T4_wait_with_fifo_keeps_the_order_of_completion_while_nothing_is_due(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    staleness = {"mode": "async", "bound": 3, "on_expiry": "wait"}
    config = make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, trainer=FIFO)
    worker = Player(client, keys)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 3)
        first, second, third = worker.lease(3, version=1)
        for held in (third, first, second):
            worker.answer(held, [1])
        assert jobs_of(step(trainer)) == [third.job, first.job]


def test_T4_mask_trains_the_newer_tokens_and_batch_and_manifest_agree(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    with overtaken(redis_server.url, client, keys, tmp_path, "mask") as (trainer, worker, long):
        batch = step(trainer)
        assert jobs_of(batch) == ["d/0/4", "d/0/5"], "it does not wait"
        admit(client, keys, 1)
        worker.answer(long[0], [1, 2], length=3)  # half of it is too old by now
        worker.answer(long[1], [1])  # nothing of it bears loss any more
        worker.work(1, 3)
        batch = step(trainer)
        assert sorted(jobs_of(batch)) == ["d/0/0", "d/0/6"]
        assert (batch.train_version, batch.manifest.mask_below, batch.manifest.staleness_max) == (3, 2, 1)
        data = batch.padded()
        old = np.asarray(data["versions"]) < 2
        mask = np.asarray(data["loss_mask"])
        assert not mask[old].any()
        generated = np.asarray(data["generated"])
        assert (mask == (generated & ~old)).all(), "only tokens beyond the bound are masked"
        assert int(mask.sum()) == batch.manifest.num_loss_tokens == 2 * 3 + 2 * 2
        by_row = [row.num_loss for row in batch.rows]
        assert sorted(by_row) == [2, 2, 3, 3]
        until(lambda: client.hget(keys.sub("actor"), "drop:stale") == b"1")


def test_loss_on_the_newest_version_only_is_one_subscriptions_choice(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """Two trainers of the same groups: one trains all tokens, the other those of the newest version of each sample."""
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 4})
    worker = Player(client, keys)
    beside = {"driving": False, "bound": 4, "mask_offpolicy": True}
    with buffering(config), Trainer(config) as trainer, Trainer(config, name="newest", subscription=beside) as other:
        publish(trainer)
        admit(client, keys, 4)
        mixed, plain, *short = worker.lease(4, version=1)
        for held in short:
            worker.answer(held, [1])
        step(trainer)
        other.commit(other.next(timeout=60))
        worker.answer(mixed, [1, 2], length=3)
        worker.answer(plain, [1], length=3)
        whole, newest = step(trainer), other.next(timeout=60)
    assert jobs_of(whole) == jobs_of(newest) == [mixed.job, plain.job]
    for batch in (whole, newest):
        data = {key: np.asarray(value) for key, value in batch.padded().items() if key != "counts"}
        wanted = data["generated"].copy()
        if batch is newest:
            last = np.array([row.newest for row in batch.rows])[:, None]
            assert sorted(last[:, 0]) == [1, 1, 2, 2]
            wanted &= data["versions"] == last
        assert (data["loss_mask"] == wanted).all()
        assert int(wanted.sum()) == batch.manifest.num_loss_tokens == sum(row.num_loss for row in batch.rows)
    assert whole.manifest.num_loss_tokens == newest.manifest.num_loss_tokens + 2 * 3
    assert newest.manifest.staleness_mean == 1.5, "of those that bear loss"


def test_T11_I10_cut_off_answers_bear_no_loss_for_a_subscription_that_says_so(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """They stay in their group and its statistics; a batch of nothing else is never cut."""
    masks = {"subscription": {"mask_truncated": True}}
    config = make_config(redis_server.url, keys.run, tmp_path, trainer=masks)
    worker = Player(client, keys)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 4)
        hopeless = worker.lease(2, version=1)
        for held in hopeless:
            answer_cut_off(worker, held, {0, 1})
        with pytest.raises(WaitTimeout):
            trainer.next(timeout=0.2)
        until(lambda: client.hget(keys.sub("actor"), "drop:no_loss") == b"2")
        mixed, whole = worker.lease(2, version=1)
        answer_cut_off(worker, mixed, {1})
        answer_cut_off(worker, whole, set())
        batch = step(trainer)
        trainer.state_dict()
        trainer.checkpointed()
        # I10: what was drawn, by what became of it
        accounts = {"dropped:no_loss": 8, "trained": 6, "masked": 2}
        until(lambda: play.drawn_to_train(client, keys).accounts == accounts)
    assert jobs_of(batch) == [mixed.job, whole.job]
    assert [(row.k, row.num_loss, row.masked) for row in batch.rows if row.job == mixed.job] == [
        (0, 2, False),
        (1, 0, False),
    ]
    assert batch.manifest.num_loss_tokens == 3 * 2
    data = batch.padded()
    cut_off = [row.status == "truncated" for row in batch.rows]
    assert [not bool(mask.any()) for mask in data["loss_mask"]] == cut_off
    assert all(bool(values.any()) for values in data["advantages"])


def answer_cut_off(worker: Player, held: RawLease, cut_off: set[int]) -> None:
    """Answers ``cut_off`` reached the most tokens that they may have."""
    samples = [make_sample(Job.from_bytes(held.body), k, [1], 2) for k in range(2)]
    for k in cut_off:
        samples[k].status, samples[k].finish_reason = "truncated", "length"
    assert worker.commit(held, samples, 1).outcome == "ready"


def test_T4_drop_gives_up_what_is_too_old_and_frees_its_place(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    with overtaken(redis_server.url, client, keys, tmp_path, "drop") as (trainer, worker, long):
        assert jobs_of(step(trainer)) == ["d/0/4", "d/0/5"]
        for held in long:
            worker.answer(held, [1, 2])
        admit(client, keys, 2)
        worker.work(2, 3)
        batch = step(trainer)
        assert jobs_of(batch) == ["d/0/6", "d/0/7"]
        sub = client.hgetall(keys.sub("actor"))
        assert (sub[b"disposed"], sub[b"drop:stale"]) == (b"2", b"2")
        assert sub[b"staleness:stale"] == b"4", "each of version 1, before a batch of version 3"
        lines = {
            str(line) for family in queue_metrics(client, keys) for line in family.samples if "dropped" in line.name
        }
        assert any("dropped_staleness" in line and "'stale'" in line and "value=4.0" in line for line in lines), lines
        lengths = (int(sub[b"aged_samples"]), int(sub[b"aged_tokens"]))
        told = batch.manifest.ledger
        assert (told["aged_samples"], told["aged_tokens"]) == lengths
        assert lengths[1] > lengths[0] > 0, "for the metric of the bias that this has"
        until(lambda: play.counter(client, keys, "dropped") == 2)
        gate = (play.revision(client, keys), ["actor"])
        many = play.admit(client, keys, [play.job(8 + i) for i in range(9)], gate=gate).admitted
        assert many == 4, "all of them are consumed or given up"
    assert audit(client, keys).ok


@pytest.mark.parametrize("on_expiry", ["wait", "mask", "drop"])
def test_I6_nothing_hangs_and_the_bound_holds_when_batches_become_smaller(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, on_expiry: str
) -> None:
    """Eight groups of version 1 cannot all be trained in two batches of one."""
    staleness = {"mode": "async", "bound": 1, "on_expiry": on_expiry}
    config = make_config(redis_server.url, keys.run, tmp_path, staleness=staleness)
    worker = Player(client, keys)
    with buffering(config):
        with Trainer(config, batch_groups=4) as trainer:
            publish(trainer)
            admit(client, keys, 8)
            slow, *rest = worker.lease(8, version=1)
            for held in rest:
                worker.answer(held, [1])
        with Trainer(config, batch_groups=1) as trainer:
            batches = [step(trainer), step(trainer)]
            assert [batch.manifest.staleness_max for batch in batches] == [0, 1]
            worker.answer(slow, [1])
            admit(client, keys, 1)
            worker.work(1, 3)
            batch = step(trainer)
            assert (jobs_of(batch), batch.manifest.staleness_max) == (["d/0/8"], 0)
            until(lambda: client.hget(keys.sub("actor"), "drop:stale") == b"6")


# --- retirement ---------------------------------------------------------------------------------------------------


def test_I4_without_a_checkpoint_nothing_goes_and_a_rewind_to_the_start_is_possible(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    start = {"run": keys.run, "subscription": "actor", "batch": 0}
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 4)
        Player(client, keys).work(4, 1)
        seen = [step(trainer).digest for _ in range(2)]
        trainer.load_state_dict(start)
        publish(trainer)
        assert [step(trainer).digest for _ in range(2)] == seen
        assert len(payloads_left(client, keys)) == 8
        assert play.counter(client, keys, "retired") == 0


def test_groups_of_a_lane_that_nobody_reads_yet_wait_for_who_does(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        play.admit(client, keys, [play.job(i, dataset="e") for i in range(2)], lane="eval", source="eval@1")
        Player(client, keys).work(2, 1)
        admit(client, keys, 2)
        Player(client, keys).work(2, 1)
        step(trainer)
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: play.counter(client, keys, "retired") == 2)
        assert play.state(client, keys, "e/0/0") == "ready"
        play.subscribe(client, keys, "exam", lanes="eval", driving=0, size=2)
        play.join(client, keys, "o", "exam")
        assert run(client, scripts.ask(keys, "exam", 1, "o", 0))
        until(lambda: client.xlen(keys.batches("exam")) == 1)
    assert play.counter(client, keys, "dropped") == 0


def test_I5_every_copy_subscription_sees_every_group_and_the_last_one_lets_it_go(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 5})
    with buffering(config), Trainer(config) as actor, Trainer(config, name="critic", batch_groups=4) as critic:
        publish(actor)
        admit(client, keys, 4)
        Player(client, keys).work(4, 1)
        trained = [*jobs_of(step(actor)), *jobs_of(step(actor))]
        actor.state_dict()
        actor.checkpointed()
        batch = critic.next(timeout=60)
        assert sorted(jobs_of(batch)) == sorted(trained)
        assert play.counter(client, keys, "retired") == 0
        critic.commit(batch)
        critic.state_dict()
        critic.checkpointed()
        until(lambda: play.counter(client, keys, "swept") == 4)


def test_a_cancelled_group_leaves_the_pool_and_one_in_a_batch_stays(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 5)
        Player(client, keys).work(5, 1)
        assert jobs_of(trainer.next(timeout=60)) == ["d/0/0", "d/0/1"]
        assert run(client, scripts.cancel(keys, "d/0/0", ["actor"])) == "cut"
        assert run(client, scripts.cancel(keys, "d/0/2", ["actor"])) == "ready"
        assert jobs_of(trainer.next(timeout=60)) == ["d/0/3", "d/0/4"]
    assert play.counter(client, keys, "cancelled") == 1
    assert audit(client, keys).ok


# --- payloads -----------------------------------------------------------------------------------------------------


def test_I4_payloads_become_permanent_at_ingest_and_again_at_every_start(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    play.subscribe(client, keys)
    admit(client, keys, 2)
    Player(client, keys).work(1, 0)  # a buffer was killed between this commit and its PERSIST
    assert {client.ttl(key) > 0 for key in payloads_left(client, keys)} == {True}
    with buffering(config):
        until(lambda: all(client.ttl(key) == -1 for key in payloads_left(client, keys)))
        Player(client, keys).work(1, 0)
        until(lambda: [client.ttl(key) for key in payloads_left(client, keys)] == [-1] * 4)


def test_T10_a_payload_that_is_lost_becomes_a_row_without_loss_and_is_counted_once(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    worker = Player(client, keys)
    with Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2)
        for held in worker.lease(2, version=1):
            worker.answer(held, [1])
        (gone,) = (key for key in payloads_left(client, keys) if b"d/0/1/0:" in key)
        client.delete(gone)
        for _ in range(2):  # found at every start, counted once
            with buffering(config):
                until(lambda: client.hget(keys.group("d/0/1"), "kept") == b"2")
                until_leading_over(client, keys)
        with buffering(config):
            batch = trainer.next(timeout=60)
            assert [row.num_loss for row in batch.all_rows] == [2, 2, 0, 2]
            assert [row.lost for row in batch.all_rows] == [False, False, True, False]
            assert batch.manifest.num_loss_tokens == 6
            assert int(np.asarray(batch.padded()["loss_mask"]).sum()) == 6
    assert play.counter(client, keys, "payload_lost") == 1
    report = audit(client, keys)
    assert (report.ok, report.lost) == (False, 1)


def until_leading_over(client: redis.Redis, keys: Keys) -> None:
    """The present leader has taken everything in: it answers an event that came after."""
    before = client.xlen(keys.samples)
    run(client, scripts.subscribe(keys, "probe", {"lanes": "score", "driving": 0, "size": before + 1}))
    until(lambda: client.xlen(keys.samples) <= 1, "events to be behind the leader")


def test_a_payload_that_vanishes_after_the_cut_bears_no_loss_and_is_counted(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2)
        Player(client, keys).work(2, 1)
        first = trainer.next(timeout=60)
        client.delete(next(key for key in payloads_left(client, keys) if b"d/0/0/1:" in key))
        for _ in range(2):
            trainer.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 0})
            publish(trainer)
            again = trainer.next(timeout=60)
            assert again.digest == first.digest
            assert np.asarray(again.padded()["loss_mask"]).sum(axis=1).tolist() == [2, 0, 2, 2]
    assert play.counter(client, keys, "payload_lost") == 1


# --- leadership, waits, order -------------------------------------------------------------------------------------


def test_I8_the_buffer_says_what_it_waits_for(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        assert trainer.next_nowait() is None
        until_waits(client, keys, "buffer:actor", NoPublication)
        publish(trainer)
        admit(client, keys, 2)
        Player(client, keys).work(1, 1)
        until_waits(client, keys, "buffer:actor", GroupsMissing, have=1, size=2, running=1)
        Player(client, keys).work(1, 1)
        step(trainer)
        until(lambda: "buffer:actor" not in waits(client, keys))
        from penstock.buffer.main import Buffer

        with running(Buffer(config)):
            until_waits(client, keys, "buffer:standby", LeaseHeld)


def test_I5_a_standby_takes_over_and_the_deposed_one_changes_nothing(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 8})
    with buffering(config), buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 8)
        Player(client, keys).work(8, 1)
        seen = []
        for _ in range(4):
            seen += jobs_of(step(trainer))
            epoch = until(lambda: client.hget(keys.leader, "epoch"))
            client.delete(keys.leader)  # its lease ran out while it was frozen
            until(lambda: client.hget(keys.leader, "epoch") not in (None, epoch))  # noqa: B023
        assert len(set(seen)) == len(seen) == 8
    assert play.counter(client, keys, "cut") == 4
    assert audit(client, keys).ok


def test_what_dead_processes_left_is_tidied_and_living_ones_keep_theirs(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    admit(client, keys, 2)
    Player(client, keys, "finished").work(1, 0)
    Player(client, keys, "holding").lease(1, version=0)
    client.hset(keys.workers, "dead", pack({"name": "dead", "at": 0.0}))
    now = float(client.time()[0])
    client.hset(keys.workers, "alive", pack({"name": "alive", "at": now}))
    client.xgroup_createconsumer(keys.jobs("train"), "workers", "alive")
    client.hset(keys.waits, "worker:dead:intake", wait_record(NoJobs(1), 0.0, 0.0))
    play.subscribe(client, keys)
    with buffering(config):
        until(lambda: client.hkeys(keys.workers) == [b"alive"])
        until(lambda: not client.hexists(keys.waits, "worker:dead:intake"))

        def consumers() -> set[bytes]:
            return {one["name"] for one in client.xinfo_consumers(keys.jobs("train"), "workers")}

        until(lambda: consumers() == {b"holding", b"alive"})
    assert play.state(client, keys, "d/0/1") == "leased"


def test_events_that_were_lost_are_found_by_the_next_look(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2)
        held = Player(client, keys).lease(2, version=1)
        with client.pipeline(transaction=True) as pipe:  # the events vanish in the instant in which they are written
            worker = Player(pipe, keys)  # type: ignore[arg-type]
            for one in held:
                for k in range(2):
                    commit_in(pipe, worker, one, k)
            pipe.xtrim(keys.samples, maxlen=0)
            pipe.execute()
        assert client.xlen(keys.samples) == 0
        assert jobs_of(step(trainer)) == ["d/0/0", "d/0/1"]


def commit_in(pipe: Any, worker: Player, held: RawLease, k: int) -> None:
    """Queue the commit of one sample in a transaction."""
    from penstock import payloads
    from penstock.records.job import Job
    from tests.integration.parts import make_sample

    sample = make_sample(Job.from_bytes(held.body), k, [1], 2)
    data, (meta,) = payloads.pack([sample], token=held.token, server="control")
    pipe.set(worker.keys.payload(sample.id, held.token), data, ex=600)
    call = scripts.commit(worker.keys, held.job, held.token, [(k, 1, meta.to_bytes())])
    pipe.eval(call.script.text, len(call.keys), *call.keys, *call.args)


def test_a_name_that_was_dropped_cannot_be_taken_again(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    from penstock.errors import ConfigError

    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config):
        with Trainer(config) as trainer:
            publish(trainer)
            owner = trainer.session.subscriber.owner
            assert run(client, scripts.hear(keys, "actor", owner=owner, call=1, place=0, rank=1)) is not None
        assert client.exists(keys.orders("actor"))
        assert run(client, scripts.unsubscribe(keys, "actor"))
        assert not client.exists(keys.orders("actor"))
        with pytest.raises(ConfigError, match=r"'actor' of run .* was dropped: take another name"):
            Trainer(config).__enter__()


def test_waits_and_consumption_go_on_when_redis_is_full(tmp_path: Path) -> None:
    """Whoever consumes is what empties it: nothing on the way from a group to its retirement may be refused."""
    from penstock.protocol.scripts import ensure_lanes
    from penstock.redis.connect import connect

    server = RedisServer(tmp_path / "redis")
    client = connect(server.start())
    keys = Keys("full")
    ensure_lanes(client, keys)
    config = make_config(server.url, keys.run, tmp_path)
    try:
        with buffering(config):
            trainer = Trainer(config).__enter__()
            publish(trainer)
            admit(client, keys, 4)
            Player(client, keys).work(4, 1)
            step(trainer)
            client.config_set("maxmemory", 1)
            somebody = PublishedWaiting(client, keys, "somebody")
            until(lambda: somebody.blocked_on(RedisFull()) or "somebody" in waits(client, keys))
            kill(trainer, client)
            with Trainer(config) as successor:
                successor.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 1})
                publish(successor, 1)
                step(successor)
                successor.report(step=2)
                successor.state_dict()
                successor.checkpointed()
                until(lambda: play.counter(client, keys, "swept") == 4)
        assert audit(client, keys).ok
    finally:
        client.close()
        server.stop()
