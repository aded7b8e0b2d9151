"""A payload store: a Redis of its own, as workers, the leader, trainers and operators use it."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis

from penstock.buffer.housekeeping import OrphanedPayloads
from penstock.buffer.payload_servers import PayloadServers
from penstock.config import RedisConfig
from penstock.consumers.batch.fetch import PayloadReader
from penstock.errors import ConfigError, QueueFull, QueueUnavailable, WaitTimeout
from penstock.payloads import servers as payload_servers
from penstock.payloads.store import AsyncPayloadStore, PayloadStore, open_store
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.causes import PayloadServersAway
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.manifest import Row
from penstock.redis.connect import connect
from penstock.redis.control import PASSING, AsyncControl
from penstock.redis.server import RedisServer
from penstock.workers.jobs.payload_stores import PayloadStores
from tests.integration import play
from tests.integration.parts import until


@dataclass
class Place:
    """One store, and what is done to it from outside."""

    store: PayloadStore
    writer: AsyncPayloadStore
    #: Leaves no room for what is written from now on.
    fill: Callable[[], object]
    #: Takes it away.
    kill: Callable[[], object]

    async def put(self, *pairs: tuple[str, bytes], ttl_s: int = 600) -> list[QueueFull | None]:
        return await self.writer.put(pairs, ttl_s)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    server = RedisServer(tmp_path / "a place")
    with connect(server.start()) as client:
        writer = AsyncPayloadStore(AsyncControl(server.url, patience_s=0))
        yield Place(open_store(server.url), writer, lambda: client.config_set("maxmemory", 1), server.kill)
        await writer.close()
    server.stop()


@pytest.fixture
def store(place: Place) -> PayloadStore:
    return place.store


def payload(keys: Keys, i: int, token: str = "t.1") -> str:
    return keys.payload(f"d a/0/{i}/3", token)


async def test_a_payload_is_written_kept_read_and_freed(place: Place, store: PayloadStore, keys: Keys) -> None:
    store.check()
    one, other = payload(keys, 7), payload(keys, 8)
    assert await place.put((one, b"abcdef"), (other, b"x")) == [None, None]
    assert sorted(store.names(keys.prefix)) == [(one, False), (other, False)]
    assert store.read([one]) == [b"abcdef"], "it may be read before the leader has seen it"
    for _ in range(2):
        assert store.keep([one, payload(keys, 9)]) == [True, False]
    assert sorted(store.names(keys.prefix)) == [(one, True), (other, False)]
    assert store.read([other, payload(keys, 9), one]) == [b"x", None, b"abcdef"]
    for _ in range(2):
        store.unlink([one, one])
    assert store.read([one, other]) == [None, b"x"]
    assert list(store.names(keys.prefix)) == [(other, False)]


async def test_a_range_that_is_not_there_is_told_from_one_that_is(
    place: Place, store: PayloadStore, keys: Keys
) -> None:
    await place.put((payload(keys, 0), b"abcdef"))
    wanted = [(payload(keys, 0), 2, 3), (payload(keys, 0), 0, 6), (payload(keys, 0), 6, 3), (payload(keys, 1), 0, 3)]
    assert store.read_ranges(wanted) == [b"cde", b"abcdef", None, None]


async def test_I3_what_is_said_twice_is_there_once_and_another_leases_bytes_are_another_payload(
    place: Place, store: PayloadStore, keys: Keys
) -> None:
    mine, late = payload(keys, 7), payload(keys, 7, "t.2")
    await place.put((mine, b"mine"))
    store.keep([mine])
    await place.put((late, b"late"), (mine, b"mine"))
    assert store.read([mine, late]) == [b"mine", b"late"]
    assert store.keep([mine]) == [True]
    store.unlink([mine])
    assert store.read([mine, late]) == [None, b"late"], "nothing is left of what was said twice"


async def test_a_worker_reads_back_what_it_wrote_and_its_time_begins_anew(
    place: Place, store: PayloadStore, keys: Keys
) -> None:
    renewed, old, none = [payload(keys, i) for i in range(3)]
    await place.put((renewed, b"new"), (old, b"old"), ttl_s=60)
    await place.writer.renew([renewed, none], 600)
    assert await place.writer.read([renewed, none, old]) == [b"new", None, b"old"]
    assert 500 < store.client.ttl(renewed) <= 600
    assert store.client.ttl(old) <= 60


async def test_what_nobody_keeps_in_time_is_gone(place: Place, store: PayloadStore, keys: Keys) -> None:
    kept, forgotten = payload(keys, 0), payload(keys, 1)
    await place.put((kept, b"x"), (forgotten, b"x"), ttl_s=1)
    store.keep([kept])

    until(lambda: list(store.names(keys.prefix)) == [(kept, True)], "what is not kept to expire")
    assert store.read([kept, forgotten]) == [b"x", None]


async def test_what_is_kept_no_more_is_there_for_a_time_unless_it_is_kept_again(
    place: Place, store: PayloadStore, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.payloads.store.PAYLOAD_TTL_S", 1)
    kept, again, pending = (payload(keys, i) for i in range(3))
    await place.put((kept, b"x"), (again, b"y"), (pending, b"z"))
    store.keep([kept, again])
    store.unkeep([kept, again, payload(keys, 9)])
    assert sorted(store.names(keys.prefix)) == [(kept, False), (again, False), (pending, False)]
    assert store.read([again]) == [b"y"]
    assert store.keep([again]) == [True]

    until(lambda: kept not in dict(store.names(keys.prefix)), "what is kept no more to expire")
    assert (again, True) in list(store.names(keys.prefix))


async def test_I4_what_redis_forgot_that_was_committed_is_kept_no_more(
    redis_server: RedisServer, client: redis.Redis, place: Place, store: PayloadStore, keys: Keys
) -> None:
    """As after a failover: payloads on a server of their own do not go back with Redis."""
    play.admit(client, keys, [play.job(i, n=3) for i in range(2)])
    held, half = play.lease(client, keys, most=2)
    play.commit(client, keys, held, [0])
    play.commit(client, keys, half, [1])
    there, side = keys.payload(f"{held.job}/0", held.token), keys.side(f"{held.job}/0", held.token, "experts")
    # Another lease may have made the first of those that were committed together.
    together = keys.payload(f"{held.job}/1", held.token)
    client.hset(keys.group(held.job), "s:1", "another")
    shared = replace(play.meta(2, held.token), shared=[1, 0, 1])
    run(client, scripts.commit(keys, held.job, held.token, [(2, 0, shared.to_bytes())]))
    forgotten = [
        keys.payload(f"{half.job}/0", half.token),
        keys.payload(f"{held.job}/1", "forgotten"),
        keys.payload("d/0/99/0", "t"),
        keys.side("d/0/99/0", "t", "experts"),
    ]
    await place.put(*[(name, b"x") for name in (there, side, together, *forgotten)])
    store.keep([there, side, together, *forgotten])
    config = RedisConfig(url=redis_server.url, payload_servers={"p": store.url})
    with contextlib.closing(PayloadServers(config, client, keys)) as servers:
        looks = OrphanedPayloads(client, keys, servers)
        looks.tend()
        assert all(kept for _, kept in store.names(keys.prefix)), "nobody has asked this server anything yet"
        servers.persist([("p", there)])
        looks.tend()
        found = {name for name, kept in store.names(keys.prefix) if not kept}
        assert found == set(forgotten)
        looks.tend()
        store.keep(forgotten)
        looks.tend()
        assert all(kept for _, kept in store.names(keys.prefix)), "it is looked at once"


async def test_I8_a_look_for_what_redis_forgot_goes_on_when_its_server_answers(
    redis_server: RedisServer, client: redis.Redis, place: Place, store: PayloadStore, keys: Keys
) -> None:
    name = payload(keys, 0)
    await place.put((name, b"x"))
    store.keep([name])
    config = RedisConfig(url=redis_server.url, payload_servers={"p": store.url})
    with contextlib.closing(PayloadServers(config, client, keys)) as servers, pytest.MonkeyPatch.context() as patch:
        servers.persist([("p", name)])
        looks = OrphanedPayloads(client, keys, servers)

        def silent(prefix: str) -> Iterator[tuple[str, bool]]:
            raise redis.ConnectionError("it does not answer")

        patch.setattr(type(store), "names", lambda self, prefix: silent(prefix))
        looks.tend()
        assert servers.is_away("p")
        patch.undo()

        def look() -> list[tuple[str, bool]]:
            looks.tend()
            return list(store.names(keys.prefix))

        until(lambda: look() == [(name, False)], "the look to go on")
        looks.tend()
        store.keep([name])
        looks.tend()
        assert list(store.names(keys.prefix)) == [(name, True)], "it is looked at once"
        patch.setattr(type(store), "keep", lambda self, names: next(silent(keys.prefix)))
        servers.persist([("p", name)])
        looks.tend()
        patch.undo()
        until(lambda: look() == [(name, False)], "another look, since it may have gone back")


async def test_a_run_is_deleted_and_no_other(place: Place, store: PayloadStore, keys: Keys) -> None:
    longer = Keys(f"{keys.run}2")
    await place.put((payload(keys, 0), b"x"), (payload(keys, 1), b"x"), (payload(longer, 0), b"x"))
    store.keep([payload(keys, 0)])
    assert store.delete(keys.prefix) == 2
    assert store.delete(keys.prefix) == 0
    assert list(store.names(keys.prefix)) == []
    assert store.read([payload(longer, 0)]) == [b"x"]
    used, total = store.usage()
    assert used > 0
    assert total == 0 or total > used


async def test_a_full_store_refuses_what_finds_no_room_and_keeps_the_rest(
    place: Place, store: PayloadStore, keys: Keys
) -> None:
    await place.put((payload(keys, 0), b"x"))
    place.fill()
    refused = await place.put((payload(keys, 1), b"x"), (payload(keys, 2), b"x"))
    assert [type(refusal) for refusal in refused] == [QueueFull, QueueFull]
    assert store.keep([payload(keys, 0), payload(keys, 1)]) == [True, False]
    store.unlink([payload(keys, 0)])
    assert list(store.names(keys.prefix)) == []


async def test_I8_a_store_that_does_not_answer_passes(place: Place, store: PayloadStore, keys: Keys) -> None:
    await place.put((payload(keys, 0), b"x"))
    place.kill()
    looks: list[Callable[[], object]] = [
        lambda: store.keep([payload(keys, 0)]),
        lambda: store.read([payload(keys, 0)]),
        lambda: store.read_ranges([(payload(keys, 0), 0, 1)]),
        lambda: store.unlink([payload(keys, 0)]),
    ]
    for look in looks:
        with pytest.raises(PASSING):
            look()
    with pytest.raises(QueueUnavailable):
        await place.put((payload(keys, 1), b"x"))


async def test_I8_a_server_that_refuses_commands_is_set_aside_like_a_silent_one(place: Place, keys: Keys) -> None:
    """Its samples, and those of healthy servers beside them, go on."""
    with connect(place.store.url) as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+ping", "+info", "+hget", "+hgetall")
    control = AsyncControl(place.store.url)
    refusing = place.store.url.replace("redis://", "redis://reader:secret@")
    config = RedisConfig(url=place.store.url, payload_servers={"refusing": refusing, "good": place.store.url})
    stores = PayloadStores(config, keys, control)

    assert await stores.put("refusing", [("k", b"1")]) is None
    assert stores.is_away("refusing")
    assert await stores.put("good", [("k", b"1")]) == [None]
    assert stores.choose("any sample") == "good"
    await stores.close()
    await control.close()


@pytest.mark.parametrize("url", ["http://h:1", "file:///folder"])
def test_an_address_that_cannot_be_is_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        open_store(url)


async def test_a_rank_reads_only_its_ranges_of_a_shared_key(
    redis_server: RedisServer, place: Place, store: PayloadStore, keys: Keys
) -> None:
    reader = PayloadReader(RedisConfig(url=redis_server.url, payload_servers={"p": store.url}))
    rows = [
        Row("d/0/7", k, "t", "p", 0, 2, 1, 0, 1, 1, 1, 1, 1, 0.0, "completed", shared=[0, 2 * k, 6]) for k in range(3)
    ]
    shared = keys.payload("d/0/7/0", "t")
    await place.put((shared, b"aabbcc"))
    assert {k: bytes(v or b"") for k, v in reader.read(keys, rows).items()} == {
        "d/0/7/0": b"aa", "d/0/7/1": b"bb", "d/0/7/2": b"cc",
    }  # fmt: skip
    assert reader.read(keys, rows[1:2]) == {"d/0/7/1": b"bb"}
    store.unlink([shared])
    assert list(reader.read(keys, rows).values()) == [None] * 3
    assert reader.read(keys, rows[1:2]) == {"d/0/7/1": None}
    assert reader.column_home("p") == "p"
    assert reader.column_home("control") == "control"
    reader.close()


async def test_a_read_with_a_deadline_ends_without_an_answer_and_can_be_repeated(
    redis_server: RedisServer, place: Place, store: PayloadStore, keys: Keys
) -> None:
    reader = PayloadReader(RedisConfig(url=redis_server.url, payload_servers={"p": store.url}))
    row = Row("d/0/7", 0, "t", "p", 0, 2, 1, 0, 1, 1, 1, 1, 1, 0.0, "completed")
    await place.put((keys.payload("d/0/7/0", "t"), b"aa"))
    place.kill()
    for _ in range(2):
        with pytest.raises(WaitTimeout, match="payload servers to answer: p") as raised:
            reader.read(keys, [row], deadline_s=0.0)
        assert raised.value.cause == PayloadServersAway(("p",))
    reader.close()


async def test_a_drain_ends_when_nobody_writes_there_and_nothing_is_left_that_anybody_reads(
    client: redis.Redis, place: Place, store: PayloadStore, keys: Keys
) -> None:
    payload_servers.add(client, keys, "p1", store.url)
    server = payload_servers.set_state(client, keys, "p1", payload_servers.ServerState.DRAINING)
    play.admit(client, keys, [play.job(i) for i in range(2)])
    held, other = play.lease(client, keys, most=2)
    now = float(client.time()[0])
    seen = payload_servers.read(client, keys).rev
    client.hset(keys.workers, "unaware", pack({"at": now, "servers_seen": "that of another directory"}))
    client.hset(keys.workers, "aware", pack({"at": now, "servers_seen": seen}))
    client.hset(keys.workers, "gone", pack({"at": now - 60}))
    # One that is kept, one on its way to its commit, one of a lease that was lost, and what is no payload.
    kept, going = keys.payload("d/0/9/0", "t"), keys.payload(f"{held.job}/0", held.token)
    lost = [keys.payload(f"{other.job}/0", "lost"), keys.side(f"{other.job}/0", "lost", "experts")]
    await place.put(*[(name, b"x") for name in (kept, going, *lost)])
    store.keep([kept])
    found = payload_servers.drain(client, store, keys, server)
    assert (found.left, found.orphans, found.writers) == (2, 2, ["unaware"])
    assert found.words() == "workers unaware to stop writing there and 2 payloads to be trained and freed"
    play.commit(client, keys, held, [0])
    assert payload_servers.drain(client, store, keys, server).left == 2, "committed, and not made permanent yet"
    store.unlink([kept, going])
    client.hdel(keys.workers, "unaware")
    assert payload_servers.drain(client, store, keys, server).done
    await place.put((going, b"x"))
    run(client, scripts.fail(keys, held.job, held.token, "w1", reason="r", detail="", max_attempts=0, retry_ms=1))
    found = payload_servers.drain(client, store, keys, server)
    assert found.words().endswith("(1 of them of buried jobs: requeue or cancel these)")
    payload_servers.add(client, keys, "p1", store.url)
    assert payload_servers.read(client, keys).rev != seen, "who knew the directory before has to look again"
    with pytest.raises(ConfigError, match="'p1' is live by now: drain it again"):
        payload_servers.drain(client, store, keys, server)
