"""Verbs of the recorder: sweeping waits for it up to a backlog and its patience, and nothing else ever does."""

from collections.abc import Sequence

import pytest
import redis

from penstock.buffer.housekeeping import UnrecordedGroups
from penstock.errors import LeadershipLost, RecordingLost
from penstock.protocol import scripts
from penstock.protocol.audit import missing_jobs
from penstock.protocol.scripts import Backlog, Leadership, Recording, run
from penstock.records.keys import Keys
from penstock.records.sample import uses_of
from penstock.redis.commands import scan_keys
from tests.integration import play

LEASE_MS = 60_000


def record(client: redis.Redis, keys: Keys, token: str = "r1", backlog: int = 100, patience_ms: int = 60_000) -> int:
    call = scripts.record(keys, token, lease_ms=LEASE_MS, backlog=backlog, patience_ms=patience_ms)
    return run(client, call)


def trained(client: redis.Redis, keys: Keys, leader: Leadership, count: int = 2, reuse: int = 1) -> list[str]:
    """``count`` groups that were cut, committed and checkpointed, ``reuse`` times over."""
    play.subscribe(client, keys, gb=count, reuse=reuse)
    play.join(client, keys)
    play.admit(client, keys, [play.job(i) for i in range(count)])
    jobs = play.complete(client, keys, count)
    play.keep(client, keys, leader, jobs)
    for n in range(1, reuse + 1):
        assert play.cut(client, keys, leader, n, jobs).outcome == "cut"
        play.commit_batch(client, keys, n)
    run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=reuse))
    return jobs


def sweep(client: redis.Redis, keys: Keys, leader: Leadership, jobs: Sequence[str]) -> int:
    return run(client, scripts.sweep(keys, leader, [(job, 2) for job in jobs]))


def unrecorded(client: redis.Redis, keys: Keys, leader: Leadership) -> Backlog:
    return run(client, scripts.unrecorded(keys, leader, 512))


def in_contact(client: redis.Redis, keys: Keys) -> None:
    """The leader has looked for as long as one likes, and did so just now."""
    seconds, micros = client.time()
    server = str(client.info("server")["run_id"])
    now = 1000 * int(seconds) + int(micros) // 1000
    client.hset(keys.of("contact"), mapping={"server:history": server, "last:history": now, "since:history": 0})


def test_an_epoch_is_later_than_all_that_there_are_files_of_also_where_redis_has_forgotten_some(
    client: redis.Redis, keys: Keys
) -> None:
    def elected(token: str, newest: int = 0) -> int:
        return run(client, scripts.record(keys, token, lease_ms=LEASE_MS, backlog=9, patience_ms=9, newest=newest))

    assert elected("r1", newest=7) == 8
    assert elected("r1") == 8, "it renews its right"
    assert elected("r1", newest=8) == 8, "the files are its own"
    assert elected("r2", newest=8) == 0
    # As after a failover: another recorded meanwhile, and of that Redis knows nothing any more.
    assert elected("r1", newest=9) == 10
    client.delete(keys.recorder)
    assert elected("r2", newest=4) == 11


