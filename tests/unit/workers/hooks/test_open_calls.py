"""What a worker has asked of others and not heard of yet, as its waits name it."""

import asyncio
import time

from workers.hooks.open_calls import OpenCall, OpenCalls, calling, note_trouble


def words(asked: OpenCalls) -> dict[str, str]:
    return {kind: question.what for kind, question in asked.open().items() if question is not None}


def test_the_oldest_question_is_named_and_the_others_are_counted() -> None:
    asked, began = OpenCalls(), time.time()
    with asked.hears(), calling("rollout.teacher", "an answer of big"):
        [one] = asked.open().values()
        assert isinstance(one, OpenCall)
        assert began <= one.since_s <= time.time()
        with calling("rollout.teacher", "another"), calling("code", "reward f"):
            assert words(asked) == {"rollout.teacher": "an answer of big, and 1 more", "code": "reward f"}
        assert asked.open()["rollout.teacher"] == one
        note_trouble("rollout.teacher", "status 503")
        assert words(asked)["rollout.teacher"] == "an answer of big; the last try failed with status 503"
        note_trouble("rollout.teacher", "")
        assert words(asked)["rollout.teacher"] == "an answer of big"
    assert asked.open() == {"rollout.teacher": None, "code": None}


async def test_what_tasks_ask_is_heard_where_they_were_made_and_nowhere_else() -> None:
    mine, other, asks = OpenCalls(), OpenCalls(), asyncio.Event()

    async def ask() -> None:
        with calling("code", "a step"):
            asks.set()
            await asyncio.Event().wait()

    with mine.hears():
        task = asyncio.create_task(ask())
    await asks.wait()
    assert words(mine) == {"code": "a step"}
    with other.hears(), calling("code", "mine"):
        assert words(other) == {"code": "mine"}
    assert words(mine) == {"code": "a step"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert words(mine) == {}


def test_where_nobody_hears_nothing_is_noted() -> None:
    with calling("code", "a step"):
        note_trouble("code", "x")
