"""Run OpenEnv environments, each a session on its own server.

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
    """Play an episode on an OpenEnv server; the reward is the sum of the step rewards."""

    #: Address of the server.
    url: str

    def client(self) -> Any:
        """Create a client of the server, for plain objects; override to return the environment's typed client."""
        check_installed("openenv", "An environment of OpenEnv")
        from openenv.core.generic_client import GenericEnvClient

        return GenericEnvClient(self.url)

    def reset_args(self, job: Job) -> dict[str, Any]:
        """Return the arguments of the server's ``reset``: the value ``openenv`` of the job's metadata, if present."""
        return dict(job.metadata.get("openenv") or {})

    def first_message(self, job: Job, observation: Any) -> str:
        """Return the first user message: the job's prompt and the first observation."""
        return f"{job.prompt}\n{self.message(observation)}"

    def message(self, observation: Any) -> str:
        """Return the user message for an observation, by default JSON."""
        return json.dumps(observation, ensure_ascii=False, default=vars)

    def action(self, answer: Answer) -> Any:
        """Return the action for an answer."""
        return {"message": answer.content}

    async def run(self, job: Job) -> float:
        """Play until the server reports done, or no further answer fits."""
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
