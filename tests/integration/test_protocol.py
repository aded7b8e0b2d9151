"""The verbs of the protocol on a real Redis: states, guards, and the interleavings that once broke them."""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from penstock.errors import LeadershipLost, PublishError, QueueFull
from penstock.protocol import scripts
from penstock.protocol.scripts import RawLease, run
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys
from penstock.records.sample import Drawn
from penstock.redis.server import RedisServer
from tests.integration import play

# --- admission and the gate ---------------------------------------------------------------------------------------


def test_admit_moves_position_and_queue_together(client: redis.Redis, keys: Keys) -> None:
    first = play.admit(client, keys, [play.job(0), play.job(1)])
    assert (first.outcome, first.admitted, first.position) == ("ok", 2, 2)
    late = play.admit(client, keys, [play.job(0), play.job(1)], position=0)
    assert (late.outcome, late.position) == ("moved", 2)
    assert client.xlen(keys.jobs("train")) == 2
    play.assert_conserved(client, keys)


def test_admit_skips_a_job_that_is_live_or_done(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    client.setbit(keys.done("d", 0), 1, 1)
    client.hset(keys.source, "train", 0)
    again = play.admit(client, keys, [play.job(0), play.job(1), play.job(2)])
    assert (again.outcome, again.admitted) == ("ok", 3)
    assert play.counter(client, keys, "admitted") == 2
    play.assert_conserved(client, keys)


def test_T3_gate_is_a_stock_of_admitted_not_disposed_not_consumed(client: redis.Redis, keys: Keys) -> None:
    gate = (play.subscribe(client, keys, bound=1, gb=2), ["actor"])
    jobs = [play.job(i) for i in range(10)]
    assert play.admit(client, keys, jobs, gate=gate).admitted == 4  # (1 + 1) * 2
    assert play.admit(client, keys, jobs[4:], gate=gate).outcome == "closed"
    leader = play.lead(client, keys)
    play.join(client, keys)
    done = play.complete(client, keys, 4)
    play.keep(client, keys, leader, done)
    play.publish(client, keys, 1, 0)
    assert play.cut(client, keys, leader, 1, done[:2]).outcome == "cut"
    play.commit_batch(client, keys, 1)
    assert play.admit(client, keys, jobs[4:], gate=gate).outcome == "closed", "consumed only once it is published"
    play.publish(client, keys, 2, 1)
    assert play.admit(client, keys, jobs[4:], gate=gate).admitted == 2
    run(client, scripts.dispose(keys, leader, "actor", Disposal.FILTERED, done[2:3]))
    assert play.admit(client, keys, jobs[6:], gate=gate).admitted == 1, "a disposal frees its place"
    assert play.admit(client, keys, jobs[7:], gate=gate).outcome == "closed"


def test_T3_gate_counts_buried_and_takes_a_requeue_back(client: redis.Redis, keys: Keys) -> None:
    gate = (play.subscribe(client, keys, bound=0, gb=1), ["actor"])
    play.admit(client, keys, [play.job(0)], gate=gate)
    held = play.lease(client, keys)[0]
    run(client, scripts.fail(keys, held.job, held.token, "w1", reason="r", detail="", max_attempts=1, retry_ms=1))
    assert play.admit(client, keys, [play.job(1)], gate=gate).admitted == 1
    assert run(client, scripts.requeue(keys, held.job, play.MODEL))
    run(client, scripts.cancel(keys, "d/0/1", ["actor"]))
    assert play.admit(client, keys, [play.job(2)], gate=gate).outcome == "closed", "the requeued one takes its place"
    play.assert_conserved(client, keys)


def test_gate_is_closed_without_a_subscription_and_asks_again_when_they_change(client: redis.Redis, keys: Keys) -> None:
    assert play.admit(client, keys, [play.job(0)], gate=(0, [])).outcome == "closed"
    revision = play.subscribe(client, keys)
    assert play.admit(client, keys, [play.job(0)], gate=(revision - 1, ["actor"])).outcome == "subs"


def test_eval_jobs_do_not_count_at_the_gate(client: redis.Redis, keys: Keys) -> None:
    gate = (play.subscribe(client, keys, bound=0, gb=1), ["actor"])
    play.admit(client, keys, [play.job(i, dataset="e") for i in range(5)], lane="eval", source="eval@1")
    assert play.admit(client, keys, [play.job(0)], gate=gate).admitted == 1


# --- leases -------------------------------------------------------------------------------------------------------


def test_lease_takes_lanes_in_order_and_never_twice(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0), play.job(1)])
    play.admit(client, keys, [play.job(0, dataset="e")], lane="eval", source="eval@1")
    assert [held.job for held in play.lease(client, keys, most=2)] == ["e/0/0", "d/0/0"]
    assert [held.job for held in play.lease(client, keys, "w2", most=9)] == ["d/0/1"]
    play.assert_conserved(client, keys)


