"""Episodes of a real OpenEnv server, which is a process."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import EnvironmentRaised
from penstock.records.job import Job
from penstock.workers.agents.adapters.open_env import OpenEnvEnvironment
from tests.unit.workers.agents.conversation_parts import ScriptedEngine, Settings, run_environment

# Not among the packages of the tests: pip install 'penstock[openenv]'.
pytest.importorskip("openenv")
SERVER = Path(__file__).parents[4] / "open_env_server.py"
LIMIT_S = 120
JOB = Job(id="d/0/0", n=1, prompt="guess my number", metadata={"openenv": {"number": 5}})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(SERVER), str(port)]) as server:
        deadline = time.monotonic() + LIMIT_S
        while not answers(port):
            assert server.poll() is None
            assert time.monotonic() < deadline, f"the server did not answer within {LIMIT_S} s"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def environment_at(address: str) -> type[OpenEnvEnvironment]:
    class Guessing(OpenEnvEnvironment):
        url = address

        def message(self, observation: Any) -> str:
            return str(observation["text"])

    return Guessing


async def test_an_episode_ends_with_its_server_and_sums_the_rewards(url: str) -> None:
    engine = ScriptedEngine("3", "6", "5")

    sample, _ = await run_environment(environment_at(url), engine, JOB)

    assert (sample.reward, sample.num_turns, sample.parts) == (0.5, 3, [])
    assert "user\nguess my number\nguess<|im_end|>" in engine.prompts[0]
    assert engine.prompts[2].endswith(
        "higher<|im_end|>\n<|im_start|>assistant\n6<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_an_episode_without_room_keeps_the_rewards_so_far(url: str) -> None:
    sample, _ = await run_environment(
        environment_at(url), ScriptedEngine("3", "6"), JOB, settings=Settings(max_turns=2)
    )

    assert (sample.reward, sample.status) == (-0.5, "truncated")


async def test_an_error_of_the_server_fails_the_sample(url: str) -> None:
    with pytest.raises(EnvironmentRaised, match="invalid literal"):
        await run_environment(environment_at(url), ScriptedEngine("three"), JOB)
