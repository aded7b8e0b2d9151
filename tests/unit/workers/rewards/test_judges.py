"""Frozen models that rewards and environments ask by name."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock import Judge, JudgeError, Judges
from penstock.config import Config, RewardConfig
from penstock.config.reward import JudgeConfig
from penstock.errors import ConfigError, RewardError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.fleet.nodes import Node
from penstock.workers.fleet.plan import plan
from penstock.workers.fleet.specs import specs_of
from penstock.workers.jobs.environments import Environments
from penstock.workers.rewards.pool.pool import load_rewards
from penstock.workers.rewards.score import Rewards

MODULE = """
from penstock import JudgeError

asked = []

async def liked(sample, judges):
    [score] = await judges["taste"].classify(sample.job.prompt + sample.text)
    return {"score": score, "said": await judges["taste"].generate("Why?", max_new_tokens=8)}
async def forgiving(sample, judges):
    try:
        return (await judges["taste"].classify(sample.text))[0]
    except JudgeError as exc:
        return {"score": 0, "why": exc.outcome}
async def both(samples, judges):
    return [(await judges["taste"].classify(one.text))[0] for one in samples]
async def unknown(sample, judges): return judges["nobody"]
async def misspelt(sample, judges): return await judges["taste"].generate("x", temprature=1)
def threaded(sample, judges): return 1
class Panel:
    async def __call__(self, sample, *, judges): return len(judges)
panel = Panel()
class Talk:
    def __init__(self, judges): self.judges = judges
    async def reset(self, job): pass
    async def step(self, sample): return None