def test_T12_lease_waits_for_weights_of_the_admission(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.clock, scripts.version_field(play.MODEL), 3)
    play.admit(client, keys, [play.job(0)])
    assert play.lease(client, keys, version=2) == []
    assert play.lease(client, keys, version=3)[0].not_before == 3


def test_lease_respects_a_paused_lane(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    client.sadd(keys.paused, "train")
    assert play.lease(client, keys) == []


def test_renewal_keeps_the_lease_and_a_zombie_cannot_steal_it_back(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    old = play.lease(client, keys, "w1")[0]
    assert run(client, scripts.renew(keys, "w1", [(old.job, old.token)])) == []
    run(client, scripts.release(keys, old.job, old.token))
    new = play.lease(client, keys, "w2")[0]
    assert run(client, scripts.renew(keys, "w1", [(old.job, old.token)])) == [old.job]
    assert run(client, scripts.renew(keys, "w2", [(new.job, new.token)])) == []
    pending = client.xpending_range(keys.jobs("resume"), "workers", "-", "+", 10)
    assert [p["consumer"] for p in pending] == [b"w2"]


def test_I3_a_worker_that_lost_its_lease_changes_nothing(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    old = play.lease(client, keys, "w1")[0]
    run(client, scripts.release(keys, old.job, old.token))
    new = play.lease(client, keys, "w2")[0]
    before = client.hgetall(keys.group(old.job))
    assert play.commit(client, keys, old, [0, 1]).outcome == "lost"
    assert not run(client, scripts.release(keys, old.job, old.token))
    assert run(client, scripts.crash(keys, old.job, old.token, "w1", "")) == "lost"
    fail = scripts.fail(keys, old.job, old.token, "w1", reason="r", detail="", max_attempts=1, retry_ms=1)
    assert run(client, fail) == "lost"
    assert not run(client, scripts.checkpoint(keys, old.job, old.token, 0, b"late", 60))
    assert client.hgetall(keys.group(old.job)) == before
    assert client.get(keys.partial(f"{old.job}/0")) is None
    assert play.commit(client, keys, new, [0, 1]).outcome == "ready"
    assert client.exists(keys.payload(f"{old.job}/0", old.token), keys.payload(f"{new.job}/0", new.token)) == 2
    play.assert_conserved(client, keys)


def test_lost_reply_of_a_lease_is_found_and_released(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0), play.job(1)])
    known, _ = play.lease(client, keys, "w1", most=2)
    assert run(client, scripts.abandon(keys, "train", "w1", [known.job])) == ["d/0/1"]
    assert [held.lane for held in play.lease(client, keys, "w2", most=5)] == ["resume"]
    assert play.commit(client, keys, known, [0, 1]).outcome == "ready"
    play.assert_conserved(client, keys)


# --- commits ------------------------------------------------------------------------------------------------------


def test_I2_a_sample_is_committed_once_whoever_tries(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0, n=3)])
    old = play.lease(client, keys, "w1")[0]
    assert play.commit(client, keys, old, [0]).new == 1
    run(client, scripts.release(keys, old.job, old.token))
    new = play.lease(client, keys, "w2")[0]
    assert new.committed == {0}
    second = play.commit(client, keys, new, [0, 1])
    assert (second.new, second.taken) == (1, 1)
    assert play.commit(client, keys, new, [2]).outcome == "ready"
    assert play.counter(client, keys, "committed") == 3
    assert play.counter(client, keys, "refused") == 1


