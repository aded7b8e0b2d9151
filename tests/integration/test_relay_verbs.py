"""Who fetches what from the trainer: each range once, by two at a time, and again only when who had it is gone."""

import pytest
import redis

from penstock.protocol.scripts import read_names, read_peers, relay_claim, relay_have, run
from penstock.records.keys import Keys
from penstock.records.offer import Offer
from penstock.redis.connect import connect_async
from penstock.redis.server import RedisServer
from tests.integration import play as play_

THING = "policy:v00000003-" + "a" * 32
NUM = 20


def offer() -> Offer:
    return Offer("http://127.0.0.1:1", 3, "a" * 32, 10, [["f", 10 * NUM]], bytes(16 * NUM))


def bitmap(*numbers: int) -> bytes:
    found = bytearray(-(-NUM // 8))
    for number in numbers:
        found[number // 8] |= 0x80 >> number % 8
    return bytes(found)


class Play:
    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self.keys = client, keys
        play_.subscribe(client, keys)
        assert play_.join(client, keys).mine
        assert play_.offer(client, keys, THING, offer()) == "offered"

    def claim(self, worker: str, wanted: int = -1) -> int:
        return run(self.client, relay_claim(self.keys, THING, worker, NUM, wanted=wanted))

    def have(self, worker: str, *numbers: int, claim: int = -1) -> None:
        run(self.client, relay_have(self.keys, THING, worker, f"http://{worker}:1", bitmap(*numbers), claim=claim))

    def dies(self, worker: str) -> None:
        """Its word and its claims run out."""
        self.client.delete(self.keys.relay_have(THING, worker))
        for key in self.keys.relay_slots(THING):
            if (self.client.get(key) or b"").startswith(worker.encode() + b" "):
                self.client.delete(key)


@pytest.fixture
def play(client: redis.Redis, keys: Keys) -> Play:
    return Play(client, keys)


def test_two_fetch_from_the_trainer_at_once_and_never_the_same_range(play: Play) -> None:
    assert [play.claim("a"), play.claim("b"), play.claim("c")] == [0, 1, -1]
    play.have("a", 0)
    assert [play.claim("c"), play.claim("a")] == [2, -1]
    play.have("b", 1)
    assert play.claim("a") == 3


def test_a_claim_whose_reply_was_lost_is_the_same_one_again(play: Play) -> None:
    assert [play.claim("a"), play.claim("a"), play.claim("b"), play.claim("a")] == [0, 0, 1, 0]


def test_every_range_is_claimed_once_and_then_nothing_is_left(play: Play) -> None:
    claimed: dict[str, list[int]] = {"a": [], "b": []}
    for turn in range(NUM):
        worker = "ab"[turn % 2]
        claimed[worker].append(play.claim(worker))
        play.have(worker, *claimed[worker])
    assert sorted(claimed["a"] + claimed["b"]) == list(range(NUM))
    assert play.claim("a") == play.claim("c") == -1


def test_a_claim_is_given_up_by_saying_that_it_is_none(play: Play) -> None:
    assert play.claim("a") == 0
    play.have("a", claim=0)
    assert play.claim("b") == 1, "it is at it still"
    play.have("a")
    assert play.claim("c") == 0


def test_a_claim_lasts_as_long_as_its_worker_is_at_it(play: Play, client: redis.Redis, keys: Keys) -> None:
    play.claim("a")
    slot = keys.relay_slots(THING)[0]
    assert 0 < client.pttl(slot) <= 10_000
    client.pexpire(slot, 100)
    play.have("a", claim=0)
    assert client.pttl(slot) > 5_000
    client.pexpire(slot, 10**9)
    play.claim("c")
    assert client.pttl(slot) <= 10_000, "the server's clock was ahead when it was taken"


def test_what_a_dead_worker_alone_had_is_given_out_again(play: Play, client: redis.Redis, keys: Keys) -> None:
    play.have("a", *range(NUM))
    play.have("b", 0, 1, 2)
    assert play.claim("b") == -1
    play.dies("a")
    assert [play.claim("b"), play.claim("c")] == [3, 4]
    assert set(client.hgetall(keys.relay_peers(THING))) == {b"b"}
    play.dies("b")
    assert play.claim("d") == 0, "and its slot too"


def test_a_range_that_peers_have_and_do_not_give_is_claimed_last(play: Play) -> None:
    play.have("a", *range(NUM - 1))
    assert play.claim("b", wanted=4) == NUM - 1, "what nobody has comes first"
    play.have("b", NUM - 1)
    assert play.claim("b", wanted=4) == 4
    assert play.claim("c", wanted=4) == -1, "another one fetches it"
    assert play.claim("c", wanted=5) == 5
    assert play.claim("d", wanted=6) == -1, "there are two slots"


def test_without_an_offer_nothing_is_claimed_and_what_there_is_ends(
    play: Play, client: redis.Redis, keys: Keys
) -> None:
    play.claim("a")
    play.have("a", 0)
    names = [keys.relay(THING), keys.relay_peers(THING), keys.relay_have(THING, "a")]
    assert all(0 < client.pttl(name) <= 30_000 for name in names)
    assert not client.exists(keys.relay_taken(THING))
    client.delete(keys.relay(THING))
    assert play.claim("b") == -1


def test_another_version_has_slots_of_its_own(play: Play, client: redis.Redis, keys: Keys) -> None:
    play.claim("a")
    play.claim("b")
    other = THING.replace("a" * 32, "b" * 32)
    assert run(client, relay_claim(keys, other, "c", NUM)) == -1, "which is not offered"
    play_.offer(client, keys, other, offer())
    assert run(client, relay_claim(keys, other, "c", NUM)) == 0


async def test_what_is_offered_is_known_by_name_until_its_offer_ends(
    play: Play, client: redis.Redis, keys: Keys, redis_server: RedisServer
) -> None:
    other, foreign = "v00000004-" + "b" * 32, "judge:v00000003-" + "a" * 32
    play_.offer(client, keys, f"policy:{other}", offer())
    play_.offer(client, keys, foreign, offer())
    asker = connect_async(redis_server.url)
    assert sorted(await read_names(asker, keys, "policy")) == [THING.partition(":")[2], other]
    assert 0 < client.pttl(keys.relay_names) <= 30_000
    client.zadd(keys.relay_names, {THING: 1})
    play_.offer(client, keys, foreign, offer(), ttl_ms=1)
    assert await read_names(asker, keys, "policy") == [other], "whose time is over is left out"
    assert client.pttl(keys.relay_names) > 1, "one that ends at once ends no other"
    await asker.aclose()


async def test_what_peers_say_is_believed_as_far_as_a_version_goes(
    play: Play, client: redis.Redis, keys: Keys, redis_server: RedisServer
) -> None:
    """Nobody's word may cost more memory than a worker's."""
    for worker in "abc":
        play.have(worker, *range(NUM))
    client.set(keys.relay_have(THING, "b"), b"\xff" * 2**20)
    client.delete(keys.relay_have(THING, "c"))
    asker = connect_async(redis_server.url)
    found = await read_peers(asker, keys, THING, NUM)
    await asker.aclose()
    assert {worker: len(peer.bitmap) for worker, peer in found.items()} == {"a": 3, "b": 3}
    play.dies("a")
    assert play.claim("d") == 0, "no worker says so much"
    assert not client.exists(keys.relay_taken(THING))
