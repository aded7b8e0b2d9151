"""Where a worker writes payloads: whatever the directory names, it goes on with the servers that it can open."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.config import RedisConfig
from penstock.records import record
from penstock.records.codec import pack
from penstock.records.keys import CONTROL, Keys
from penstock.redis.control import AsyncControl
from penstock.redis.server import RedisServer
from penstock.workers.jobs.payload_stores import PayloadStores


class Directory:
    """A control Redis that holds the hash ``servers`` alone."""

    url = "redis://h:1/0"

    def __init__(self, held: dict[bytes, bytes]) -> None:
        self.held = held

    async def do(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        return await work(self)

    async def hget(self, _: str, field: str) -> bytes | None:
        return self.held.get(field.encode())

    async def hgetall(self, _: str) -> dict[bytes, bytes]:
        return self.held


def server(url: str, **changes: Any) -> bytes:
    return pack({"state": "live", "url": url} | changes)


def stores_of(held: dict[bytes, bytes]) -> PayloadStores:
    control = cast(AsyncControl, Directory({b"rev": b"1"} | held))
    return PayloadStores(RedisConfig(url=Directory.url), Keys("run"), control)


async def chosen(stores: PayloadStores) -> set[str]:
    """Where samples go, once each server that they could go to has been written to."""
    for name in {stores.choose(f"d/0/{n}/0") for n in range(50)}:
        await stores.put(name, [("{t}:payload:a", b"x")])
    return {stores.choose(f"d/0/{n}/0") for n in range(50)}


@pytest.fixture
def good(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "good")
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize(
    "bad",
    [
        {b"s:bad": server("redis://h:1/0", state="x")},
        {b"s:\xff": server("redis://h:1/0")},
        {b"s:bad": server("nonsense")},
        {b"s:bad": server("file:///folder")},
        {b"s:bad": b"\xc1"},
        {b"rev": b"x"},
    ],
)
def test_a_server_that_cannot_be_read_or_opened_is_left_out(
    bad: dict[bytes, bytes], good: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_said", set())

    async def plays() -> None:
        stores = stores_of({b"s:good": server(good.url)} | bad)
        await stores.refresh()
        assert await chosen(stores) == {"good"}
        assert await stores.put("good", [("{t}:payload:b", b"x")]) == [None]
        await stores.close()

    asyncio.run(plays())
    if b"s:bad" in bad:
        assert "bad" in caplog.text


def test_without_one_that_answers_a_worker_keeps_its_samples(good: RedisServer) -> None:
    good.stop()

    async def plays() -> None:
        stores = stores_of({b"s:p1": server(good.url)})
        await stores.refresh()
        assert await stores.put("p1", [("{t}:payload:a", b"x")]) is None
        assert stores.choose("d/0/1/0") == "p1"
        assert stores.is_away("p1")
        assert await stores.is_full("p1")
        # Once it answers, and its pause is over, it is written to.
        good.start()
        stores._away.clear()
        assert await stores.put("p1", [("{t}:payload:a", b"x")]) == [None]
        assert CONTROL not in stores.names
        await stores.close()

    asyncio.run(plays())