def test_I2_the_same_commit_again_answers_already(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    held = play.lease(client, keys)[0]
    play.commit(client, keys, held, [0, 1])
    again = play.commit(client, keys, held, [0, 1])
    assert (again.outcome, again.new, again.again) == ("ready", 0, 2)
    assert client.zcard(keys.ready) == 1
    assert client.xlen(keys.samples) == 1


def test_group_is_ready_only_with_all_samples_and_leaves_its_lane(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    held = play.lease(client, keys)[0]
    assert play.commit(client, keys, held, [1]).outcome == "ok"
    assert play.state(client, keys, held.job) == "leased"
    assert play.commit(client, keys, held, [0]).outcome == "ready"
    assert client.xlen(keys.jobs("train")) == 0
    assert client.zcard(keys.inflight) == 0
    play.assert_conserved(client, keys)


# --- crashes, retries, burial -------------------------------------------------------------------------------------


def test_poison_job_goes_to_suspect_after_two_crashes_and_is_buried_by_the_third(
    client: redis.Redis, keys: Keys
) -> None:
    play.admit(client, keys, [play.job(0), play.job(1)])
    poison, innocent = play.lease(client, keys, most=2)
    went = [run(client, scripts.crash(keys, held.job, held.token, "w1", "boom")) for held in (poison, innocent)]
    assert went == ["resume", "resume"]
    poison = play.lease(client, keys)[0]
    assert run(client, scripts.crash(keys, poison.job, poison.token, "w1", "boom")) == "suspect"
    poison = play.lease(client, keys)[0]
    assert poison.lane == "suspect"
    assert run(client, scripts.crash(keys, poison.job, poison.token, "w1", "boom")) == "dead"
    letter = client.xrange(keys.dead)[0][1]
    assert (letter[b"reason"], letter[b"crashes"], letter[b"detail"]) == (b"crashed", b"3", b"boom")
    assert [held.job for held in play.lease(client, keys, most=9)] == [innocent.job]
    play.assert_conserved(client, keys)


def _hand_back(client: redis.Redis, keys: Keys, held: RawLease, by: str, death: str) -> None:
    if by == "release":
        assert run(client, scripts.release(keys, held.job, held.token, worker="w1", death=death))
    else:
        assert run(client, scripts.abandon(keys, held.lane, "w1", [], death=death)) == [held.job]


@pytest.mark.parametrize("by", ["release", "abandon"])
def test_the_third_worker_that_dies_of_an_error_under_a_job_charges_it_and_the_fourth_buries_it(
    client: redis.Redis, keys: Keys, by: str
) -> None:
    play.admit(client, keys, [play.job(0)])
    lanes = []
    for death in ("", "first", "", "second", "third", "", "fourth"):
        held = play.lease(client, keys, "w1")[0]
        lanes.append((held.lane, held.crashes))
        _hand_back(client, keys, held, by, death)
        play.assert_conserved(client, keys)
    drained = [("train", 0), *[("resume", 0)] * 4]
    assert lanes == [*drained, ("suspect", 2), ("suspect", 2)], "a worker that drains charges nobody"
    letter = client.xrange(keys.dead)[0][1]
    says = b"its worker died of an error 4 times while it ran; the last one: fourth"
    assert (letter[b"reason"], letter[b"crashes"], letter[b"detail"]) == (b"crashed", b"3", says)
    assert run(client, scripts.requeue(keys, held.job, "policy"))
    assert client.hmget(keys.group(held.job), "cr", "wd") == [None, None]


def test_one_suspect_at_a_time_per_worker(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0), play.job(1)])
    for _ in range(2):
        for held in play.lease(client, keys, most=2):
            run(client, scripts.crash(keys, held.job, held.token, "w1", ""))
    assert len(play.lease(client, keys, most=9, suspects=1)) == 1
    assert play.lease(client, keys, most=9, suspects=0) == []


def test_reclaim_takes_only_leases_that_ran_out_and_charges_them(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0), play.job(1)])
    stale, fresh = play.lease(client, keys, most=2)
    eid = client.hget(keys.group(stale.job), "eid")
    client.xclaim(keys.jobs("train"), "workers", "w1", 0, [eid], idle=50_000, justid=True)
    moved = _reclaim(client, keys, lease_ms=20_000)
    assert moved == [(stale.job, "w1", "resume")]
    assert play.state(client, keys, fresh.job) == "leased"
    assert client.hget(keys.group(stale.job), "cr") == b"1"
    play.assert_conserved(client, keys)


def _reclaim(client: redis.Redis, keys: Keys, lease_ms: int) -> object:
    play.in_contact(client, keys)
    return run(client, scripts.reclaim(keys, "train", "me", lease_ms))


