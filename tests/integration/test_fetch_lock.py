"""Workers of one machine fetch one at a time, and no longer than they work; what is here waits for none of them."""

import asyncio
import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.errors import PublishError
from penstock.records.worker_causes import FolderLocked
from penstock.workers.weights import machine_lock, version_folders
from penstock.workers.weights.version_folders import VersionFolders
from tests.integration.fetch_parts import Version
from tests.integration.test_fetching import PATIENCE_S, Play, fetched, play, until, version

__all__ = ["play", "version"]


@contextmanager
def others_fetch(play: Play, machine: str) -> Iterator[None]:
    """A process of that machine fetches all the while."""
    with (play.folder / machine / "fetched" / ".lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def test_I9_what_is_here_waits_for_nobody_who_fetches(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_lock, "STILL_S", 0.2)
    trainer, has = play.trainer(), play.worker("m")
    trainer.offer(version.number, version.index, version.folder)
    path = await fetched(has, version)
    with others_fetch(play, "m"):
        assert await fetched(has, version) == path
        has.close()  # as where all workers of the machine are started again
        assert await fetched(play.worker("m"), version) == path
        assert has.num_bytes == version.num_bytes


async def test_what_is_spoilt_here_is_fetched_again_by_who_has_the_lock(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_lock, "STILL_S", 0.2)
    play.trainer().offer(version.number, version.index, version.folder)
    first = play.worker("m")
    path = await fetched(first, version)
    first.close()
    (path / "config.json").write_text("{ }")
    worker = play.worker("m")
    with others_fetch(play, "m"), pytest.raises(PublishError, match="process 4711 of this machine holds"):
        await fetched(worker, version)
    assert version.is_at(await fetched(worker, version))


@pytest.mark.parametrize("where", ["remove_strangers", "make_room", "differing"])
async def test_a_fetch_that_is_stopped_keeps_others_out_until_it_has_ended(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    play.trainer().offer(version.number, version.index, version.folder)
    first, second = play.worker("m"), play.worker("m")
    of: Any = VersionFolders if where == "make_room" else version_folders
    inside, may_go_on, real = threading.Event(), threading.Event(), getattr(of, where)

    def slow(*arguments: Any) -> Any:
        if not inside.is_set():
            inside.set()
            may_go_on.wait(PATIENCE_S)
        return real(*arguments)

    monkeypatch.setattr(of, where, slow)
    stopped = asyncio.create_task(fetched(first, version))
    try:
        await asyncio.to_thread(inside.wait, PATIENCE_S)
        first.stop.set()
        coming = asyncio.create_task(fetched(second, version))
        await asyncio.to_thread(until, lambda: isinstance(second.cause, FolderLocked) or coming.done())
        assert not coming.done(), "two are in one folder"
    finally:
        may_go_on.set()
    await asyncio.gather(stopped, return_exceptions=True)
    assert version.is_at(await coming)
    assert not list((play.folder / "m" / "fetched").glob(".making-*"))
