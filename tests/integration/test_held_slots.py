"""Workers that hold the trainer's slots and bring nothing hold nobody up, however long they say that they are at it."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from penstock.errors import PublishError
from penstock.protocol.scripts import bitmap_bytes, relay_claim, relay_have, run
from penstock.redis.connect import connect
from penstock.workers.weights.fetch import swarm
from penstock.workers.weights.fetch.progress import Progress
from tests.integration.fetch_parts import Version
from tests.integration.parts import beside
from tests.integration.test_fetching import PATIENCE_S, Play, fetched, play, until, version

__all__ = ["play", "version"]

HOLDERS = ("first", "second")


@pytest.fixture
def held(play: Play, version: Version) -> Iterator[None]:
    """Both slots are claimed, and the claims said again and again until the test ends."""
    play.trainer().offer(version.number, version.index, version.folder)
    thing, count = play.thing(version), len(play.offer(version).ranges())
    claims = {name: run(play.client, relay_claim(play.keys, thing, name, count)) for name in HOLDERS}
    assert sorted(claims.values()) == [0, 1]

    def hold(ended: threading.Event) -> None:
        client = connect(play.url)
        while not ended.wait(1.0):
            for name, number in claims.items():
                run(client, relay_have(play.keys, thing, name, "", bytes(bitmap_bytes(count)), claim=number))
        client.close()

    with beside(hold):
        yield


@pytest.mark.usefixtures("held")
async def test_who_got_nothing_for_a_turn_fetches_without_a_claim(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "TURN_S", 1.0)
    alone, fed = play.worker("a"), play.worker("b")
    assert version.is_at(await fetched(alone, version))
    monkeypatch.setattr(swarm, "TURN_S", float("inf"))
    assert version.is_at(await fetched(fed, version)), "by the first, which went alone"
    held = [play.client.get(key) for key in play.keys.relay_slots(play.thing(version))]
    assert held == [b"first 0", b"second 1"], "whoever holds them has them still"


@pytest.mark.usefixtures("held")
async def test_I8_who_holds_the_slots_is_named(play: Play, version: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm, "TURN_S", float("inf"))
    monkeypatch.setattr(swarm, "GIVE_UP_S", float("inf"))
    progress, worker = Progress(), play.worker("a")
    coming = asyncio.create_task(worker.fetch(version.number, version.index, progress=progress))
    names = "; the trainer's slots are held by worker 'first' and worker 'second'"
    await asyncio.to_thread(until, lambda: progress.cause.holders == ("first", "second"))
    monkeypatch.setattr(swarm, "GIVE_UP_S", 0.0)
    with pytest.raises(
        PublishError, match=f"ranges are not received, no worker has them{names}; check that its trainer is"
    ):
        await asyncio.wait_for(coming, PATIENCE_S)
