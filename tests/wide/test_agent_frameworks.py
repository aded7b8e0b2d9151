"""Agents of frameworks through a gateway process and a worker process: their conversations become samples."""

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.records.keys import Keys
from penstock.system.processes import free_port
from tests.chat_templates import CHATML, make_tokenizer
from tests.integration import play
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_fixtures import config, fake
from tests.integration.gateway_parts import CLIENT
from tests.integration.part_processes import StartPart, start_part
from tests.integration.worker_play import admit, all_in, job, read_group, tended, until
from tests.missing import need

__all__ = ["config", "fake", "start_part"]

PYTHON = os.environ.get("PENSTOCK_AGENTS_PYTHON", ".agents/bin/python")
#: Longest run of one program; imports alone take 10 s on a busy machine.
PROCESS_S = 240
pytestmark = pytest.mark.timeout(2 * PROCESS_S)


@pytest.fixture(scope="module", autouse=True)
def _agents() -> None:
    need(PYTHON, "agents")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script:
    """Answers of the engine, one after the other. Each is a token per byte, which no tokenizer makes of a call."""

    def __init__(self, tokenizer: Any, answers: list[str]) -> None:
        self.tokenizer = tokenizer
        self._left = list(answers)
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []

    def __call__(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        text, end = self._left.pop(0), [self.tokenizer.eos_token_id]
        for stop in sampling.get("stop") or ():
            if (at := text.find(stop)) >= 0:
                text, end = text[: at + len(stop)], []
        ids = [token for letter in text for token in self.tokenizer.encode(letter, add_special_tokens=False)] + end
        self.prompts.append(prompt)
        self.answers.append(ids)
        return ids

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


Run = Callable[[str, list[str]], Awaitable[tuple[Script, dict[str, Any], Any, list[list[int]]]]]


@pytest.fixture
def run(
    client: redis.Redis,
    keys: Keys,
    config: Callable[..., Config],
    fake: FakeEngine,
    model_config: ModelConfig,
    start_part: StartPart,
    tmp_path: Path,
) -> Run:
    """Returns what a program prints, its sample's record, and the tokens of the sample's parts."""
    model = Path(shutil.copytree(model_config.path, tmp_path / "chat"))
    tokenizer = make_tokenizer(CHATML)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(model)
    about = json.loads((model / "config.json").read_text())
    about |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 65536}
    (model / "config.json").write_text(json.dumps(about))
    (model / "generation_config.json").unlink(missing_ok=True)

    async def run_program(name: str, answers: list[str]) -> tuple[Script, dict[str, Any], Any, list[list[int]]]:
        fake.script = script = Script(tokenizer, answers)
        [one] = admit(client, keys, [job(0, environment="agent", n=1, prompt="What is 2 + 3?", label="5")])
        served = {"port": free_port(), "clients": {"me": CLIENT}, "tool_call_parser": "qwen25"}
        rollout = {"sampling": {"max_new_tokens": 600, "temperature": 1.0}, "max_context_tokens": 40000}
        settings = config(
            data={"train": [{"name": "d", "path": "none.jsonl", "environment": "agent"}]},
            model=model_config.model_copy(update={"path": str(model)}),
            rollout=rollout,
            agents=served,
        )
        parts = [start_part("worker", settings), start_part("serve", settings)]
        async with tended(client, keys):
            await until(lambda: client.hlen(keys.parts), "for the gateway")
            program = await asyncio.create_subprocess_exec(
                PYTHON, "-m", "tests.agents.programs", name, f"http://127.0.0.1:{served['port']}", CLIENT,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, errors = await asyncio.wait_for(program.communicate(), PROCESS_S)
            logs = "\n".join(part.text()[-3000:] for part in parts)
            assert program.returncode == 0, f"{errors.decode()[-6000:]}\n{logs}"
            await until(all_in(client, keys, [one], "ready"), logs)
        [(meta, payload)] = read_group(client, keys, one)
        play.assert_conserved(client, keys)
        tokens, generated = payload.tokens.tolist(), payload.generated.tolist()
        pairs = groupby(zip(tokens, generated, strict=True), lambda pair: pair[1])
        assert [[token for token, _ in run] for made, run in pairs if made] == script.answers
        lengths = [part.length for part in meta.all_parts] or [len(tokens)]
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        found = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        return script, json.loads(out.splitlines()[-1]), meta, found

    return run_program


CALLS = ["I add.\n" + call("add", a=2, b=3) + "\n" + call("add", a=1, b=1), call("add", a=5, b=0), "It is 5."]


@pytest.mark.parametrize("name", ["openai_agents", "openai_agents_streamed"])
async def test_an_agent_of_openai_agents_is_one_part(run: Run, name: str) -> None:
    script, done, meta, parts = await run(name, [*CALLS, call("add", a=5, b=5), "It is 10."])

    assert done["answers"] == ["It is 5.", "It is 10."]
    assert (meta.num_turns, meta.reward, len(parts)) == (5, 1.0, 1)
    assert parts[0] == script.prompts[-1] + script.answers[-1]
    text = script.text(parts[0])
    assert "<tool_response>\n5\n</tool_response>" in text
    assert "<|im_start|>user\nAnd doubled?<|im_end|>\n<|im_start|>assistant\n" in text


async def test_an_agent_of_smolagents_rewrites_answers_with_calls_and_each_begins_a_part(run: Run) -> None:
    answers = ["I think.", call("add", a=2, b=3), call("final_answer", answer=5)]

    script, done, meta, parts = await run("smolagents_calls", answers)

    assert done["answers"] == [5], "the policy may answer without the call that each request requires"
    assert meta.num_turns == 3
    assert parts == [script.prompts[at] + script.answers[at] for at in (1, 2)]
    assert parts[0][: len(script.prompts[0] + script.answers[0])] == script.prompts[0] + script.answers[0]
    assert "Calling tools:" in script.text(parts[1])


async def test_an_agent_of_smolagents_that_writes_code(run: Run) -> None:
    answers = ["I add.\n<code>\nx = add(2, 3)\nprint(x)\n</code>", "<code>\nfinal_answer(x)\n</code>"]

    script, done, meta, parts = await run("smolagents_code", answers)

    assert done["answers"] == [5]
    assert meta.num_turns == 2
    assert script.text(script.answers[0]) == answers[0], "the stop that the engine generated is a token of the sample"
    assert parts == [prompt + ids for prompt, ids in zip(script.prompts, script.answers, strict=True)]


async def test_a_rollout_of_verifiers_with_a_single_turn(run: Run) -> None:
    script, done, meta, [tokens] = await run("verifiers_single", ["It is 5."])

    assert done == {"answers": ["It is 5."], "reward": 1.0}
    assert (meta.num_turns, meta.reward) == (1, 1.0)
    assert tokens == script.prompts[0] + script.answers[0]


async def test_a_rollout_of_verifiers_with_tools_is_one_part(run: Run) -> None:
    script, done, meta, [tokens] = await run("verifiers_tools", CALLS)

    assert done == {"answers": ["It is 5."], "reward": 1.0}
    assert (meta.num_turns, meta.reward) == (3, 1.0)
    assert tokens == script.prompts[-1] + script.answers[-1]
