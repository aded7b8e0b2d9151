"""The faults that can be asked for: each does what it says to a real worker, and what follows is the named outcome."""

from collections.abc import Callable

import pytest
import redis

from penstock.config import Config
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.worker_play import (
    admit,
    all_in,
    job,
    letters,
    metas,
    presence,
    read_group,
    states,
    tended,
    until,
    working,
)

Make = Callable[..., Config]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("error_every", "with 500"),
        ("hang_every", "within 0.5 s"),
        ("garbage_every", "JSON"),
        ("short_logprobs_every", "logprobs for"),
    ],
)
async def test_a_fault_is_tried_again_and_then_buried_by_name(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine, fault: str, says: str, streams: bool
) -> None:
    worker = {"checkpoint_tokens": 1} if streams else {}
    bad = admit(client, keys, [job(0, n=1)])
    made = config(faults={fault: 1}, engine={"request_timeout_s": 0.5}, worker=worker)
    async with working(made), tended(client, keys):
        await until(all_in(client, keys, bad, "dead"))
        # What the engine answers wrong does not end it.
        await until(lambda: presence(client, keys)["state"] == "serving")
    letter = letters(client, keys)[bad[0]]
    assert (letter["reason"], letter["attempts"]) == ("engine_error", "2")
    assert says in letter["detail"]
    assert metas(client, keys, bad[0]) == []
    play.assert_conserved(client, keys)


async def test_every_third_request_fails_and_every_job_is_done(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(i, n=2) for i in range(6)])
    async with working(config(faults={"error_every": 3}, worker={"max_attempts": 50})), tended(client, keys):
        await until(all_in(client, keys, jobs, "ready"))
    assert play.counter(client, keys, "failed:engine_error") >= 3
    for name in jobs:
        read_group(client, keys, name)
    play.assert_conserved(client, keys)


async def test_I4_an_engine_that_is_lost_again_and_again_loses_no_job(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    """An external one is cut off, as nobody may kill it; what was on its way is drawn again."""
    jobs = admit(client, keys, [job(i, n=2) for i in range(8)])
    async with working(config(faults={"die_after_tokens": 40})) as worker, tended(client, keys):
        await until(lambda: not {*states(client, keys, jobs)} - {"ready"})
        assert worker.services.births >= 2
    assert play.counter(client, keys, "committed") == 16
    for name in jobs:
        read_group(client, keys, name)
    play.assert_conserved(client, keys)