@pytest.mark.parametrize("broken", ["no look yet", "a look long ago", "another server", "a clock set back"])
def test_reclaim_waits_one_lease_after_unbroken_contact_began(client: redis.Redis, keys: Keys, broken: str) -> None:
    play.admit(client, keys, [play.job(0)])
    held = play.lease(client, keys)[0]
    eid = client.hget(keys.group(held.job), "eid")
    client.xclaim(keys.jobs("train"), "workers", "w1", 0, [eid], idle=10**9, justid=True)
    play.in_contact(client, keys)
    last = int(client.hget(keys.of("contact"), "last:reclaim"))
    match broken:
        case "no look yet":
            client.delete(keys.of("contact"))
        case "a look long ago":
            client.hset(keys.of("contact"), "last:reclaim", last - 10**7)
        case "another server":
            client.hset(keys.of("contact"), "server:reclaim", "0" * 40)
        case "a clock set back":
            client.hset(keys.of("contact"), "last:reclaim", last + 10**7)
    assert run(client, scripts.reclaim(keys, "train", "me", 10**6)) == "contact"
    assert run(client, scripts.reclaim(keys, "train", "me", 10**6)) == "contact", "a lease has not gone by since"
    assert play.state(client, keys, held.job) == "leased"
    since = int(client.hget(keys.of("contact"), "since:reclaim"))
    client.hset(keys.of("contact"), "since:reclaim", since - 10**6 - 1)
    assert run(client, scripts.reclaim(keys, "train", "me", 10**6)) == [(held.job, "w1", "resume")]


def test_only_the_elected_reclaimer_reclaims(client: redis.Redis, keys: Keys) -> None:
    run(client, scripts.reclaim(keys, "train", "first", 10**8))
    assert run(client, scripts.reclaim(keys, "train", "second", 1)) == "elected"


