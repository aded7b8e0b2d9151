"""Environments that ask a model, run by the worker's own loop against a scripted engine."""

import json
from collections.abc import Sequence
from typing import Any

from penstock import ConversationEnvironment
from penstock.config import RolloutConfig
from penstock.config.agents import AgentsConfig
from penstock.errors import EngineDied, EngineError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.agents.model_chat import ModelChat
from penstock.workers.engine import Segment
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.valves import Valves
from penstock.workers.sglang.server_info import ServerInfo
from tests.chat_templates import CHATML, make_tokenizer

TOKENIZER = make_tokenizer(CHATML)
END = TOKENIZER.encode("<|im_end|>")
JOB = Job(id="d/0/0", n=1, prompt="how much is 1 + 2?", label="3")


def tool_call(name: str, arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


class ScriptedEngine:
    """Generates ``answers`` in order, and parses calls as the parser qwen25 does."""

    eos_token_ids = frozenset(END)
    info = ServerInfo(max_context=4000)
    abandoned: tuple[tuple[int, int], ...] = ()
    returns_routing = False
    version = 1

    def __init__(self, *answers: str, deaths: int = 0) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.deaths = deaths

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], *, rid: str) -> Segment:
        self.prompts.append(TOKENIZER.decode(input_ids))
        if not self.answers:
            raise EngineDied("it has no more answers")
        ids = TOKENIZER.encode(self.answers.pop(0))
        most = sampling["max_new_tokens"]
        reason = "stop" if len(ids) < most else "length"
        ids = (ids + END)[:most]
        return Segment(ids, [-1.0] * len(ids), [1] * len(ids), reason, cached_tokens=0, prompt_tokens=1)

    async def parse_calls(self, text: str, tools: Sequence[Any], parser: str) -> tuple[str, list[tuple[str, str]]]:
        if self.deaths:
            self.deaths -= 1
            raise EngineDied("gone")
        if parser != "qwen25":
            raise EngineError("no such parser")
        rest, *parts = text.split("<tool_call>\n")
        made = [json.loads(part.partition("\n</tool_call>")[0]) for part in parts]
        return rest.strip(), [(one["name"], json.dumps(one["arguments"])) for one in made]


class Settings:
    """The sections of a configuration that conversations read."""

    def __init__(self, parser: str | None = "qwen25", **rollout: Any) -> None:
        self.agents = AgentsConfig(tool_call_parser=parser)
        self.rollout = RolloutConfig(**{"sampling": {"max_new_tokens": 500}, "max_context_tokens": 3000} | rollout)


async def run_environment(
    kind: type[ConversationEnvironment],
    engine: ScriptedEngine,
    job: Job = JOB,
    tokenizer: Any = TOKENIZER,
    settings: Settings | None = None,
    partial: Sample | None = None,
) -> tuple[Sample, Any]:
    settings = settings or Settings()
    environment = kind(ModelChat(settings, engine, tokenizer))  # type: ignore[arg-type]
    try:
        sample = await generate_sample(
            Source(engine, Valves(), tokenizer, settings.rollout),  # type: ignore[arg-type]
            partial or Sample(job, 0),
            environment=environment,
        )
    finally:
        await environment.close()
    return sample, environment
