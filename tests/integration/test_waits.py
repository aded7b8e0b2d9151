"""Named waits, as they stand in Redis."""

import time

import redis

from penstock.protocol.waits import PublishedWaiting, read_waits
from penstock.records.causes import ObjectStoreFailing
from penstock.records.keys import Keys


def test_what_is_waited_for_holds_no_password(client: redis.Redis, keys: Keys) -> None:
    error = "no answer of sftp://me:hushhush@store/deltas"
    waiting = PublishedWaiting(client, keys, "trainer:actor")
    waiting.blocked_on(ObjectStoreFailing("v1", error), since_s=time.time() - 60)
    (wait,) = read_waits(client, keys)
    assert wait.cause == ObjectStoreFailing("v1", error.replace("hushhush", "***"))
