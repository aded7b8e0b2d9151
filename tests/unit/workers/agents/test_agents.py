"""The episodes of a worker: which agent gets which, and which of them wait for one."""

import asyncio
from types import SimpleNamespace
from typing import cast

from penstock.records.sample import Sample
from penstock.workers.agents.agents import Agents
from penstock.workers.agents.chat import ChatTemplate
from penstock.workers.agents.model_chat import ModelChat
from penstock.workers.jobs.prefixes import partial_from_bytes
from tests.unit.workers.agents.test_episode import AGENTS, Chat, Play, user
from tests.unit.workers.jobs.test_generate import until


def agents() -> Agents:
    chat = SimpleNamespace(max_context=100, max_turns=8)
    return Agents("t" * 20, cast(ModelChat, chat), cast(ChatTemplate, Chat()), 30.0)


async def test_an_episode_that_ends_late_does_not_hide_the_one_of_the_next_lease() -> None:
    found = agents()
    earlier = asyncio.create_task(found.begin(Sample(AGENTS, 0), 0))
    await asyncio.sleep(0)
    assert found.open()
    later = asyncio.create_task(found.begin(Sample(AGENTS, 0), 0))
    await asyncio.sleep(0)
    await found.end(await earlier)
    assert found.open()
    await found.end(await later)
    assert found.open() is None


async def test_only_turns_of_this_attempt_do_without_an_agent() -> None:
    """An attempt that starts over waits for an agent as a new one does, and not as an idle one."""
    play = Play("xy")
    await play.ask(user("a"))
    await play.finish()
    stored, over = play.store.states[0], play.store.states[-1]
    found = agents()
    for data, attempt, is_waiting in ((stored, 0, False), (stored, 1, True), (over, 1, False)):
        begun = asyncio.create_task(found.begin(partial_from_bytes(data, AGENTS, 0), attempt))
        if is_waiting:
            await asyncio.sleep(0)
            assert not begun.done()
            await until(lambda: found.open() is not None)
        await found.end(await begun)
