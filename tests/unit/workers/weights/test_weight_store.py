"""Where an engine loads a publication from."""

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import PublishError
from penstock.records.cause import Cause
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import CopyMade, FolderLocked
from penstock.system.disk import locks
from penstock.workers.services import Tally
from penstock.workers.weights import machine_lock
from penstock.workers.weights.store import WeightStore
from tests.integration.parts import until
from tests.unit.consumers.weights.test_deltas import Line


class Waiting:
    def __init__(self) -> None:
        self.said: list[Cause | None] = []

    def blocked_on(self, cause: Cause | None) -> None:
        self.said.append(cause)

    def end(self) -> None:
        self.said.append(None)


@pytest.fixture
def line(tmp_path: Path) -> Line:
    line = Line(tmp_path)
    line.publish(1)
    return line


def store_of(line: Line, transport: str = "delta", store: str = "") -> tuple[WeightStore, Waiting]:
    config: Any = SimpleNamespace(
        trainer=SimpleNamespace(transport=transport),
        worker=SimpleNamespace(copies_bytes=2**30),
        serving=SimpleNamespace(enabled=False),
        delta_store=store or str(line.path / "store"),
        copies_dir=line.path / "copies",
    )
    waiting: Any = Waiting()
    return WeightStore(config, Keys("run"), waiting, Tally()), waiting


async def fetched(store: WeightStore, publication: Publication) -> Publication:
    """Fetch until it is there, as the loop does by selecting again."""
    while (here := await store.fetch(publication)) is None:
        pass
    return here


def announced(line: Line) -> Publication:
    assert line.announced is not None
    return line.announced


async def test_with_another_transport_it_is_the_trainers_folder_and_the_reported_wait_goes_on(line: Line) -> None:
    """A refused publication is fetched again every second; what it waits for is reported all the time."""
    store, waiting = store_of(line, "disk")

    assert await fetched(store, announced(line)) is announced(line)

    assert waiting.said == []


async def test_it_is_a_copy_on_this_machine_and_why_it_waits_is_said(line: Line) -> None:
    store, waiting = store_of(line)

    here = await fetched(store, announced(line))

    assert Path(here.path).parent == line.path / "copies"
    assert here.id == announced(line).id
    assert set(waiting.said[:-1]) <= {CopyMade(1)}
    assert waiting.said[-1:] in ([], [None])


async def test_how_copies_came_to_be_here_is_counted(line: Line) -> None:
    store, _ = store_of(line)
    for version in (1, 1, 2):
        if version not in line.written:
            line.publish(version)
        await fetched(store, announced(line))
    tally, index = store._tally, line.written[2].index_digest
    assert tally.weight_copies == {"whole": 1, "here": 1, "deltas": 1}
    came = [file for file in line.path.glob("store/*/*") if file.name == "delta" or index not in str(file)]
    assert tally.weight_copy_bytes == sum(file.stat().st_size for file in came)
    assert tally.weight_copy_s > 0


async def test_a_worker_that_ends_holds_no_copy(line: Line) -> None:
    store, _ = store_of(line)
    store.close()  # as where it ends before its engine had any

    store, _ = store_of(line)
    handle = os.open((await fetched(store, announced(line))).path, os.O_RDONLY)
    assert not locks(handle)
    store.close()
    assert locks(handle)
    os.close(handle)


