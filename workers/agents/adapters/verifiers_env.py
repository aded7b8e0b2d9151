"""Run environments of verifiers (single-turn, multi-turn, with tools) with their own loop and rubric.

    class Wordle(VerifiersEnvironment):
        @classmethod
        def load(cls):
            return verifiers.load_environment("wordle")

Supports the environment classes of releases 0.1 to 0.3. Later releases run agents against an API address: use the
address of ``penstock serve``.
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

#: Metadata key with a row of the environment's dataset.
ROW = "verifiers"


class VerifiersEnvironment(ConversationEnvironment):
    """Run rollouts of an environment with the policy as its model."""

    @classmethod
    @abstractmethod
    def load(cls) -> Any:
        """Load the environment; called once per process."""

    async def run(self, job: Job) -> float:
        """Run a rollout of the job's row and add its metrics to ``reward_info``.

        Raises:
            RuntimeError: the rollout failed.
        """
        check_installed("verifiers", "An environment of verifiers")
        environment = _loaded(type(self).load)
        output = await environment.run_rollout(dict(job.metadata[ROW]), _client(self), "policy", {})
        if error := output.get("error"):
            raise RuntimeError(f"the rollout of verifiers failed: {error}")
        self.sample.reward_info |= {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        return float(output["reward"])


class VerifiersRows:
    """Provide rows of an environment's dataset to producers; set ``path: python:module:Class`` to a subclass.

    Columns are ``prompt``, ``label`` and ``metadata``.
    """

    #: Environment whose dataset is used.
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
    """Create a client for verifiers whose answers the worker generates."""
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
            """Accept every response, including an empty one."""

        async def close(self) -> None:
            """Leave the worker's engine running."""

    return PolicyClient(object())


def _completion(answer: Answer, model: str) -> dict[str, Any]:
    reason = "length" if answer.is_truncated else "tool_calls" if answer.tool_calls else "stop"
    choice = {"index": 0, "finish_reason": reason, "message": answer.to_message()}
    return {"id": "0", "object": "chat.completion", "created": int(time.time()), "model": model, "choices": [choice]}
