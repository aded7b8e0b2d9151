"""What a worker has asked of others and not heard of yet, as its waits name it."""

import asyncio
import time
from dataclasses import replace

from penstock.records.cause import Cause
from penstock.records.worker_causes import CodeCalled, ServiceCalled
from penstock.workers.hooks.open_calls import OpenCall, OpenCalls, calling, record_failure

REWARD = CodeCalled("reward", "f", "sample", "d/0/0/0")
STEP = CodeCalled("step", "m:E", "sample", "d/0/0/0")
MINE = CodeCalled("hook", "m:f", "group", "d/0/0")


def causes(asked: OpenCalls) -> dict[str, Cause]:
    return {kind: question.cause for kind, question in asked.open().items() if question is not None}


def test_the_oldest_question_is_named_and_the_others_are_counted() -> None:
    asked, began = OpenCalls(), time.time()
    with asked.recording(), calling("rollout.teacher", big := ServiceCalled("big", "http://t")):
        [one] = asked.open().values()
        assert isinstance(one, OpenCall)
        assert began <= one.since_s <= time.time()
        with calling("rollout.teacher", big), calling("code", REWARD):
            assert causes(asked) == {"rollout.teacher": replace(big, more=1), "code": REWARD}
        assert asked.open()["rollout.teacher"] == one
        record_failure("rollout.teacher", "status 503")
        assert causes(asked)["rollout.teacher"] == replace(big, error="status 503")
        record_failure("rollout.teacher", "")
        assert causes(asked)["rollout.teacher"] == big
    assert asked.open() == {"rollout.teacher": None, "code": None}


async def test_what_tasks_ask_is_heard_where_they_were_made_and_nowhere_else() -> None:
    mine, other, asks = OpenCalls(), OpenCalls(), asyncio.Event()

    async def ask() -> None:
        with calling("code", STEP):
            asks.set()
            await asyncio.Event().wait()

    with mine.recording():
        task = asyncio.create_task(ask())
    await asks.wait()
    assert causes(mine) == {"code": STEP}
    with other.recording(), calling("code", MINE):
        assert causes(other) == {"code": MINE}
    assert causes(mine) == {"code": STEP}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert causes(mine) == {}


def test_where_nobody_hears_nothing_is_noted() -> None:
    with calling("code", STEP):
        record_failure("code", "x")
