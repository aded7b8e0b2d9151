"""A subscription that no verb wrote so is named, and ends no producer, no buffer and no verb of an operator."""

from pathlib import Path

import pytest
import redis

from penstock.buffer.payload_servers import PayloadServers
from penstock.buffer.state import State
from penstock.config import RedisConfig
from penstock.errors import ProtocolError
from penstock.protocol import scripts
from penstock.protocol.gate import read_rooms
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.records.worker_causes import RecordUnreadable
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import buffering, make_config, producing, until, until_waits

COUNTED = ("bound", "gb", "over", "owed", "p", "disposed", "start", "skipped")
NO_NUMBERS = ("many", "", "1.5", "0x1", "nan", "9" * 400)


@pytest.mark.parametrize("field", COUNTED)
def test_T3_nothing_is_admitted_for_what_cannot_be_counted(client: redis.Redis, keys: Keys, field: str) -> None:
    play.subscribe(client, keys)
    gate = (play.revision(client, keys), ["actor"])
    for number, value in enumerate(NO_NUMBERS):
        client.hset(keys.sub("actor"), field, value)
        answer = play.admit(client, keys, [play.job(number)], gate=gate)
        assert (answer.outcome, answer.sub) == ("closed", "actor"), value
        with pytest.raises(ProtocolError, match="actor"):
            read_rooms(client, keys, [["actor"]])


def test_T3_nothing_is_admitted_for_a_pool_that_cannot_be_counted(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys, share="both")
    client.hset(keys.subs, "gone:both", "many")
    answer = play.admit(client, keys, [play.job(0)], gate=(play.revision(client, keys), ["actor"]))
    assert (answer.outcome, answer.sub) == ("closed", "actor")
    with pytest.raises(ProtocolError, match="gone:both"):
        read_rooms(client, keys, [["actor"]])


def test_I8_the_producer_names_what_it_cannot_count_and_goes_on_once_it_can(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    play.subscribe(client, keys, bound=1, gb=3)
    play.subscribe(client, keys, "other", bound=1, gb=3)
    client.hset(keys.clock, scripts.version_field(play.MODEL), 1)
    client.hset(keys.sub("other"), "owed", "x")
    with producing(make_config(redis_server.url, keys.run, tmp_path)):
        until_waits(client, keys, "producer", RecordUnreadable, error="Field owed of subscription 'other'")
        assert client.xlen(keys.jobs("train")) == 0
        client.hset(keys.sub("other"), "owed", "0")
        until(lambda: client.xlen(keys.jobs("train")) == 6)


def test_I8_numbers_that_no_verb_wrote_are_named_and_everything_goes_on_once_they_are_mended(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    play.subscribe(client, keys, bound=1, gb=3)
    client.hset(keys.clock, mapping={scripts.version_field(play.MODEL): 1, "version:other": "x"})
    client.hset(keys.source, "train", "x")
    config = make_config(redis_server.url, keys.run, tmp_path)
    with producing(config), buffering(config):
        until_waits(client, keys, "producer", RecordUnreadable, error="The position in train is b'x'")
        until_waits(client, keys, "buffer:state", RecordUnreadable, error="Field version:other of the clock is b'x'")
        client.hset(keys.source, "train", "0")
        until(lambda: client.xlen(keys.jobs("train")) == 6)
        client.hset(keys.clock, "version:other", "1")
        until(lambda: not client.hexists(keys.waits, "buffer:state"))


def a_ready_group(client: redis.Redis, keys: Keys) -> str:
    play.admit(client, keys, [play.job(0)])
    (job,) = play.complete(client, keys, 1)
    return job


def test_I4_a_group_in_a_batch_stays_where_the_checkpoint_cannot_be_read(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    job = a_ready_group(client, keys)
    client.hset(keys.sub("actor"), "ckpt", "x")
    client.hset(keys.group(job), "b:actor", 1)
    assert run(client, scripts.cancel(keys, job, ["actor"])) == "cut"
    client.hdel(keys.group(job), "b:actor")
    client.hset(keys.sub("actor"), "disposed", "x")
    assert run(client, scripts.cancel(keys, job, ["actor"])) == "ready"
    assert play.state(client, keys, job) == "retiring"
    assert client.zscore(keys.ready, job) is None


@pytest.mark.parametrize("field", ["ckpt", "cursor", "floor", "reuse"])
def test_I4_no_group_is_sealed_beside_a_subscription_that_cannot_be_read(
    client: redis.Redis, keys: Keys, field: str
) -> None:
    play.subscribe(client, keys)
    leader, job = play.lead(client, keys), a_ready_group(client, keys)
    client.hset(keys.group(job), "u:actor", 1)

    def seal() -> object:
        rev = play.revision(client, keys)
        return run(client, scripts.seal(keys, leader, revision=rev, subs=["actor"], jobs=[job]))

    before = client.hget(keys.sub("actor"), field)
    client.hset(keys.sub("actor"), field, "x")
    assert seal() == []
    client.hset(keys.sub("actor"), field, before or 0)
    assert seal() == [job]


@pytest.mark.parametrize("field", ["cursor", "cut", "cum", "disposed"])
def test_a_member_of_a_pool_that_cannot_be_read_can_be_dropped(client: redis.Redis, keys: Keys, field: str) -> None:
    play.subscribe(client, keys, share="both")
    client.hset(keys.sub("actor"), field, "x")
    assert run(client, scripts.unsubscribe(keys, "actor")) == 1
    assert not client.exists(keys.sub("actor"))


def test_a_group_that_cannot_be_read_is_given_up_once_its_subscription_can(
    redis_server: RedisServer, client: redis.Redis, keys: Keys
) -> None:
    """Nothing is final for a subscription that cannot be read: said before that, it would be said at each look."""
    play.subscribe(client, keys)
    job = a_ready_group(client, keys)
    client.append(keys.meta(job), b"\xc1 what no penstock wrote")
    client.hset(keys.sub("actor"), "bound", "many")
    servers = PayloadServers(RedisConfig(url=redis_server.url), client, keys)
    state = State(client, keys, servers, play.lead(client, keys))
    state.load()
    assert [state.dispose_unneeded() for _ in range(3)] == [0, 0, 0]
    assert client.hget(keys.group(job), "u:actor") is None

    client.hset(keys.sub("actor"), "bound", "1")
    state.refresh()
    assert [state.dispose_unneeded() for _ in range(3)] == [1, 0, 0]
    assert client.hget(keys.sub("actor"), "drop:unreadable") == b"1"