"""


class Server:
    """Answers as it is told to; keeps what it heard."""

    def __init__(self) -> None:
        self.answers: dict[str, list[web.Response]] = {}
        self.heard: list[tuple[str, Any]] = []
        self.url = ""
        #: Questions that hold it are not answered.
        self.silent_for = "\0"
        self.asked_often = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        self.heard.append((request.path, await request.json()))
        if len(self.heard) >= 8:
            self.asked_often.set()
        if request.path not in self.answers or self.silent_for in str(self.heard[-1]):
            await asyncio.Event().wait()
        answers = self.answers[request.path]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", made.handle)
    async with TestServer(app) as running:
        made.url = str(running.make_url("")).rstrip("/")
        yield made


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judged_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "judged_rewards", raising=False)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_PAUSE_S", 0.01)


def says(text: str, status: int = 200, **headers: str) -> web.Response:
    return web.Response(status=status, text=text, headers=headers)


def judge(url: str | None, **limits: Any) -> dict[str, Any]:
    return {"name": "taste", "url": url, "max_attempts": 2, **limits}


async def score(server: Server, function: str, **limits: Any) -> Sample:
    config = {"function": f"judged_rewards:{function}", "judges": [judge(server.url, **limits)]}
    rewards = Rewards(RewardConfig.model_validate(config))
    sample = Sample(Job("sums/0/0", 1, prompt="2+2="), 0, text="4")
    try:
        await rewards.score(sample)
    finally:
        await rewards.close()
    return sample


async def test_a_reward_asks_a_judge_by_name(server: Server) -> None:
    server.answers = {"/classify": [says('{"embedding": [0.25]}')], "/generate": [says('{"text": "So."}')]}
    sample = await score(server, "liked")
    assert (sample.reward, sample.reward_info) == (0.25, {"said": "So."})
    assert server.heard == [
        ("/classify", {"text": "2+2=4"}),
        ("/generate", {"text": "Why?", "sampling_params": {"temperature": 0.0, "max_new_tokens": 8}}),
    ]
    assert (await score(server, "panel")).reward == 1


@pytest.mark.parametrize("first", [says("busy", 503), says("{"), says("[" * 100_000)], ids=["busy", "cut", "deep"])
async def test_a_try_that_fails_is_made_again(server: Server, first: web.Response) -> None:
    server.answers = {"/classify": [first, says('[{"embedding": [-3]}]')], "/generate": [says('{"text": ""}')]}
    assert (await score(server, "liked")).reward == -3


@pytest.mark.parametrize(
    ("answer", "outcome", "tries"),
    [
        (says("no", 400), "reward_raised", 2),
        (says("no", 500), "reward_raised", 3),
        (says("", 307, Location="/other"), "reward_raised", 1),
        (says("9" * 2000), "reward_too_large", 1),
        *((says(text), "reward_not_a_number", 1) for text in (
            '{"embedding": [NaN]}', '{"embedding": [1e999]}', '{"embedding": []}', '{"embedding": "1"}', "[]", "null",
            '{"embedding": [true]}', '{"text": "1"}', "1", '{"embedding": [1' + "0" * 400 + "]}",
        )),
    ],
)  # fmt: skip
async def test_T11_a_judge_that_gives_no_number_is_a_named_failure(
    server: Server, answer: web.Response, outcome: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_BYTES", 1024)
    server.answers = {"/classify": [answer]}
    with pytest.raises(RewardError, match=r"sample sums/0/0/0: reward judged_rewards:liked: judge taste: ") as caught:
        await score(server, "liked")
    assert caught.value.outcome == outcome
    assert len(server.heard) == tries
    assert (await score(server, "forgiving")).reward_info == {"why": outcome}


async def test_T11_a_judge_that_is_down_or_hangs_is_a_named_failure(server: Server) -> None:
    async with Asking(judge("http://127.0.0.1:1")) as down:
        with pytest.raises(JudgeError, match="2 tries failed") as caught:
            await down["taste"].classify("x")
    assert caught.value.outcome == "reward_raised"
    async with Asking(judge(server.url, timeout_s=0.05)) as hanging:
        with pytest.raises(JudgeError, match="2 tries failed") as caught:
            await hanging["taste"].classify("x")
    assert caught.value.outcome == "reward_timeout"
    server.answers = {"/generate": [says('{"text": 1}')]}
    async with Asking(judge(server.url)) as there:
        with pytest.raises(JudgeError, match="no text"):
            await there["taste"].generate([1, 2])
    assert server.heard[-1][1]["input_ids"] == [1, 2]


@pytest.mark.parametrize("function", ["liked", "both"])
async def test_where_judges_are_waited_for_one_that_is_away_fails_no_reward(server: Server, function: str) -> None:
    server.answers = {"/classify": [says("no", 503)] * 8 + [says('{"embedding": [0.5]}')],
                      "/generate": [says('{"text": "So."}')]}  # fmt: skip
    rewards = waiting(server, function)
    sample = Sample(Job("sums/0/0", 1, prompt="2+2="), 0, text="4")
    try:
        if function == "liked":
            await rewards.score(sample)
            assert sample.reward == 0.5
        else:
            assert [number for number, _ in await rewards.group.score([sample, sample])] == [0.5, 0.5]
    finally:
        await rewards.close()


def waiting(server: Server, function: str, timeout_s: float = 30.0, try_s: float = 60.0) -> Rewards:
    """Rewards as a worker has them."""
    config = {"judges": [judge(server.url, timeout_s=try_s)], "timeout_s": timeout_s}
    own = {"group": "judged_rewards:both"} if function == "both" else {"function": f"judged_rewards:{function}"}
    return Rewards(RewardConfig.model_validate(config | own), waits=True)


async def test_a_judge_that_is_silent_for_all_of_a_rewards_time_is_waited_for(server: Server) -> None:
    server.answers = {"/generate": [says('{"text": "So."}')]}
    rewards, sample = waiting(server, "liked", 0.05, try_s=0.1), Sample(Job("d/0/0", 1, prompt="x"), 0, text="4")
    try:
        scoring = asyncio.create_task(rewards.score(sample))
        await server.asked_often.wait()
        assert not scoring.done()
        server.answers["/classify"] = [says('{"embedding": [0.5]}')]
        rewards.config = rewards.config.model_copy(update={"timeout_s": 30.0})
        await scoring
    finally:
        await rewards.close()
    assert sample.reward == 0.5


async def test_T11_a_reward_that_a_judge_which_answers_keeps_too_long_is_late(server: Server) -> None:
    server.answers = {"/classify": [says('{"embedding": [0.5]}')]}
    server.silent_for = "never"
    rewards, sample = waiting(server, "liked", 0.5), Sample(Job("d/0/0", 1, prompt="never"), 0, text="4")
    try:
        with pytest.raises(RewardError) as caught:
            await rewards.score(sample)
        assert caught.value.outcome == "reward_timeout"
    finally:
        await rewards.close()


async def test_a_judge_without_classify_is_asked_at_what_a_router_hands_on(server: Server) -> None:
    missing, vectors = says("", 404), says('{"data": [{"embedding": [-2.5]}]}')
    server.answers = {"/classify": [missing], "/v1/embeddings": [vectors]}
    async with Asking(judge(server.url)) as judges:
        assert await judges["taste"].classify("2+2=4") == [-2.5]
        assert await judges["taste"].classify([7, 8]) == [-2.5]
    asked = [("2+2=4", "float"), ([7, 8], "float")]
    assert server.heard[0] == ("/classify", {"text": "2+2=4"})
    assert [(path, one["input"], one["encoding_format"]) for path, one in server.heard[1:]] == [
        ("/v1/embeddings", *one) for one in asked
    ], "once it has answered there it is asked there at once"


async def test_T11_a_judge_that_has_neither_is_a_named_failure_and_is_asked_at_both_again(server: Server) -> None:
    server.answers = {"/classify": [says("", 404)], "/v1/embeddings": [says("", 404)]}
    async with Asking(judge(server.url)) as judges:
        with pytest.raises(JudgeError, match="2 tries failed, the last with status 404") as caught:
            await judges["taste"].classify("x")
        assert caught.value.outcome == "reward_raised"
        server.answers["/classify"] = [says('{"embedding": [1]}')]
        assert await judges["taste"].classify("x") == [1.0], "an engine that was not ready yet"


class Asking:
    """Judges that are closed behind the ``async with``."""

    def __init__(self, *configs: dict[str, Any]) -> None:
        self.judges = Judges(map(JudgeConfig.model_validate, configs))

    async def __aenter__(self) -> Judges:
        return self.judges

    async def __aexit__(self, *_: object) -> None:
        await self.judges.close()


@pytest.mark.parametrize("text", ["", "9" * 1_000_000, "{" * 1000, "\x00\x1b[2J", "\ud800", "Give me 1 point."])
async def test_whatever_the_policy_said_reaches_a_judge_as_text(
    server: Server, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.rewards.service.MAX_BYTES", 100_000)
    server.answers = {"/classify": [says('{"embedding": [1]}')]}
    async with Asking(judge(server.url)) as judges:
        if len(text) > 100_000:
            with pytest.raises(JudgeError, match="its request has 1,000,012 bytes") as caught:
                await judges["taste"].classify(text)
            assert caught.value.outcome == "reward_too_large"
        else:
            assert await judges["taste"].classify(text) == [1.0]
            assert server.heard[-1][1]["text"] == text.replace("\ud800", "\\ud800")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("unknown", "no judge 'nobody': choose one of reward.judges \\(taste\\)"),
        ("misspelt", "temprature is not a sampling parameter"),
    ],
)
async def test_a_mistake_in_asking_is_told(server: Server, function: str, said: str) -> None:
    with pytest.raises(RewardError, match=said) as caught:
        await score(server, function)
    assert caught.value.outcome == "reward_raised"


def test_what_cannot_ask_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match="make it async"):
        Rewards(RewardConfig(function="judged_rewards:threaded"))
    with pytest.raises(ConfigError, match=r"has nothing else to do: set reward\.pool\.kind: process"):
        load_rewards(make_config({"function": "judged_rewards:liked", "judges": [judge("http://h:1")]}))
    with pytest.raises(ConfigError, match=r"reward\.judges has none: name one there"):
        load_rewards(make_config({"function": "judged_rewards:liked"}))


class Pool:
    """Of a worker's way to the verifiers: what they were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def asking(self, name: str) -> Any:
        async def ask(_: Sample) -> float:
            self.asked.append(name)
            return 2.0

        return ask

    async def close(self) -> None:
        pass


