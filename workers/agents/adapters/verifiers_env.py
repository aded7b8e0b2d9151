"""Environments of verifiers: single-turn, multi-turn and with tools; their own loop runs, and their rubric scores.

    class Wordle(VerifiersEnvironment):
        @classmethod
        def load(cls):
            return verifiers.load_environment("wordle")

The environment classes are those of releases 0.1 to 0.3. Later ones run agents that talk to an address: give them that
of ``penstock serve``.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

from penstock.records.job import Job
from penstock.system.extras import check_installed
from penstock.workers.agents.conversation import ConversationEnvironment, ConversationFull
from penstock.workers.agents.parsing import Answer

#: Key of the metadata with a row of the environment's dataset.
ROW = "verifiers"


class VerifiersEnvironment(ConversationEnvironment):
    """Run rollouts of an environment, whose model is the policy."""

    @classmethod
    @abstractmethod
    def load(cls) -> Any:
        """Return the environment. Called once in a process."""

    async def run(self, job: Job) -> float:
        """Run a rollout of the job's row; its metrics become fields of the reward.

        Raises:
            RuntimeError: the rollout ended by an error.
        """
        check_installed("verifiers", "An environment of verifiers")
        environment = _loaded(type(self).load)
        output = await environment.run_rollout(dict(job.metadata[ROW]), _client(self), "policy", {})
        if error := output.get("error"):
            raise RuntimeError(f"the rollout of verifiers failed: {error}")
        self.sample.reward_info |= {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        return float(output["reward"])


class VerifiersRows:
    """Rows of an environment's dataset for producers: ``path: python:module:Class`` of a subclass.

    Columns are ``prompt``, ``label`` and ``metadata``.
    """

    #: The environment whose rows these are.
    environment: type[VerifiersEnvironment]

    def __init__(self) -> None:
        self._rows = _loaded(self.environment.load).get_dataset()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return one row."""
        row = dict(self._rows[index])
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        return {"prompt": prompt, "label": str(row.get("answer", "")), "metadata": {ROW: row}}


@cache
def _loaded(load: Callable[[], Any]) -> Any:
    return load()


def _client(environment: VerifiersEnvironment) -> Any:
    """Return a client of verifiers whose answers the worker generates."""
    from openai.types.chat import ChatCompletion
    from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
    from verifiers.errors import OverlongPromptError

    class PolicyClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            try:
                answer = await environment.ask(prompt, tools or ())
            except ConversationFull as exc:
                raise OverlongPromptError(str(exc)) from exc
            return ChatCompletion.model_validate(_completion(answer, model))

        async def raise_from_native_response(self, response: Any) -> None:
            """Accept every answer, the empty one too."""

        async def close(self) -> None:
            """Leave the worker's engine running."""

    return PolicyClient(object())


def _completion(answer: Answer, model: str) -> dict[str, Any]:
    reason = "length" if answer.is_truncated else "tool_calls" if answer.tool_calls else "stop"
    choice = {"index": 0, "finish_reason": reason, "message": answer.to_message()}
    return {"id": "0", "object": "chat.completion", "created": int(time.time()), "model": model, "choices": [choice]}
