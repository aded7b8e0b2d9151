"""An outage that is no restart takes nothing from anybody: what could not be renewed meanwhile is not reclaimed."""

from collections.abc import Callable

import pytest
import redis

from penstock.config import Config
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.redis.connect import connect_async
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.cut_proxy import CutProxy
from tests.integration.fake_engine import FakeEngine
from tests.integration.part_processes import StartPart, start_part
from tests.integration.worker_play import admit, all_in, job, until

__all__ = ["start_part"]

#: Longer than a starved worker needs to come back once it can.
LEASE_S = 15.0


def idle_ms(client: redis.Redis, keys: Keys) -> int:
    """How long the lease that was renewed longest ago has not been."""
    pending = client.xpending_range(keys.jobs("train"), "workers", "-", "+", 100)
    return max((int(one["time_since_delivered"]) for one in pending), default=0)


@pytest.mark.parametrize("outage", ["connections are cut", "everybody but Redis is frozen"])
async def test_I4_an_outage_longer_than_a_lease_takes_no_lease_and_charges_nobody(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    config: Callable[..., Config],
    fake: FakeEngine,
    start_part: StartPart,
    outage: str,
) -> None:
    """Redis is up all the time; the buffer reaches it again before the worker does."""
    sections = {"worker": {"lease_s": LEASE_S, "heartbeat_s": 0.2}, "buffer": {"lease_s": 2.0}}
    with CutProxy(redis_server.url).up() as buffers, CutProxy(redis_server.url).up() as workers:
        fake.open.clear()
        jobs = admit(client, keys, [job(i) for i in range(4)])
        buffer = start_part("buffer", config(**sections, redis={"url": buffers.url}))
        worker = start_part("worker", config(**sections, redis={"url": workers.url}))
        await until(lambda: fake.num_running == 8, "for the jobs at the engine", 120)
        await until(lambda: client.exists(keys.reclaimer), "for the buffer to look after leases", 120)
        tokens = [client.hget(keys.group(one), "tok") for one in jobs]
        begin, end = (
            ((buffers.cut, workers.cut), (buffers.heal, workers.heal))
            if outage == "connections are cut"
            else ((buffer.freeze, worker.freeze), (buffer.thaw, worker.thaw))
        )
        for stop in begin:
            stop()
        await until(lambda: idle_ms(client, keys) > 1200 * LEASE_S, "for every lease to be over", 120)
        assert not client.exists(keys.reclaimer, keys.leader)
        end[0]()
        await until(lambda: client.exists(keys.reclaimer), "for the buffer to look again", 120)
        end[1]()
        await until(lambda: idle_ms(client, keys) < 1000, "for the worker to renew", 120)
        assert [client.hget(keys.group(one), "tok") for one in jobs] == tokens, "the same leases"
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"), "for the jobs", 120)
        names = ("reclaimed", "crashes", "released", "refused", "failed")
        assert [play.counter(client, keys, name) for name in names] == [0] * 5
        assert fake.asked.total() == 8, "nothing was drawn twice"
        # Who is gone is still seen to be: one lease later.
        fake.open.clear()
        late = admit(client, keys, [job(9)])
        await until(lambda: fake.num_running == 2, "for one more job", 120)
        worker.kill()
        await until(all_in(client, keys, late, "queued"), "for its lease to be taken", 120)
    assert play.counter(client, keys, "reclaimed") == 1
    assert audit(client, keys).ok


async def test_I4_a_connection_that_is_reset_before_it_is_written_to_is_a_lost_one(redis_server: RedisServer) -> None:
    """The loop of workers raises RuntimeError for such a write, which ended the worker."""
    client = connect_async(redis_server.url)
    try:
        connection = await client.connection_pool.get_connection()
        transport = connection._writer.transport
        transport.abort()
        await until(lambda: "closed=True" in repr(transport), "for the transport to be closed")
        with pytest.raises(redis.ConnectionError, match="lost before it was written to"):
            await connection.send_command("PING")
        await client.connection_pool.release(connection)
        assert await client.ping(), "the next command connects anew"
    finally:
        await client.aclose()


def test_a_subscription_is_not_parked_for_an_outage(client: redis.Redis, keys: Keys) -> None:
    """Its trainer could not renew either; it has as long as a lease of its owner to come back."""
    play.subscribe(client, keys, keep_s=1)
    play.join(client, keys)
    leader = play.lead(client, keys)
    client.delete(keys.owner("actor"))
    client.hset(keys.sub("actor"), "seen", 1)

    def park() -> str:
        call = scripts.park(keys, leader, "actor", revision=play.revision(client, keys), absent_ms=10**6)
        return run(client, call).outcome

    assert [park(), park()] == ["contact", "contact"]
    play.in_contact(client, keys)
    assert park() == "parked"


def test_I4_what_is_a_short_break_for_a_subscription_is_a_long_one_for_a_lease(client: redis.Redis, keys: Keys) -> None:
    """The leader looks whether to park first, with a gap that is longer than half a lease."""
    play.subscribe(client, keys, keep_s=60)
    play.join(client, keys)
    leader = play.lead(client, keys)
    play.admit(client, keys, [job(0)])
    (held,) = play.lease(client, keys)
    lease_ms, outage_ms = 6000, 6500
    place = client.hget(keys.group(held.job), "eid")
    play.in_contact(client, keys)
    # An outage: nobody has looked or renewed since.
    for field, value in client.hgetall(keys.of("contact")).items():
        if field.startswith(b"last:"):
            client.hset(keys.of("contact"), field, int(value) - outage_ms)
    client.xclaim(keys.jobs("train"), "workers", "w1", 0, [place], idle=outage_ms, justid=True)
    park = scripts.park(keys, leader, "actor", revision=play.revision(client, keys), absent_ms=60_000)
    assert run(client, park).outcome in ("present", "contact")
    assert run(client, scripts.reclaim(keys, "train", "buffer", lease_ms)) == "contact"
    assert play.state(client, keys, held.job) == "leased"
