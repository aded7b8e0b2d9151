"""Episodes of agents on real workers: what an agent asks over HTTP becomes samples, whatever is killed meanwhile."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.records.worker_causes import AgentAwaited
from penstock.weights.serving import token_of
from tests.integration import oracle, play
from tests.integration.fake_engine import EOS, FILLER, FIRST, FakeEngine
from tests.integration.worker_play import (
    LEASE_S,
    admit,
    all_in,
    is_blocked,
    job,
    letters,
    metas,
    presence,
    publish,
    read_group,
    tended,
    until,
    working,
)
from tests.integration.worker_process import Start, start

__all__ = ["start"]

#: Roles are letters; ``<`` ends a message.
TEMPLATE = (
    "{% for one in messages %}{{ one.role[0] }}>{{ one.content }}<{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)
ANSWER = [*FIRST, FILLER, FILLER, EOS]
DATA = {"train": [{"name": "d", "path": "none.jsonl", "environment": "agent"}]}


@pytest.fixture
def agents(config: Callable[..., Config], model_config: ModelConfig, tmp_path: Path) -> Callable[..., Config]:
    """Makes configurations of workers whose jobs agents run."""
    model = Path(shutil.copytree(model_config.path, tmp_path / "chat"))
    (model / "chat_template.jinja").write_text(TEMPLATE)

    def make(**sections: Any) -> Config:
        return config(data=DATA, model=model_config.model_copy(update={"path": str(model)}), **sections)

    return make


class Agent:
    """Speaks to the endpoint of a worker."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self._session.post(self.url + path, json=body) as response:
            return response.status, await response.json() if response.status != 204 else None

    async def ask(self, key: str, *texts: str) -> Any:
        """Ask with a history of user and assistant in turn; return the answer."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        status, answer = await self.post("/turn", key=key, messages=messages)
        assert status == 200, answer
        return answer


@asynccontextmanager
async def agent_of(client: redis.Redis, keys: Keys, config: Config) -> AsyncIterator[Agent]:
    """An agent of the one worker that is there."""
    url = await until(lambda: presence(client, keys)["agents_url"], "for the endpoint")
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token_of(config)}"}) as session:
        yield Agent(session, url)


async def opened(agent: Agent) -> Any:
    """Open an episode once there is one."""
    while True:
        status, episode = await agent.post("/open")
        if status == 200:
            return episode
        await asyncio.sleep(0.01)


def text(tokens: list[int]) -> str:
    from tests.tiny_model import ALPHABET

    return "".join({0: "_", 1: "!"}.get(one, ALPHABET[one - 2]) for one in tokens)


async def test_episodes_of_a_group_become_its_samples(
    client: redis.Redis, keys: Keys, agents: Callable[..., Config], fake: FakeEngine
) -> None:
    [name] = admit(client, keys, [job(0, environment="agent", metadata={"level": 3})])
    config = agents()
    async with working(config), agent_of(client, keys, config) as agent:
        await until(lambda: is_blocked(client, keys, "agents", AgentAwaited, more=1), "for agents to be named")
        first, second = await opened(agent), await opened(agent)
        assert (first["job"], first["k"], second["k"]) == (name, 0, 1)
        assert (first["prompt"], first["label"], first["metadata"]) == ("a0=", "x", {"level": 3})
        assert (await agent.post("/open"))[0] == 204
        one = await agent.ask(first["key"], "go")
        assert one["tokens"] == ANSWER
        assert (one["finish_reason"], one["turn"], one["completion_tokens"]) == ("stop", 1, len(ANSWER))
        await agent.ask(first["key"], "go", one["content"], "on")
        await agent.ask(second["key"], "other")
        assert await agent.post("/finish", key=first["key"], reward=0.5, info={"won": 1}) == (200, {})
        assert await agent.post("/finish", key=second["key"]) == (200, {})
        await until(all_in(client, keys, [name], "ready"))
        assert (await agent.post("/turn", key=first["key"], messages=[]))[0] == 404
    (meta, payload), (other, _) = read_group(client, keys, name)
    assert text(payload.tokens.tolist()) == f"u>go<a>{text(ANSWER)}<u>on<a>{text(ANSWER)}"
    assert (meta.reward, meta.reward_info, meta.num_turns) == (0.5, {"won": 1}, 2)
    assert other.reward == len(ANSWER), "the reward of the job"
    play.assert_conserved(client, keys)


async def test_a_program_of_the_worker_asks_by_the_chat_template(
    client: redis.Redis, keys: Keys, agents: Callable[..., Config], fake: FakeEngine
) -> None:
    path = "tests.integration.worker_parts:Doubting"
    [name] = admit(client, keys, [job(0, environment=path)])
    async with working(agents(worker={"environments": [path]})):
        await until(all_in(client, keys, [name], "ready"))
    for meta, payload in read_group(client, keys, name):
        assert text(payload.tokens.tolist()) == f"u>go<a>{text(ANSWER)}<u>on<a>{text(ANSWER)}"
        assert (meta.reward, meta.num_turns) == (len(ANSWER) - 1, 2)
    play.assert_conserved(client, keys)


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["drain", "abort"])
async def test_T6_turns_are_the_tokens_as_generated_across_versions(
    client: redis.Redis,
    keys: Keys,
    agents: Callable[..., Config],
    models: list[Path],
    publications: list[Publication],
    engine_url: str,
    policy: str,
) -> None:
    names = admit(client, keys, [job(i, environment="agent", n=4) for i in range(2)])
    config = agents(
        engine={"url": engine_url},
        rollout={"sampling": {"max_new_tokens": 60, "ignore_eos": True}},
        worker={"apply": policy},
    )
    answers: dict[str, list[list[int]]] = {}
    turns = asyncio.Semaphore(0)

    async def run_episode(agent: Agent) -> None:
        episode = await opened(agent)
        texts, tokens = ["go"], []
        for turn in range(3):
            answer = await agent.ask(episode["key"], *texts)
            texts += [answer["content"], f"{turn}"]
            tokens.append(answer["tokens"])
            turns.release()
        answers[f"{episode['job']}/{episode['k']}"] = tokens
        await agent.post("/finish", key=episode["key"])

    async with working(config), agent_of(client, keys, config) as agent:
        running = [asyncio.create_task(run_episode(agent)) for _ in range(8)]
        for version in (2, 3):
            for _ in range(4):
                await turns.acquire()
            publish(client, keys, publications[version])
        await asyncio.gather(*running)
        await until(all_in(client, keys, names, "ready"))
    oracles = {version: oracle.load_model(models[version]) for version in (1, 2, 3)}
    versions = set()
    for name in names:
        for meta, payload in read_group(client, keys, name):
            tokens, drawn = payload.tokens.tolist(), payload.generated.tolist()
            pairs = groupby(zip(tokens, drawn, strict=True), lambda pair: pair[1])
            runs = [[token for token, _ in run] for made, run in pairs if made]
            assert runs == answers[f"{name}/{meta.k}"]
            sample = Sample(Job(name, 1), meta.k, tokens=tokens)
            expected = oracle.recompute(oracles, sample, payload.versions.tolist(), 1.0)
            np.testing.assert_allclose(payload.logprobs, expected, atol=1e-4)
            versions.add(frozenset(payload.versions.tolist()) - {-1})
    if policy == "drain":
        assert all(len(one) == 1 for one in versions), "an episode is drained as a whole"
    else:
        assert max(map(len, versions)) > 1, "turns of one episode are of several versions"


async def test_requests_without_the_token_or_a_key_of_the_run_are_refused(
    client: redis.Redis, keys: Keys, agents: Callable[..., Config]
) -> None:
    admit(client, keys, [job(0, environment="agent", n=1)])
    config = agents()
    async with working(config), agent_of(client, keys, config) as agent:
        episode = await opened(agent)
        async with aiohttp.ClientSession() as session:
            assert (await Agent(session, agent.url).post("/open"))[0] == 401
        forged = episode["key"][:-4] + "AAAA"
        for key, status in ((forged, 401), ("pk-", 401), (7, 400)):
            assert (await agent.post("/turn", key=key, messages=[{"role": "user", "content": "a"}]))[0] == status
        for body in (
            {"messages": []},
            {"messages": [7]},
            {"messages": [{"role": "user", "content": "a"}], "stop": [""]},
        ):
            status, answer = await agent.post("/turn", key=episode["key"], **body)
            assert status == 400, answer
        assert (await agent.ask(episode["key"], "a"))["turn"] == 1


async def test_a_silent_agent_is_a_failed_attempt_and_the_next_one_gets_a_key_of_its_own(
    client: redis.Redis, keys: Keys, agents: Callable[..., Config]
) -> None:
    [name] = admit(client, keys, [job(0, environment="agent", n=1)])
    config = agents(agents={"idle_s": LEASE_S})
    async with working(config), tended(client, keys), agent_of(client, keys, config) as agent:
        silent = await opened(agent)
        await agent.ask(silent["key"], "a")
        other = await opened(agent)
        assert other["job"] == name
        status, answer = await agent.post("/turn", key=silent["key"], messages=[{"role": "user", "content": "a"}])
        assert (status, answer["error"]) == (409, answer["error"])
        await agent.post("/fail", key=other["key"], error="the browser crashed")
        await until(all_in(client, keys, [name], "dead"))
    assert "the browser crashed" in letters(client, keys)[name]["detail"]
    play.assert_conserved(client, keys)


async def test_after_a_kill_of_its_worker_an_agent_continues_with_the_same_key_at_another_one(
    client: redis.Redis, keys: Keys, agents: Callable[..., Config], fake: FakeEngine, start: Start
) -> None:
    [name] = admit(client, keys, [job(0, environment="agent", n=1)])
    config = agents()
    worker = start(config, "first")
    async with tended(client, keys):
        async with agent_of(client, keys, config) as agent:
            key = (await opened(agent))["key"]
            one = await agent.ask(key, "go")
            two = await agent.ask(key, "go", one["content"], "on")
        worker.signal(signal.SIGKILL)
        await worker.exit_code()
        run(client, scripts.note(keys, keys.workers, next(iter(client.hkeys(keys.workers))).decode(), b""))
        asked = len(fake.prompts)
        async with working(config, "second"), agent_of(client, keys, config) as agent:
            await until(lambda: b"second" in (client.hget(keys.group(name), "own") or b""), "for the lease")
            again = await agent.ask(key, "go", one["content"], "on")
            assert again == two, "a finished turn is answered from the record"
            assert len(fake.prompts) == asked
            await agent.ask(key, "go", one["content"], "on", two["content"], "end")
            assert await agent.post("/finish", key=key, reward=1.0) == (200, {})
            await until(all_in(client, keys, [name], "ready"))
    [(meta, payload)] = read_group(client, keys, name)
    assert (
        text(payload.tokens.tolist())
        == "u>go<a>" + "<u>on<a>".join([text(ANSWER), text(ANSWER)]) + f"<u>end<a>{text(ANSWER)}"
    )
    assert (meta.num_turns, metas(client, keys, name)[0].reward) == (3, 1.0)
    play.assert_conserved(client, keys)