def test_failed_job_waits_doubles_and_is_buried_with_its_reason(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    for attempt in range(3):
        held = play.lease(client, keys)[0]
        assert held.attempts == attempt
        fail = scripts.fail(
            keys,
            held.job,
            held.token,
            "w1",
            reason="reward_raised",
            detail="tb",
            max_attempts=3,
            retry_ms=60_000,
            max_retry_ms=600_000,
        )
        outcome = run(client, fail)
        if attempt < 2:
            assert outcome == "delayed"
            due_in = client.zscore(keys.delayed, held.job) - client.time()[0] * 1000
            assert 60_000 * 2**attempt - 2000 <= due_in <= 60_000 * 2**attempt + 1000
            assert run(client, scripts.due(keys)) == 0
            client.zadd(keys.delayed, {held.job: 0})
            assert run(client, scripts.due(keys)) == 1
        play.assert_conserved(client, keys)
    assert outcome == "dead"
    assert client.xrange(keys.dead)[0][1][b"reason"] == b"reward_raised"


def test_a_try_that_failed_while_the_clock_of_redis_was_ahead_waits_no_longer_than_it_would_have(
    client: redis.Redis, keys: Keys
) -> None:
    def now_ms() -> float:
        seconds, micros = client.time()
        return 1000 * seconds + micros / 1000

    play.admit(client, keys, [play.job(index) for index in range(4)])
    held = play.lease(client, keys, most=4)
    for one, wait_ms in zip(held, (600_000, 1_000, 600_000, 600_000), strict=True):
        about: dict[str, Any] = {"reason": "reward_raised", "detail": "", "max_attempts": 3, "retry_ms": wait_ms}
        failed = scripts.fail(keys, one.job, one.token, "w1", max_retry_ms=600_000, **about)
        assert run(client, failed) == "delayed"
    of_a_day, of_a_moment, as_it_is, older = (one.job for one in held)
    client.zincrby(keys.delayed, 86_400_000, of_a_day)
    client.zincrby(keys.delayed, 500_000, of_a_moment)
    # What an older worker wrote stays where it is, and hides nothing.
    client.zincrby(keys.delayed, 90_000_000, older)
    client.hdel(keys.group(older), "wt")
    before = {job: client.zscore(keys.delayed, job) for job in (as_it_is, older)}

    since = now_ms()
    assert run(client, scripts.due(keys)) == 0
    until = now_ms()
    for job, wait_ms in ((of_a_day, 600_000), (of_a_moment, 1_000)):
        assert since - 1 <= client.zscore(keys.delayed, job) - wait_ms <= until
    assert {job: client.zscore(keys.delayed, job) for job in before} == before
    client.zadd(keys.delayed, {of_a_day: 0, of_a_moment: 0})
    assert run(client, scripts.due(keys)) == 2
    assert not client.hexists(keys.group(of_a_day), "wt")
    play.assert_conserved(client, keys)


def test_a_lease_that_was_renewed_while_the_clock_of_redis_was_ahead_ends_in_its_time(
    client: redis.Redis, keys: Keys
) -> None:
    lease_ms = 600_000
    takes: dict[str, Callable[[str], Any]] = {
        keys.leader: lambda token: scripts.lead(keys, token, lease_ms),
        keys.recorder: lambda token: scripts.record(keys, token, lease_ms=lease_ms, backlog=1, patience_ms=1),
        keys.owner("actor"): lambda token: scripts.join(keys, "actor", token, lease_ms),
    }
    for key, take in takes.items():
        run(client, take("first"))
        client.pexpire(key, 86_400_000)
        run(client, take("second"))
        assert 0 < client.pttl(key) <= lease_ms, key


def test_a_lease_that_is_longer_than_anothers_is_not_cut_short(client: redis.Redis, keys: Keys) -> None:
    assert run(client, scripts.lead(keys, "first", 600_000))
    assert not run(client, scripts.lead(keys, "second", 1_000))
    assert client.pttl(keys.leader) > 1_000


def test_requeue_digs_up_once(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    held = play.lease(client, keys)[0]
    run(client, scripts.fail(keys, held.job, held.token, "w1", reason="r", detail="", max_attempts=0, retry_ms=1))
    assert run(client, scripts.requeue(keys, held.job, play.MODEL))
    assert not run(client, scripts.requeue(keys, held.job, play.MODEL))
    assert play.lease(client, keys)[0].body == play.job(0).to_bytes()
    play.assert_conserved(client, keys)


@pytest.mark.parametrize("where", ["queued", "leased", "delayed", "dead", "ready"])
def test_cancel_takes_a_job_out_of_wherever_it_is(client: redis.Redis, keys: Keys, where: str) -> None:
    play.subscribe(client, keys)
    play.admit(client, keys, [play.job(0)])
    if where != "queued":
        held = play.lease(client, keys)[0]
        if where == "ready":
            play.commit(client, keys, held, [0, 1])
        elif where != "leased":
            tries = 3 if where == "delayed" else 1
            run(client, scripts.fail(keys, held.job, held.token, "w", reason="r", detail="", max_attempts=tries,
                                     retry_ms=1000))  # fmt: skip
    assert run(client, scripts.cancel(keys, "d/0/0", ["actor"])) == where
    assert play.state(client, keys, "d/0/0") == "retiring"
    assert run(client, scripts.cancel(keys, "d/0/0", ["actor"])) == ""
    assert play.lease(client, keys, most=5) == []
    play.assert_conserved(client, keys)


def test_checkpointed_prefix_keeps_the_first_version_in_flight(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0), play.job(1)])
    begun, untouched = play.lease(client, keys, most=2, version=3)
    assert run(client, scripts.checkpoint(keys, begun.job, begun.token, 0, b"prefix", 60))
    for held in (begun, untouched):
        run(client, scripts.release(keys, held.job, held.token))
    assert client.zrange(keys.inflight, 0, -1, withscores=True) == [(begun.job.encode(), 3.0)]
    play.lease(client, keys, "w2", most=2, version=7)
    assert dict(client.zrange(keys.inflight, 0, -1, withscores=True)) == {
        begun.job.encode(): 3.0,
        untouched.job.encode(): 7.0,
    }


# --- the buffer's leader ------------------------------------------------------------------------------------------


def test_one_leader_and_a_new_epoch_after_its_lease(client: redis.Redis, keys: Keys) -> None:
    first = play.lead(client, keys, "a")
    assert run(client, scripts.lead(keys, "b", 1000)) == 0
    assert run(client, scripts.lead(keys, "a", 60_000)) == first.epoch
    client.delete(keys.leader)
    second = play.lead(client, keys, "b")
    assert second.epoch == first.epoch + 1
    assert run(client, scripts.lead(keys, "a", 1000)) == 0
    assert not run(client, scripts.resign(keys, first))
    assert run(client, scripts.resign(keys, second))


