"""The trainer's copy is fetched beside the wait for a folder: as long as bytes may come, and no longer."""

import asyncio
from typing import Any

import pytest

from penstock.errors import EngineDied, PublishError
from penstock.records.causes import Cause, WeightsFetched
from penstock.records.keys import Keys
from penstock.records.publication import Copied, Publication
from penstock.workers.weights import folders
from penstock.workers.weights.fetch.progress import Progress
from penstock.workers.weights.folders import Folders

NEWEST = Publication("policy", 2, "disk", "")
INDEX = "a" * 32


class Run:
    """A Redis that knows of no folder, and of the copy of version 2; and what is fetched of it."""

    def __init__(self, told: bytes = Copied(2, INDEX).to_bytes()) -> None:
        self.told, self.newest, self.asked = told, NEWEST, list[Publication]()
        #: What tells of the folder of version 2.
        self.whole: bytes | None = None
        self.comes: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.folders = Folders(Keys("r"), self, self, self.look, fetch=self.fetch)  # type: ignore[arg-type]

    async def do(self, ask: Any) -> Any:
        return await ask(self)

    async def hget(self, *_: str) -> bytes | None:
        return self.whole

    async def xrevrange(self, *_: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return [(b"0-0", {b"p": data}) for data in (b"no record", Publication("policy", 1, "disk", "/1").to_bytes())]

    async def get(self, _: str) -> bytes:
        return self.told

    def blocked_on(self, cause: Cause | None) -> None:
        self.waits_for = cause

    def end(self) -> None:
        self.waits_for = None

    async def look(self) -> Publication:
        return self.newest

    async def fetch(self, publication: Publication, progress: Progress) -> Publication:
        self.asked.append(publication)
        progress.blocked_on(missing=1, ranges=2)
        return Publication("policy", publication.version, "disk", await self.comes, index=publication.index)

    async def waiting_for(self, coming: "asyncio.Task[Any]", cause: Cause) -> None:
        while not (self.asked and self.waits_for == cause):
            assert not coming.done(), coming
            await asyncio.sleep(0)


async def test_an_engine_with_half_of_a_send_waits_while_its_copy_comes() -> None:
    run = Run()
    coming = asyncio.create_task(run.folders.of_this_or_later(NEWEST, 0.0))
    await run.waiting_for(coming, WeightsFetched(2, is_copy=True, missing=1, ranges=2))
    run.comes.set_result("/here")
    found = await coming
    assert (found.path, found.index, run.asked[0].index) == ("/here", INDEX, INDEX)


@pytest.mark.parametrize("told", [Copied(2, INDEX).to_bytes(), Copied(1, INDEX).to_bytes(), b"no record"])
async def test_it_is_lost_where_the_copy_does_not_come(told: bytes) -> None:
    run = Run(told)
    run.comes.set_exception(PublishError("it is offered no more."))
    with pytest.raises(EngineDied, match="no folder was found in 0 s"):
        await run.folders.of_this_or_later(NEWEST, 0.0)
    run.comes.exception()


async def test_a_newer_version_ends_the_fetch_of_a_copy() -> None:
    run = Run()
    coming = asyncio.create_task(run.folders.of(NEWEST))
    await run.waiting_for(coming, WeightsFetched(2, is_copy=True, missing=1, ranges=2))
    assert run.folders.awaits == 2, "what is sent next may be taken meanwhile"
    run.newest = Publication("policy", 3, "disk", "")
    with pytest.raises(PublishError, match="version 2 has no folder, and 3 is announced"):
        await coming
    assert run.comes.cancelled()
    assert run.folders.awaits == -1


async def test_one_that_failed_is_begun_again_and_gives_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "AGAIN_S", 0.0)
    run = Run()
    coming = folders.Early(run.folders._copied, run.fetch)
    run.comes.set_exception(PublishError("it is offered no more."))
    while coming.of is not None or not run.asked:
        assert await coming.got(NEWEST) is None
        await asyncio.sleep(0)
    run.comes = asyncio.get_running_loop().create_future()
    assert await coming.got(NEWEST) is None
    assert (coming.of, coming.comes) == (NEWEST, False)
    coming.progress.num_bytes += 1
    assert coming.comes, "what gets bytes"
    run.comes.set_result("/here")
    await asyncio.sleep(0)
    found = await coming.got(NEWEST)
    assert found is not None
    assert found.path == "/here"


async def test_a_folder_that_is_told_of_in_no_words_is_an_error_of_that_version() -> None:
    run = Run()
    run.whole = b"no record"
    with pytest.raises(PublishError, match="The folder of version 2 of model 'policy' is not a record"):
        await run.folders.of(NEWEST)
    assert await run.folders.there(NEWEST) is None


async def test_of_earlier_versions_those_that_cannot_be_read_are_passed_over() -> None:
    run = Run()
    found = await run.folders.before(NEWEST, -1, lambda one: True)
    assert found is not None
    assert found.path == "/1"


async def test_one_that_failed_is_nothing_to_the_next_version() -> None:
    run, third = Run(), Publication("policy", 3, "disk", "")
    coming = folders.Early(run.folders._copied, run.fetch)
    run.comes.set_exception(PublishError("its memory was taken."))
    while coming.of is not None or not run.asked:
        assert await coming.got(NEWEST) is None
        await asyncio.sleep(0)
    assert not coming.comes
    run.comes, run.told = asyncio.get_running_loop().create_future(), Copied(3, INDEX).to_bytes()
    assert await coming.got(third) is None
    assert (coming.of, coming.comes) == (third, True), "at once, without a pause"
    await coming.end()
