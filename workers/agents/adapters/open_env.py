"""Environments of OpenEnv, each a session on a server of its own.

class Echo(OpenEnvEnvironment):
    url = "http://localhost:8000"
"""

import json
from typing import Any

from penstock.records.job import Job
from penstock.system.extras import check_installed
from penstock.workers.agents.chat import Message
from penstock.workers.agents.conversation import ConversationEnvironment, ConversationFull
from penstock.workers.agents.parsing import Answer


class OpenEnvEnvironment(ConversationEnvironment):
    """Play an episode of an OpenEnv server; its reward is the sum of the rewards of the steps."""

    #: Address of the server.
    url: str

    def client(self) -> Any:
        """Return a client of the server: a typed one of the environment's package, or the one for plain objects."""
        check_installed("openenv", "An environment of OpenEnv")
        from openenv.core.generic_client import GenericEnvClient

        return GenericEnvClient(self.url)

    def reset_args(self, job: Job) -> dict[str, Any]:
        """Return the arguments of the server's ``reset``: ``openenv`` of the job's metadata, if there are any."""
        return dict(job.metadata.get("openenv") or {})

    def first_message(self, job: Job, observation: Any) -> str:
        """Return the first user message: the job's prompt, and the first observation."""
        return f"{job.prompt}\n{self.message(observation)}"

    def message(self, observation: Any) -> str:
        """Return the user message of an observation: as JSON."""
        return json.dumps(observation, ensure_ascii=False, default=vars)

    def action(self, answer: Answer) -> Any:
        """Return the action of an answer."""
        return {"message": answer.content}

    async def run(self, job: Job) -> float:
        """Play until the server says that it is done, or no further answer fits."""
        total = 0.0
        async with self.client() as server:
            result = await server.reset(**self.reset_args(job))
            messages: list[Message] = [{"role": "user", "content": self.first_message(job, result.observation)}]
            while not result.done:
                try:
                    answer = await self.ask(messages)
                except ConversationFull:
                    break
                result = await server.step(self.action(answer))
                total += float(result.reward or 0.0)
                messages += [answer.to_message(), {"role": "user", "content": self.message(result.observation)}]
        return total