def test_deposed_leader_changes_nothing(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    play.admit(client, keys, [play.job(0)])
    jobs = play.complete(client, keys, 1)
    old = play.lead(client, keys, "a")
    client.delete(keys.leader)
    new = play.lead(client, keys, "b")
    play.keep(client, keys, new, jobs)
    before = client.hgetall(keys.group(jobs[0]))
    revision = play.revision(client, keys)
    refused = [
        lambda: play.keep(client, keys, old, jobs),
        lambda: play.cut(client, keys, old, 1, jobs),
        lambda: run(client, scripts.dispose(keys, old, "actor", Disposal.STALE, jobs)),
        lambda: run(client, scripts.judge(keys, old, "actor", [scripts.Judged(jobs[0], "bad", False, 2, 0.0)])),
        lambda: play.seal(client, keys, old, jobs),
        lambda: run(client, scripts.park(keys, old, "actor", revision=revision, absent_ms=1)),
        lambda: run(client, scripts.grant(keys, old, "actor", 1, 0, ["actor"])),
        lambda: run(client, scripts.sweep(keys, old, [(jobs[0], 2)])),
        lambda: run(client, scripts.shorten(keys, old, jobs[0])),
        lambda: run(client, scripts.drop(keys, old, jobs[0])),
    ]
    for verb in refused:
        with pytest.raises(LeadershipLost):
            verb()
    assert client.hgetall(keys.group(jobs[0])) == before


def test_I5_cut_takes_only_ready_kept_unused_groups_and_each_number_once(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    play.admit(client, keys, [play.job(i) for i in range(4)])
    jobs = play.complete(client, keys, 3)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, jobs[:2])
    assert play.cut(client, keys, leader, 1, [jobs[2]]).why == "not kept"
    assert play.cut(client, keys, leader, 1, ["d/0/3"]).why == "not ready"
    assert play.cut(client, keys, leader, 2, jobs[:1]).outcome == "order"
    assert play.cut(client, keys, leader, 1, jobs[:1]).outcome == "cut"
    assert play.cut(client, keys, leader, 1, jobs[:1]).outcome == "already"
    used = play.cut(client, keys, leader, 2, jobs[:2])
    assert (used.job, used.why) == (jobs[0], "used")
    assert client.hget(keys.group(jobs[1]), "u:actor") is None, "nothing is written unless all may be"
    assert play.cut(client, keys, leader, 2, jobs[1:2], rev=99).outcome == "subs"
    assert client.xlen(keys.batches("actor")) == 1


def test_I6_cut_refuses_what_is_older_than_the_bound_and_a_clock_that_moved(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    play.join(client, keys)
    play.admit(client, keys, [play.job(0), play.job(1)])
    (old,) = play.complete(client, keys, 1, version=1)
    (new,) = play.complete(client, keys, 1, version=5)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, [old, new])
    assert play.cut(client, keys, leader, 1, [new, old], oldest_allowed=4).why == "stale"
    play.publish(client, keys, 1, 0)
    assert play.cut(client, keys, leader, 1, [new], version=0).outcome == "clock"
    assert play.cut(client, keys, leader, 1, [new], version=1, oldest_allowed=4).outcome == "cut"


def test_close_makes_a_short_group(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0, n=3)])
    leader = play.lead(client, keys)
    held = play.lease(client, keys)[0]
    assert run(client, scripts.shorten(keys, leader, held.job)) == 0
    play.commit(client, keys, held, [2])
    assert run(client, scripts.shorten(keys, leader, held.job)) == 1
    assert play.commit(client, keys, held, [0]).outcome == "lost"
    play.assert_conserved(client, keys)


def test_I4_a_group_retires_only_when_a_checkpoint_is_past_it(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    play.join(client, keys)
    play.admit(client, keys, [play.job(0)])
    jobs = play.complete(client, keys, 1)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, jobs)
    assert play.seal(client, keys, leader, jobs) == [], "not used yet"
    play.cut(client, keys, leader, 1, jobs)
    play.commit_batch(client, keys, 1)
    assert play.seal(client, keys, leader, jobs) == [], "a restored trainer may need it again"
    assert run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=1)) == 1
    assert play.seal(client, keys, leader, jobs) == jobs
    assert play.counter(client, keys, "retired") == 1
    assert client.getbit(keys.done("d", 0), 0) == 1
    assert play.counter(client, keys, "duplicated") == 0
    play.assert_conserved(client, keys)
    assert run(client, scripts.sweep(keys, leader, [(jobs[0], 2)])) == 1
    assert play.state(client, keys, jobs[0]) == "gone"
    play.assert_conserved(client, keys)