async def test_where_no_copy_can_be_made_the_folder_that_can_be_seen_is_the_nearest_whole_version_and_it_is_said(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = store_of(line)
    for marker in line.path.glob("store/*/whole"):
        marker.unlink()

    assert (await fetched(store, announced(line))).path == announced(line).path

    assert "version 1 is loaded from" in caplog.text


async def test_I8_a_worker_that_stands_still_in_a_copy_is_named_and_others_load_the_folder(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, waiting = store_of(line)
    monkeypatch.setattr(machine_lock, "STILL_S", 0.2)
    (line.path / "copies").mkdir()
    with (line.path / "copies" / ".lock").open("w") as lock:  # held, and nobody says so
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert (await fetched(store, announced(line))).path == announced(line).path
    assert FolderLocked(4711, str(line.path / "copies")) in waiting.said
    assert waiting.said[-1] is None


async def test_where_that_cannot_be_seen_either_the_failure_is_the_callers(line: Line) -> None:
    store, _ = store_of(line)
    for marker in line.path.glob("store/*/whole"):
        marker.unlink()
    line.written[1].path.rename(line.path / "elsewhere")

    for path in (announced(line).path, "/" + "x" * 5000):
        with pytest.raises(PublishError, match="cannot be made from the delta store"):
            await fetched(store, replace(announced(line), path=path))


async def test_a_store_that_refuses_is_a_failure_of_the_callers(line: Line) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        store, _ = store_of(line, store=f"ftp://127.0.0.1:{silent.getsockname()[1]}/store")

        with pytest.raises(PublishError, match=r"does not list what it has .*refused"):
            await fetched(store, replace(announced(line), path="/nowhere"))


async def test_a_worker_that_ends_ends_the_making_too(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = store_of(line)
    loop, begun, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.get_running_loop().create_future()

    def get(publication: Publication, stopped: Callable[[], bool]) -> Path:
        loop.call_soon_threadsafe(begun.set)
        until(stopped)
        loop.call_soon_threadsafe(ended.set_result, True)
        raise machine_lock.Stopped("stops")

    assert store._source is not None
    monkeypatch.setattr(store._source, "get", get)
    task = asyncio.create_task(fetched(store, announced(line)))
    await begun.wait()
    store.close()
    with pytest.raises(PublishError):
        await task

    assert await ended


@pytest.mark.parametrize(("transport", "is_replaced"), [("disk", True), ("delta", False)])
async def test_a_fetch_ahead_is_replaced_by_one_of_another_version_unless_it_makes_a_copy(
    line: Line, monkeypatch: pytest.MonkeyPatch, transport: str, is_replaced: bool
) -> None:
    """A copy is completed: the next one is made from it."""
    store, _ = store_of(line)
    monkeypatch.setattr(store, "_makes_copies", transport == "delta")
    ends, begun = asyncio.get_running_loop().create_future(), list[str]()

    async def fetch(publication: Publication) -> Publication:
        begun.append(publication.id)
        await asyncio.shield(ends)
        return publication

    monkeypatch.setattr(store, "_fetch", fetch)
    first, second = announced(line), replace(announced(line), version=2)
    assert store.prefetch(first)
    assert store.prefetch(first)
    await asyncio.sleep(0)
    assert store.prefetch(second) == is_replaced
    coming = asyncio.create_task(fetched(store, second))
    await asyncio.sleep(0)
    ends.set_result(None)
    assert await coming is second
    assert begun == ["1-0", "2-0"]


async def test_a_fetch_ahead_that_failed_fails_the_load_and_is_tried_again(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = store_of(line)
    failures: list[Exception] = [PublishError("the disk is full.")]

    async def fetch(publication: Publication) -> Publication:
        if failures:
            raise failures.pop()
        return publication

    monkeypatch.setattr(store, "_fetch", fetch)
    store.prefetch(announced(line))
    await asyncio.sleep(0)
    with pytest.raises(PublishError, match="the disk is full"):
        await fetched(store, announced(line))
    assert await fetched(store, announced(line)) is announced(line)


@pytest.mark.parametrize("version", [1, 2])
async def test_an_engine_that_is_started_during_a_fetch_gets_its_version(
    line: Line, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    store, _ = store_of(line)
    ends = asyncio.Event()

    async def fetch(publication: Publication) -> Publication:
        await ends.wait()
        return publication

    monkeypatch.setattr(store, "_fetch", fetch)
    first, second = announced(line), replace(announced(line), version=version)
    assert await store.fetch(first) is None  # the loop's; it does not ask again, as the engine is lost
    starting = asyncio.create_task(fetched(store, second))
    assert await store.fetch(first) is None
    ends.set()
    assert await starting == second