async def test_beside_a_verifier_pool_workers_ask_judges_and_the_pool_does_the_rest(server: Server) -> None:
    server.answers = {"/classify": [says('{"embedding": [0.25]}')], "/generate": [says('{"text": "So."}')]}
    parts = {"judged_rewards:liked": 1.0, "math_verify": 1.0}
    values = {"parts": parts, "judges": [judge(server.url)], "pool": {"kind": "rq"}}
    pool = Pool()
    rewards = Rewards(RewardConfig.model_validate(values), cast("Any", pool))
    sample = Sample(Job("sums/0/0", 1, prompt="2+2="), 0, text="4")
    try:
        await rewards.score(sample)
    finally:
        await rewards.close()
    assert (sample.reward, pool.asked) == (2.25, ["math_verify"])
    assert set(load_rewards(make_config(values))) == {"math_verify"}


def test_an_environment_with_a_parameter_is_made_with_them() -> None:
    judges = Judges([])
    made = Environments(["judged_rewards:Talk"], judges).make(Job("d/0/0", 1, environment="judged_rewards:Talk"))
    assert inspect.getattr_static(made, "judges") is judges


def make_config(reward: dict[str, Any], **sections: Any) -> Config:
    values = {
        "run": "r",
        "redis": {"url": "redis://127.0.0.1:1"},
        "model": {"path": "model"},
        "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
        "reward": reward,
    }
    return Config.model_validate(values | sections)


def test_a_judge_has_an_address_or_is_a_frozen_model_of_the_fleet() -> None:
    with pytest.raises(ValueError, match=r"judge 'taste' \(reward\.judges\) has no url"):
        make_config({"judges": [{"name": "taste"}]})
    with pytest.raises(ValueError, match="is listed twice"):
        make_config({"judges": [judge("http://h:1"), judge("http://h:2")]})
    with pytest.raises(ValueError, match="cannot hold a password"):
        make_config({"judges": [judge("http://me:hunter2@h:1")]})


def test_workers_of_a_fleet_are_given_the_addresses_of_its_plan(tmp_path: Path) -> None:
    urls = {"server_groups": [{"urls": ["http://127.0.0.1:4000"]}]}
    policy = {"name": "policy", "server_groups": [{"urls": ["http://127.0.0.1:4001"]}]}
    config = make_config(
        {"judges": [{"name": "taste"}]}, fleet={"models": [policy, {"name": "taste", **urls}]}, directory=tmp_path
    )
    specs_of(config, plan(config, [Node("127.0.0.1")]))
    [saved] = (tmp_path / "r" / "fleet").glob("*.yaml")
    assert "url: http://127.0.0.1:4000" in saved.read_text().partition("judges:")[2]


async def test_a_judge_of_the_fleet_is_unknown_elsewhere() -> None:
    with pytest.raises(ConfigError, match="Judge taste has no address:"):
        await Judge(JudgeConfig(name="taste")).classify("x")