def test_seal_waits_for_every_subscription_of_the_lane(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys, "actor")
    play.subscribe(client, keys, "critic", driving=0)
    play.subscribe(client, keys, "exam", lanes="eval", driving=0)
    play.join(client, keys)
    play.admit(client, keys, [play.job(0)])
    jobs = play.complete(client, keys, 1)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, jobs)
    play.cut(client, keys, leader, 1, jobs)
    play.commit_batch(client, keys, 1)
    run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=1))
    every = ("actor", "critic", "exam")
    assert play.seal(client, keys, leader, jobs, every) == []
    run(client, scripts.dispose(keys, leader, "critic", Disposal.FILTERED, jobs))
    assert play.seal(client, keys, leader, jobs, every) == jobs


# --- trainers -----------------------------------------------------------------------------------------------------


def test_one_owner_per_subscription_until_its_lease_ends(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    assert play.join(client, keys, "a").mine
    other = play.join(client, keys, "b")
    assert (other.mine, other.holder_ms > 0) == (False, True)
    client.delete(keys.owner("actor"))
    assert play.join(client, keys, "b").mine
    assert not run(client, scripts.join(keys, "actor", "a", 1000, only_renew=True)).mine
    assert not run(client, scripts.ask(keys, "actor", 1, "a", 0))


def _with_batches(client: redis.Redis, keys: Keys, count: int) -> scripts.Leadership:
    play.subscribe(client, keys)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [play.job(i) for i in range(count)])
    jobs = play.complete(client, keys, count, version=1)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, jobs)
    for n, one in enumerate(jobs, 1):
        assert play.cut(client, keys, leader, n, [one]).outcome == "cut"
    return leader


def test_I5_cursor_moves_when_the_last_rank_commits(client: redis.Redis, keys: Keys) -> None:
    _with_batches(client, keys, 2)
    assert play.commit_batch(client, keys, 2).outcome == "order"
    assert play.commit_batch(client, keys, 1, rank=1, ranks=2).outcome == "waiting"
    assert play.commit_batch(client, keys, 1, rank=1, ranks=2).outcome == "waiting"
    assert play.commit_batch(client, keys, 1, rank=0, ranks=2).outcome == "committed"
    assert play.commit_batch(client, keys, 1, rank=0, ranks=2).outcome == "already"
    assert play.commit_batch(client, keys, 3).outcome == "unknown"


def test_commit_of_a_batch_that_was_cut_anew_is_seen(client: redis.Redis, keys: Keys) -> None:
    _with_batches(client, keys, 1)
    call = scripts.commit_batch(keys, "actor", owner="owner-1", gen=0, n=1, digest="other", rank=0, ranks=1)
    assert run(client, call).outcome == "diverged"


def test_T1_the_clock_goes_up_by_one_and_consumes_only_committed_batches(client: redis.Redis, keys: Keys) -> None:
    _with_batches(client, keys, 2)
    with pytest.raises(PublishError, match="the next version is 2"):
        play.publish(client, keys, 3, 0)
    with pytest.raises(PublishError, match="not committed"):
        play.publish(client, keys, 2, 1)
    play.commit_batch(client, keys, 1)
    assert play.publish(client, keys, 2, 1) == 2
    assert play.publish(client, keys, 2, 1) == 2, "said twice, moved once"
    with pytest.raises(PublishError, match="consumed it already"):
        play.publish(client, keys, 3, 1)
    with pytest.raises(PublishError, match="another trainer"):
        play.publish(client, keys, 3, 2, owner="stranger")


