"""Rewards: a number, or a named outcome (T11)."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import Config, RewardConfig
from penstock.config.hooks import REMOTE, REWARDS
from penstock.errors import ConfigError, RewardError
from penstock.hooks.user_imports import named
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.jobs.environments import allowed_environments
from penstock.workers.rewards.allowed import allowed_rewards
from penstock.workers.rewards.kinds.registry import KINDS
from penstock.workers.rewards.score import Rewards

MODULE = """
import asyncio, math, threading
import numpy as np

calls = []
release = threading.Event()

def length(sample): return len(sample.text)
async def alength(sample):
    await asyncio.sleep(0)
    return len(sample.text)
class Scorer:
    async def __call__(self, sample): return 0.25
scorer = Scorer()
def late(sample): return alength(sample)
def boolean(sample): return sample.text == "x"
def numpy_number(sample): return np.float32(0.5)
def numpy_bool(sample): return np.bool_(True)
def nan(sample): return math.nan
def infinite(sample): return -math.inf
def none(sample): return None
def text(sample): return "1.0"
def graded(sample): return {"score": 0.5, "pred": "7", "parts": np.array([1, 2])}
def keyless(sample): return {"acc": 1}
def raises(sample):
    calls.append(sample.id)
    raise KeyError("gone")
def raises_once(sample):
    calls.append(sample.id)
    if len(calls) == 1:
        raise OSError("again")
    return 1
def raises_timeout(sample): raise TimeoutError("mine")
def stops(sample): raise StopIteration
def hangs(sample): release.wait(30)
async def ahangs(sample): await asyncio.Event().wait()
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "reward_examples.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "reward_examples", raising=False)
    found = __import__("reward_examples")
    yield found
    # A thread that hangs is let go.
    found.release.set()


def sample(text: str = "abc", label: str = "", reward: str | None = None) -> Sample:
    made = Sample(Job("sums/0/0", 1, label=label, reward=reward), 0)
    made.text = text
    return made


async def score(function: str, made: Sample | None = None, **settings: Any) -> Sample:
    made = made or sample()
    allowed = [made.job.reward] if made.job.reward else []
    await Rewards(RewardConfig(function=function, **settings), allowed=allowed).score(made)
    return made


async def outcome(function: str, **settings: Any) -> tuple[str, str]:
    with pytest.raises(RewardError) as caught:
        await score(f"reward_examples:{function}", **settings)
    return caught.value.outcome, str(caught.value)


def test_rewards_of_penstocks_own_are_those_that_a_configuration_may_name() -> None:
    assert {*KINDS, REMOTE} == set(REWARDS)


async def test_exact_match_leaves_white_space_out() -> None:
    assert (await score("exact_match", sample(" 12 \n", "12"))).reward == 1.0
    assert (await score("exact_match", sample("1 2", "12"))).reward == 0.0


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("function", "reward"),
    [
        ("length", 3.0),
        ("alength", 3.0),
        ("scorer", 0.25),
        ("late", 3.0),
        ("boolean", 0.0),
        ("numpy_number", 0.5),
        ("numpy_bool", 1.0),
    ],
)
async def test_a_function_of_the_user_sync_or_async(function: str, reward: float) -> None:
    made = await score(f"reward_examples:{function}")

    assert made.reward == reward
    assert type(made.reward) is float
    assert made.reward_s > 0


@pytest.mark.usefixtures("module")
async def test_a_dict_gives_its_key_as_reward_and_the_rest_as_plain_values() -> None:
    made = await score("reward_examples:graded")

    assert made.reward == 0.5
    assert made.reward_info == {"pred": "7", "parts": [1, 2]}
    assert not isinstance(made.reward_info["parts"], np.ndarray)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("function", ["nan", "infinite", "none", "text", "keyless"])
async def test_T11_what_is_no_finite_number_is_reward_not_a_number(function: str) -> None:
    made = sample()

    with pytest.raises(RewardError) as caught:
        await score(f"reward_examples:{function}", made)

    assert caught.value.outcome == "reward_not_a_number"
    assert "sums/0/0/0" in str(caught.value)
    assert made.reward is None


