"""Named waits, as they stand in Redis."""

import time

import redis

from penstock.protocol.keys import Keys
from penstock.protocol.waits import Waiting, read_waits


def test_what_is_waited_for_holds_no_password(client: redis.Redis, keys: Keys) -> None:
    text = "the store of deltas to take v1 (no answer of sftp://me:hushhush@store/deltas)"
    Waiting(client, keys, "trainer:actor").for_(text, since_s=time.time() - 60)
    (wait,) = read_waits(client, keys)
    assert wait.what == text.replace("hushhush", "***")