def test_T1_rewind_abandons_versions_and_delivers_the_same_batches_again(client: redis.Redis, keys: Keys) -> None:
    _with_batches(client, keys, 3)
    for n in (1, 2):
        play.commit_batch(client, keys, n)
        play.publish(client, keys, n + 1, n)
    before = client.xrange(keys.batches("actor"))
    rewound = play.rewind(client, keys, 1)
    assert (rewound.outcome, rewound.gen) == ("rewound", 1)
    assert client.hget(keys.sub("actor"), "abandoned") == b"3-3"
    assert client.xrange(keys.batches("actor")) == before
    assert play.commit_batch(client, keys, 2).outcome == "owner", "the old generation commits nothing"
    with pytest.raises(PublishError, match="the next version is 4"):
        play.publish(client, keys, 3, 1, gen=1)
    assert play.publish(client, keys, 4, 1, gen=1) == 4
    assert play.commit_batch(client, keys, 2, gen=1).outcome == "committed"


def test_rewind_races_with_retirement_and_loses_nothing(client: redis.Redis, keys: Keys) -> None:
    leader = _with_batches(client, keys, 2)
    play.commit_batch(client, keys, 1)
    play.commit_batch(client, keys, 2)
    run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=2))
    assert play.rewind(client, keys, 1).outcome == "rewound"
    assert play.seal(client, keys, leader, ["d/0/1"]) == [], "the checkpoint went back with the cursor"
    assert play.seal(client, keys, leader, ["d/0/0"]) == ["d/0/0"]
    refused = play.rewind(client, keys, 0, gen=1)
    assert (refused.outcome, refused.limit) == ("floor", 1)


def test_T3_rewind_takes_back_what_the_gate_counted_as_consumed(client: redis.Redis, keys: Keys) -> None:
    _with_batches(client, keys, 2)
    play.commit_batch(client, keys, 1)
    play.publish(client, keys, 2, 1)
    assert client.hget(keys.sub("actor"), "p") == b"1"
    play.rewind(client, keys, 0)
    assert client.hget(keys.sub("actor"), "p") == b"0"


def test_T4_lengths_of_groups_given_up_for_their_age_are_counted_once(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    play.admit(client, keys, [play.job(i) for i in range(3)])
    done = play.complete(client, keys, 3)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, done)
    call = scripts.dispose(keys, leader, "actor", Disposal.STALE, done[:2], [(2, 300), (2, 5)])
    assert [run(client, call), run(client, call)] == [2, 0]
    run(client, scripts.dispose(keys, leader, "actor", Disposal.QUOTA, done[2:]))
    assert client.hmget(keys.sub("actor"), "aged_samples", "aged_tokens", "disposed") == [b"4", b"305", b"3"]


# --- a full Redis -------------------------------------------------------------------------------------------------


def test_full_redis_refuses_admission_and_commit_but_lets_go(
    redis_server: RedisServer, client: redis.Redis, keys: Keys
) -> None:
    play.subscribe(client, keys)
    play.admit(client, keys, [play.job(i) for i in range(4)])
    done = play.complete(client, keys, 1)
    held, failing, parting = play.lease(client, keys, most=3)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, done)
    run(client, scripts.dispose(keys, leader, "actor", Disposal.STALE, done))
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueFull):
            play.admit(client, keys, [play.job(9)])
        with pytest.raises(QueueFull):
            run(client, scripts.commit(keys, held.job, held.token, [(0, 0, b"x")], {0: Drawn()}))
        assert run(client, scripts.renew(keys, "w1", [(held.job, held.token)])) == []
        fail = scripts.fail(keys, failing.job, failing.token, "w1", reason="r", detail="", max_attempts=3, retry_ms=9)
        assert run(client, fail) == "delayed"
        assert run(client, scripts.release(keys, parting.job, parting.token))
        assert run(client, scripts.lead(keys, "leader-1", 60_000)) == leader.epoch
        assert play.seal(client, keys, leader, done) == done
        assert run(client, scripts.sweep(keys, leader, [(done[0], 2)])) == 1
    finally:
        client.config_set("maxmemory", 0)
    play.assert_conserved(client, keys)


def test_a_retry_waits_for_no_longer_than_the_longest_pause(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    (held,) = play.lease(client, keys)
    client.hset(keys.group(held.job), "att", 40)  # 2 ** 40 s would be 35,000 years
    fail = scripts.fail(
        keys, held.job, held.token, "w1", reason="r", detail="", max_attempts=99, retry_ms=1000, max_retry_ms=5000
    )
    assert run(client, fail) == "delayed"
    seconds, microseconds = client.time()
    due = client.zscore(keys.delayed, held.job)
    assert due is not None
    assert due <= seconds * 1000 + microseconds / 1000 + 5000