async def test_T11_a_function_that_raises_is_tried_again_and_then_reward_raised(module: Any) -> None:
    name, text = await outcome("raises", max_attempts=3)

    assert name == "reward_raised"
    assert "KeyError: 'gone'" in text
    assert len(module.calls) == 3


async def test_T11_a_label_that_a_quick_reward_by_name_refuses_is_reward_raised_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        RewardError, match=r"sample sums/0/0/0: reward dapo raised ValueError: .*not an integer"
    ) as caught:
        await score("dapo", sample("Answer: 7", "seven"), max_attempts=5)

    assert caught.value.outcome == "reward_raised"
    assert "tried again" not in caplog.text


async def test_a_function_that_raises_once_is_scored_by_its_second_try(module: Any) -> None:
    assert (await score("reward_examples:raises_once", max_attempts=2)).reward == 1.0
    assert len(module.calls) == 2


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("function", ["raises_timeout", "stops"])
async def test_exceptions_that_asyncio_uses_itself_are_reward_raised(function: str) -> None:
    assert (await outcome(function))[0] == "reward_raised"


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("function", ["hangs", "ahangs"])
async def test_T11_a_function_that_hangs_is_reward_timeout(function: str) -> None:
    async with asyncio.timeout(60):
        name, text = await outcome(function, timeout_s=0.05)

    assert name == "reward_timeout"
    assert "longer than 0.05 s" in text


@pytest.mark.usefixtures("module")
async def test_a_hanging_function_holds_nobody_up() -> None:
    config = RewardConfig(function="reward_examples:hangs", timeout_s=0.05)
    rewards = Rewards(config, allowed=["reward_examples:length"])
    async with asyncio.timeout(60):
        await asyncio.gather(*(rewards.score(sample()) for _ in range(50)), return_exceptions=True)
    # However slow the machine is.
    rewards.config = config.model_copy(update={"timeout_s": 60.0})
    await rewards.score(other := sample(reward="reward_examples:length"))

    assert other.reward == 3.0
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("reward "))


