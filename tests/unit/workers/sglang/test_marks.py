"""Marks of a change of weights that come to nothing."""

import asyncio

import pytest

from penstock.errors import EngineError
from workers.sglang.marks import Marks


@pytest.mark.parametrize(
    ("raised", "level", "words"),
    [
        (EngineError("the server is gone"), "INFO", "stay with the version before 3: the server is gone"),
        (TypeError("no name"), "ERROR", "a mark failed"),
    ],
)
async def test_a_mark_that_comes_to_nothing_is_told_of(
    raised: Exception, level: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    tried = asyncio.Event()

    async def prove() -> None:
        tried.set()
        raise raised

    async def rename(name: str) -> None:
        raise AssertionError(name)

    marks = Marks(prove, rename)
    with caplog.at_level("INFO", "workers.sglang.marks"):
        await marks.begin(3)
        await tried.wait()
        await asyncio.sleep(0)
        await marks.end()
    (record,) = caplog.records
    assert record.levelname == level
    assert words in record.message


async def test_a_mark_that_was_not_sent_is_given_up_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def prove() -> None:
        await asyncio.Event().wait()

    async def rename(name: str) -> None:
        raise AssertionError(name)

    marks = Marks(prove, rename)
    await marks.begin(3)
    await asyncio.sleep(0)
    await marks.end()
    assert caplog.records == []
