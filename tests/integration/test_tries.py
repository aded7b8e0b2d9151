"""Every lease of a job is told, with who held it and how it ended, and the list stays short."""

from collections.abc import Callable

import pytest
import redis

from penstock.consumers.history.retired import read_retired
from penstock.protocol import scripts
from penstock.protocol.scripts import RawLease, run
from penstock.records.job import Try, tries_of
from penstock.records.keys import Keys
from tests.integration import play

Verb = Callable[[redis.Redis, Keys, RawLease], object]


def tries(client: redis.Redis, keys: Keys, job: str = "d/0/0") -> list[Try]:
    (group,) = read_retired(client, keys, [job])
    assert not group.broken
    return tries_of(group.tries, job, ready_s=group.ready_s)


def release(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    return run(client, scripts.release(keys, held.job, held.token))


def abandon(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    return run(client, scripts.abandon(keys, held.lane, "w1", []))


def die(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    return run(client, scripts.release(keys, held.job, held.token, worker="w1", death="an error"))


def fail(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    call = scripts.fail(keys, held.job, held.token, "w1", reason="a:b;c", detail="", max_attempts=2, retry_ms=1)
    return run(client, call)


def crash(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    return run(client, scripts.crash(keys, held.job, held.token, "w1", ""))


def cancel(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    return run(client, scripts.cancel(keys, held.job, []))


def drop(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    return run(client, scripts.drop(keys, play.lead(client, keys), held.job))


def reclaim(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    eid = client.hget(keys.group(held.job), "eid")
    client.xclaim(keys.jobs(held.lane), "workers", "w1", 0, [eid], idle=50_000, justid=True)
    play.in_contact(client, keys)
    return run(client, scripts.reclaim(keys, held.lane, "me", 20_000))


def shorten(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    play.commit(client, keys, held, [0])
    return run(client, scripts.shorten(keys, play.lead(client, keys), held.job, 1))


def commit(client: redis.Redis, keys: Keys, held: RawLease) -> object:
    return play.commit(client, keys, held, [0, 1])


@pytest.mark.parametrize(
    ("verb", "end"),
    [
        (release, "released"),
        (die, "died"),
        (abandon, "unheard"),
        (fail, "failed a_b_c"),
        (crash, "crashed"),
        (cancel, "cancelled"),
        (drop, "timed_out"),
        (reclaim, "reclaimed"),
        (shorten, "shortened"),
        (commit, "committed"),
    ],
)
def test_a_try_ends_by_its_name(client: redis.Redis, keys: Keys, verb: Verb, end: str) -> None:
    play.admit(client, keys, [play.job(0)])
    (held,) = play.lease(client, keys)
    (in_flight,) = tries(client, keys)
    assert (in_flight.number, in_flight.lane, in_flight.worker, in_flight.end) == (1, "train", "w1", "")
    assert verb(client, keys, held)
    (ended,) = tries(client, keys)
    assert (ended.end, ended.leased_s) == (end, in_flight.leased_s)
    assert ended.ended_s >= ended.leased_s > 0
    play.assert_conserved(client, keys)


def test_the_last_sixteen_tries_are_told_and_the_earlier_ones_counted(client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(0)])
    for number in range(40):
        (held,) = play.lease(client, keys, worker=f"w{number}")
        assert [one.worker for one in tries(client, keys)] == [f"w{n}" for n in range(max(0, number - 15), number + 1)]
        release(client, keys, held)
    assert [one.number for one in tries(client, keys)] == list(range(25, 41))
    assert {one.end for one in tries(client, keys)} == {"released"}