@pytest.mark.usefixtures("module")
async def test_a_jobs_own_reward_goes_before_the_runs() -> None:
    assert (await score("exact_match", sample("abc", "abc", reward="reward_examples:length"))).reward == 3.0


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("exact", f"use {', '.join(REWARDS)} or module:function"),
        ("no_such_module:f", "there is no module no_such_module"),
        ("reward_examples:absent", "correct the name after the colon"),
        ("reward_examples:number", "is not a function"),
    ],
)
async def test_a_reward_that_is_not_there_is_a_mistake_of_the_configuration(function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rewards(RewardConfig().model_copy(update={"function": function}))


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("name", ["os:getpid", "nowhere:f", "reward_examples:length", "exact", ":", "a" * 10_000])
async def test_a_jobs_reward_that_the_configuration_does_not_name_is_refused(name: str) -> None:
    rewards = Rewards(RewardConfig(function="exact_match"), allowed=["reward_examples:boolean"])
    made = sample(reward=name)
    with pytest.raises(ConfigError, match=r"add it to worker\.rewards") as caught:
        await rewards.score(made)

    assert name[:70] in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.usefixtures("module")
async def test_a_job_may_name_what_the_configuration_names_and_what_is_built_in() -> None:
    rewards = Rewards(RewardConfig(function="reward_examples:length"), allowed=["reward_examples:boolean"])
    for name, expected in (("exact_match", 1.0), ("reward_examples:boolean", 1.0), ("reward_examples:length", 1.0)):
        made = sample("x", "x", reward=name)
        await rewards.score(made)
        assert made.reward == expected


def test_everything_that_a_configuration_names_may_be_named_by_a_job() -> None:
    config = Config.model_validate(
        {
            "run": "r",
            "model": {"path": "none"},
            "data": {
                "train": [{"name": "a", "path": "a.jsonl", "reward": "m:a", "environment": "m:A"}],
                "eval": [{"name": "b", "path": "b.jsonl", "reward": "m:b", "environment": "m:B"}],
            },
            "reward": {"function": "m:run"},
            "worker": {"rewards": ["m:own"], "environments": ["m:Own"]},
        }
    )
    assert allowed_rewards(config) == {"m:a", "m:b", "m:run", "m:own"}
    assert allowed_environments(config) == ["m:Own", "m:A", "m:B"]
    assert {("worker.rewards", "m:own"), ("worker.environments", "m:Own")} <= set(named(config))


@pytest.fixture
async def maths(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rewards]:
    monkeypatch.setattr("penstock.workers.rewards.score.CHECK_CPU_S", 1)
    config = {"function": "math_verify", "pool": {"workers": 1}, "timeout_s": 120}
    rewards = Rewards(RewardConfig.model_validate(config))
    yield rewards
    await rewards.close()


async def test_math_verify_compares_as_mathematics(maths: Rewards) -> None:
    right = sample("so it is \\boxed{\\frac{1}{2}}", "0.5")
    wrong = sample("so it is \\boxed{2}", "0.5")
    none = sample("I do not know", "0.5")
    marked = sample("$\\sqrt{2}/2$", "$\\frac{1}{\\sqrt{2}}$")
    for made in (right, wrong, none, marked):
        await maths.score(made)

    assert [made.reward for made in (right, wrong, none, marked)] == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("label", "text", "reward"),
    [
        ("\\$18.90", "\\boxed{18.90}", 1.0),
        ("\\$36", "it costs \\boxed{\\$36}", 1.0),
        ("\\$32,\\!348", "\\boxed{32348}", 1.0),
        ("\\$32,\\!348", "\\boxed{32349}", 0.0),
        ("5", "<think>\\boxed{6}</think>It is \\boxed{5}.", 1.0),
        ("6", "<think>\\boxed{6}</think>It is \\boxed{5}.", 0.0),
        ("5", "first \\boxed{6}, no, \\boxed{5}", 1.0),
        ("6", "first \\boxed{6}, no, \\boxed{5}", 0.0),
        ("\\frac{1}{2}", "</think> \\boxed{\\frac{1}{2}} for sure", 1.0),
        ("6", "<think>\\boxed{6}</think>", 0.0),
    ],
)
async def test_T11_math_verify_judges_the_last_box_after_the_thoughts_and_reads_money(
    maths: Rewards, label: str, text: str, reward: float
) -> None:
    await maths.score(made := sample(text, label))
    assert made.reward == reward


async def test_T11_a_label_that_burns_the_cpu_is_the_jobs_failure_and_no_answers_0(maths: Rewards) -> None:
    with pytest.raises(RewardError) as caught:
        await maths.score(sample("\\boxed{3}", "9^{9^{9^{9}}}"))
    assert caught.value.outcome == "reward_raised"
    assert "takes more than 1 s of CPU time to be read" in str(caught.value)
    await maths.score(made := sample("$3$", "3"))
    assert made.reward == 1.0


async def test_T11_a_check_over_its_own_cpu_limit_is_worth_0_and_the_next_one_is_served(maths: Rewards) -> None:
    hanging, next_ = sample("$9^{9^{9^{9}}}$", "3"), sample("$3$", "3")
    await maths.score(hanging)
    await maths.score(next_)

    assert (hanging.reward, hanging.reward_info) == (0.0, {"out_of_time": True})
    assert next_.reward == 1.0


async def test_T11_an_overloaded_verifier_is_reward_timeout_and_not_worth_0(maths: Rewards) -> None:
    await maths.score(sample("$1$", "1"))
    assert maths.processes is not None
    async with maths.processes.free:  # its only process is busy
        maths.config = maths.config.model_copy(update={"timeout_s": 0.05})
        with pytest.raises(RewardError) as caught:
            await maths.score(sample("$3$", "3"))

    assert caught.value.outcome == "reward_timeout"


async def test_T11_a_killed_verifier_is_started_again(maths: Rewards) -> None:
    await maths.score(sample("$1$", "1"))
    assert maths.processes is not None
    maths.processes.idle[0].process.kill()

    await maths.score(made := sample("$3$", "3"))

    assert made.reward == 1.0
