"""Tools of a real MCP server, which is a child process."""

import sys
from pathlib import Path

import pytest

from penstock.errors import EnvironmentRaised
from penstock.records.sample import Sample
from penstock.workers.agents.adapters.mcp_tools import McpEnvironment
from penstock.workers.agents.model_chat import ModelChat
from tests.missing import module
from tests.unit.workers.agents.conversation_parts import (
    JOB,
    TOKENIZER,
    ScriptedEngine,
    Settings,
    run_environment,
    tool_call,
)

module("mcp")
SERVER = Path(__file__).parents[4] / "mcp_server.py"


class Served(McpEnvironment):
    command = (sys.executable, str(SERVER))

    async def reward(self, sample: Sample) -> float:
        return float(self.conversation[-1]["content"] == sample.job.label)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_the_tools_of_a_server_are_called_and_it_ends_with_the_sample() -> None:
    engine = ScriptedEngine(tool_call("add", {"a": 1, "b": 2}) + tool_call("pid", {}) + tool_call("fail", {}), "3")

    sample, environment = await run_environment(Served, engine)

    assert sample.reward == 1.0
    assert '"description": "Add two numbers."' in engine.prompts[0]
    added, pid, failed = (one["content"] for one in environment.conversation[2:5])
    assert added == "3"
    assert "on purpose" in failed
    assert not is_running(int(pid))


async def test_a_server_that_ends_fails_the_sample() -> None:
    with pytest.raises(EnvironmentRaised, match=r"the MCP server .* exited during a call of end"):
        await run_environment(Served, ScriptedEngine(tool_call("end", {}), "3"))


async def test_a_server_ends_with_an_environment_that_is_closed() -> None:
    environment = Served(ModelChat(Settings(), ScriptedEngine(), TOKENIZER))  # type: ignore[arg-type]
    await environment.reset(JOB)
    pid = int(await environment.call("pid", {}, None))  # type: ignore[arg-type]
    assert is_running(pid)

    await environment.close()

    assert not is_running(pid)
