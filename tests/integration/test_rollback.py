"""Redis forgets what it had acknowledged: whichever buffer has seen it tells of it, and each loss is told once."""

import redis

from penstock.buffer.main import Rollback
from penstock.records.keys import Keys
from tests.integration import play


def test_I4_what_several_buffers_have_seen_is_reported_once_whoever_leads(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.counters, mapping={"committed": 10, "cut": 2})
    leader, standby, late = (Rollback(client, keys) for _ in range(3))
    assert leader.check() == standby.check() == {}
    client.hset(keys.counters, "committed", 13)
    assert leader.check() == {}, "the standby did not check again"

    client.hset(keys.counters, mapping={"committed": 9, "cut": 2})  # as a replica that was behind has it
    assert late.check() == {}
    assert standby.check() == {"committed": 1}, "it leads now"
    assert leader.check() == {"committed": 3}, "and its own observations are reported too"
    assert [one.check() for one in (leader, standby, late)] == [{}, {}, {}]
    counters = {name: play.counter(client, keys, name) for name in ("rolled_back", "rolled_back:committed")}
    assert counters == {"rolled_back": 2, "rolled_back:committed": 4}


def test_I4_a_report_that_was_forgotten_too_is_made_again(client: redis.Redis, keys: Keys) -> None:
    client.hset(keys.counters, "committed", 10)
    buffer = Rollback(client, keys)
    buffer.check()
    client.hset(keys.counters, "committed", 4)
    assert buffer.check() == {"committed": 6}

    client.hset(keys.counters, mapping={"committed": 3, "rolled_back:committed": 0})
    assert buffer.check() == {"committed": 7}
    client.hincrby(keys.counters, "committed", 5)
    assert buffer.check() == {}
