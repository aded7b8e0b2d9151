"""Official clients at a gateway before real workers: episodes become samples, and a killed worker is not noticed."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import openai
import redis

from penstock.config import Config
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_parts import CLIENT, gateway
from tests.integration.test_agents import ANSWER, agents, text
from tests.integration.worker_play import admit, all_in, job, read_group, tended, until, working
from tests.integration.worker_process import Start, start

__all__ = ["agents", "start"]

SERVED = {"port": 0, "clients": {"me": CLIENT}}


async def post(url: str, token: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def opened(url: str) -> Any:
    """Open an episode once there is one."""
    return await post(f"{url}/v1/episodes", CLIENT, {"wait_s": 60})


async def test_episodes_by_both_clients_become_the_samples_of_a_group(
    client: redis.Redis, keys: Keys, agents: Callable[..., Config]
) -> None:
    [name] = admit(client, keys, [job(0, environment="agent")])
    config = agents(agents=SERVED)
    async with working(config), gateway(config) as url:
        first, second = await opened(url), await opened(url)
        async with openai.AsyncOpenAI(base_url=first["base_url"], api_key=first["key"]) as agent:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            one = await agent.chat.completions.create(model="policy", messages=messages)
            messages += [one.choices[0].message, {"role": "user", "content": "on"}]
            chunks = await agent.chat.completions.create(model="policy", messages=messages, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        async with anthropic.AsyncAnthropic(base_url=url, api_key=second["key"]) as claude:
            asked: list[Any] = [{"role": "user", "content": "other"}]
            other = await claude.messages.create(model="policy", max_tokens=3, messages=asked)
        await post(f"{url}/v1/episodes/finish", first["key"], {"reward": 0.5})
        await post(f"{url}/v1/episodes/finish", second["key"], {})
        await until(all_in(client, keys, [name], "ready"))
        await post(f"{url}/v1/episodes/finish", first["key"], {"reward": 0.5})

    assert streamed == one.choices[0].message.content
    assert other.stop_reason == "max_tokens"
    (meta, payload), (_, shorter) = read_group(client, keys, name)
    assert text(payload.tokens.tolist()) == f"u>go<a>{text(ANSWER)}<u>on<a>{text(ANSWER)}"
    assert text(shorter.tokens.tolist()) == f"u>other<a>{text(ANSWER[:3])}"
    assert (meta.reward, meta.num_turns) == (0.5, 2)
    play.assert_conserved(client, keys)


async def test_a_worker_killed_in_the_middle_of_a_turn_is_not_noticed(
    client: redis.Redis, keys: Keys, agents: Callable[..., Config], fake: FakeEngine, start: Start
) -> None:
    [name] = admit(client, keys, [job(0, environment="agent", n=1)])
    config = agents(agents=SERVED)
    worker = start(config, "first")
    async with tended(client, keys), gateway(config) as url:
        episode = await opened(url)
        async with openai.AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0) as agent:
            fake.open.clear()
            messages: list[Any] = [{"role": "user", "content": "go"}]
            asking = asyncio.create_task(agent.chat.completions.create(model="policy", messages=messages))
            await until(lambda: fake.prompts, "for the turn to begin")
            worker.signal(signal.SIGKILL)
            await worker.exit_code()
            run(client, scripts.note(keys, keys.workers, next(iter(client.hkeys(keys.workers))).decode(), b""))
            fake.open.set()
            async with working(config, "second"):
                one = await asking
                messages += [one.choices[0].message, {"role": "user", "content": "on"}]
                await agent.chat.completions.create(model="policy", messages=messages)
                await post(f"{url}/v1/episodes/finish", episode["key"], {"reward": 1.0})
                await until(all_in(client, keys, [name], "ready"))
    [(meta, payload)] = read_group(client, keys, name)
    assert text(payload.tokens.tolist()) == f"u>go<a>{text(ANSWER)}<u>on<a>{text(ANSWER)}"
    assert (meta.num_turns, meta.reward) == (2, 1.0)
    play.assert_conserved(client, keys)