def test_without_a_recorder_nothing_waits(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    jobs = trained(client, keys, leader)
    assert play.seal(client, keys, leader, jobs) == jobs
    assert unrecorded(client, keys, leader) == Backlog(0, 0, 0, -1.0)
    assert sweep(client, keys, leader, jobs) == 2
    assert not client.exists(keys.unrecorded, keys.history, keys.trained("actor"))
    play.assert_conserved(client, keys)


def test_what_is_sealed_waits_for_its_rows(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    recording = Recording(record(client, keys), "r1")
    jobs = trained(client, keys, leader)
    assert play.seal(client, keys, leader, jobs) == jobs, "a seal waits for nobody"
    play.assert_conserved(client, keys)
    assert sweep(client, keys, leader, jobs) == 0, "its rows are not safe"
    assert unrecorded(client, keys, leader) == Backlog(2, 0, 0, 0)

    assert run(client, scripts.recorded(keys, recording, jobs)) == 2
    assert run(client, scripts.recorded(keys, recording, jobs)) == 0, "saying it twice changes nothing"
    play.assert_conserved(client, keys)
    assert sweep(client, keys, leader, jobs) == 2
    assert run(client, scripts.recorded(keys, recording, jobs)) == 0
    assert not client.exists(keys.retiring, keys.unrecorded)


def test_two_recorders_have_one_right(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    first = Recording(record(client, keys), "r1")
    assert record(client, keys, "r2") == 0
    assert record(client, keys, "r1") == first.epoch, "its own is renewed"
    jobs = trained(client, keys, leader)
    play.seal(client, keys, leader, jobs)

    client.delete(keys.recorder)  # its lease has run out
    second = Recording(record(client, keys, "r2"), "r2")
    assert second.epoch == first.epoch + 1
    with pytest.raises(RecordingLost):
        run(client, scripts.recorded(keys, first, jobs))
    assert client.zcard(keys.unrecorded) == 2
    assert not run(client, scripts.stop_recording(keys, first)), "what is another's stays"
    assert run(client, scripts.stop_recording(keys, second))
    assert record(client, keys, "r3") == second.epoch + 1


def test_more_than_the_backlog_goes_unrecorded_and_is_counted(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    record(client, keys, backlog=3)
    jobs = trained(client, keys, leader, 5)
    play.seal(client, keys, leader, jobs)
    assert (client.zcard(keys.unrecorded), play.counter(client, keys, "unrecorded")) == (3, 2)
    assert sweep(client, keys, leader, jobs) == 2, "those that were given up go at once"

    record(client, keys, backlog=1)
    assert unrecorded(client, keys, leader) == Backlog(1, 2, 4, 0)
    assert client.zrange(keys.unrecorded, 0, -1) == [jobs[0].encode()], "the newest are given up"
    play.assert_conserved(client, keys)


def test_a_recorder_that_stays_away_is_waited_for_with_patience(
    client: redis.Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    leader = play.lead(client, keys)
    record(client, keys, patience_ms=1000)
    jobs = trained(client, keys, leader)
    play.seal(client, keys, leader, jobs)
    client.delete(keys.recorder)
    client.hset(keys.history, "at", 1)  # it was here in 1970
    assert unrecorded(client, keys, leader).waiting == 2, "the leader has only begun to look"
    in_contact(client, keys)
    UnrecordedGroups(client, keys, leader).tend()
    assert "2 groups were not recorded (2 since the run began): no recorder has run" in caplog.text
    assert unrecorded(client, keys, leader).total == 2
    assert sweep(client, keys, leader, jobs) == 2


def test_one_that_is_there_again_loses_nothing(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    record(client, keys, patience_ms=1)
    jobs = trained(client, keys, leader)
    play.seal(client, keys, leader, jobs)
    in_contact(client, keys)
    assert unrecorded(client, keys, leader) == Backlog(2, 0, 0, 0), "it holds its lease, however slow it is"


def test_only_the_leader_gives_up(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    record(client, keys, backlog=0)
    client.delete(keys.leader)
    play.lead(client, keys, "leader-2")
    with pytest.raises(LeadershipLost):
        unrecorded(client, keys, leader)


def test_cancelled_and_dropped_groups_wait_too(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    record(client, keys)
    play.admit(client, keys, [play.job(0), play.job(1)])
    run(client, scripts.cancel(keys, "d/0/0", []))
    run(client, scripts.drop(keys, leader, "d/0/1"))
    assert client.zrange(keys.unrecorded, 0, -1) == [b"d/0/0", b"d/0/1"]
    assert client.hget(keys.group("d/0/1"), "r") == b"timed_out"
    play.assert_conserved(client, keys)
    # A job that vanished is found by what is left of it, here too.
    client.delete(keys.group("d/0/0"))
    client.delete(keys.of("done:d/0"))
    assert "d/0/0" in missing_jobs(client, keys, lambda prefix: scan_keys(client, prefix), {"d/0": {1}}, 1)


def test_every_use_stands_with_the_group(client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    record(client, keys)
    (job,) = trained(client, keys, leader, 1, reuse=2)
    raw = client.hget(keys.group(job), "h:actor")
    first, second = uses_of(raw, "group")
    assert (first.batch, second.batch) == (1, 2)
    assert first.cut_s <= second.cut_s
    times = client.hgetall(keys.trained("actor"))
    assert set(times) == {b"1", b"2"}
    assert int(times[b"2"]) >= int(1000 * second.cut_s)


def test_the_time_of_admission_outlives_a_second_try(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    admitted = client.hget(keys.group("d/0/0"), "eid").split(b"-")[0]
    (held,) = play.lease(client, keys)
    run(client, scripts.release(keys, held.job, held.token))
    assert client.hget(keys.group("d/0/0"), "ta") == admitted
