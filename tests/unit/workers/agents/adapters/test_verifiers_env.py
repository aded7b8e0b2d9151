"""Environments of the real verifiers, whose model is the policy."""

import json
from typing import Any

import pytest

from penstock.errors import EnvironmentRaised
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.agents.adapters.verifiers_env import VerifiersEnvironment, VerifiersRows
from tests.missing import module
from tests.unit.workers.agents.conversation_parts import ScriptedEngine, Settings, run_environment, tool_call

vf = module("verifiers")
datasets = module("datasets")


def dataset() -> Any:
    return datasets.Dataset.from_list([{"question": "how much is 1 + 2?", "answer": "3"}])


def is_right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Single(VerifiersEnvironment):
    @classmethod
    def load(cls) -> Any:
        return vf.SingleTurnEnv(dataset=dataset(), rubric=vf.Rubric(funcs=[is_right]), system_prompt="be brief")


class Doubting(VerifiersEnvironment):
    @classmethod
    def load(cls) -> Any:
        class Doubts(vf.MultiTurnEnv):  # type: ignore[misc]
            async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
                return [{"role": "user", "content": "sure?"}]

        return Doubts(dataset=dataset(), rubric=vf.Rubric(funcs=[is_right]), max_turns=2)


class Tooled(VerifiersEnvironment):
    @classmethod
    def load(cls) -> Any:
        return vf.ToolEnv(dataset=dataset(), tools=[add], rubric=vf.Rubric(funcs=[is_right]))


class Failing(VerifiersEnvironment):
    @classmethod
    def load(cls) -> Any:
        class Fails(vf.MultiTurnEnv):  # type: ignore[misc]
            async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
                raise vf.Error("on purpose")

        return Fails(dataset=dataset(), rubric=vf.Rubric(funcs=[is_right]))


async def played(kind: type[VerifiersEnvironment], engine: ScriptedEngine, **limits: Any) -> Sample:
    class Rows(VerifiersRows):
        environment = kind

    rows = Rows()
    assert len(rows) == 1
    row = json.loads(json.dumps(rows.row(0)))
    job = Job(id="d/0/0", n=1, prompt=row["prompt"], label=row["label"], metadata=row["metadata"])
    sample, _ = await run_environment(kind, engine, job, settings=Settings(**limits))
    return sample


async def test_a_single_turn() -> None:
    engine = ScriptedEngine("3")

    sample = await played(Single, engine)

    assert (sample.reward, sample.num_turns, sample.parts) == (1.0, 1, [])
    assert engine.prompts[0].endswith(
        "be brief<|im_end|>\n<|im_start|>user\nhow much is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("last", "reward"), [("3", 1.0), ("", 0.0)])
async def test_several_turns(last: str, reward: float) -> None:
    engine = ScriptedEngine("4", last)

    sample = await played(Doubting, engine)

    assert (sample.reward, sample.num_turns, sample.parts) == (reward, 2, [])
    assert "sure?" in engine.prompts[1]


async def test_tools() -> None:
    engine = ScriptedEngine(tool_call("add", {"a": 1, "b": 2}) + tool_call("add", {"a": 0, "b": 2}), "3")

    sample = await played(Tooled, engine)

    assert (sample.reward, sample.parts) == (1.0, [])
    assert "<tool_response>\n3\n</tool_response>" in engine.prompts[1]
    assert sample.reward_info["total_tool_calls"] == 2.0


async def test_a_rollout_without_room_is_scored() -> None:
    sample = await played(Doubting, ScriptedEngine("3"), max_turns=1)

    assert (sample.reward, sample.status) == (1.0, "truncated")


async def test_an_error_of_the_environment_fails_the_sample() -> None:
    with pytest.raises(EnvironmentRaised, match="the rollout of verifiers failed"):
        await played(Failing, ScriptedEngine("3"))
