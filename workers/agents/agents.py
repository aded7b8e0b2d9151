"""Manage the agent episodes of one worker: waiting for an agent, or open."""

import secrets
from dataclasses import asdict
from typing import Any

from penstock.errors import EpisodeMoved, EpisodeSuperseded
from penstock.protocol.episode_key import EpisodeKey, make_key
from penstock.records.sample import FinishReason, Sample
from penstock.records.worker_causes import AgentAwaited
from penstock.workers.agents.chat import ChatTemplate
from penstock.workers.agents.episode import AgentEpisode, Turn
from penstock.workers.agents.model_chat import ModelChat
from penstock.workers.agents.parsing import Answer
from penstock.workers.agents.requests import Request, TextRequest
from penstock.workers.hooks.open_calls import calling

#: Kind of the open call that reports a wait for an agent.
_OPEN = "agents"


class Agents:
    """Hold all episodes of a worker by sample, in the order of their leases.

    Args:
        token: token of the run, which signs episode keys.
        chat: parser of answers.
        template: renders histories in a separate thread, which alone may use its tokenizer.
        idle_s: longest wait for a request of an agent.
    """

    def __init__(self, token: str, chat: ModelChat, template: ChatTemplate, idle_s: float) -> None:
        self.template = template
        self._token = token
        self._chat = chat
        self._idle_s = idle_s
        self._episodes: dict[tuple[str, int], AgentEpisode] = {}

    def counts(self) -> dict[str, int]:
        """Count episodes by state: waiting for an agent, or open. Thread-safe."""
        opened = [episode.opened.is_set() for episode in list(self._episodes.values())]
        return {"waiting": opened.count(False), "open": opened.count(True)}

    async def verify(self) -> None:
        """Check that the engine has the parsers of section ``agents``. Blocks; raises ConfigError."""
        await self._chat.verify()

    async def begin(self, sample: Sample, attempt: int) -> AgentEpisode:
        """Register a sample's episode; return it once an agent has opened it, or at once if it continues or is over."""
        episode = AgentEpisode(
            sample,
            attempt,
            make_answer=self._answer,
            idle_s=self._idle_s,
            max_context=self._chat.max_context,
            max_turns=self._chat.max_turns,
        )
        self._episodes[sample.job.id, sample.k] = episode
        if sample.is_over or episode.has_turns(sample):
            return episode
        try:
            with calling(_OPEN, AgentAwaited(sample.id)):
                await episode.opened.wait()
        except BaseException:
            await self.end(episode)
            raise
        return episode

    async def end(self, episode: AgentEpisode) -> None:
        """Close an episode, notify its agent, and remove it."""
        name = episode.job.id, episode.k
        # After a lost lease, this worker may have leased the job again and registered another episode.
        if self._episodes.get(name) is episode:
            del self._episodes[name]
        await episode.close()

    def open(self) -> dict[str, Any] | None:
        """Open the oldest episode without an agent; return its key and task, or None if every episode has an agent."""
        episode = next((one for one in self._episodes.values() if one.nonce is None and not one.opened.is_set()), None)
        if episode is None:
            return None
        episode.open(secrets.token_urlsafe(12))
        job = episode.job
        return {
            "key": make_key(self._token, job.id, episode.k, episode.attempt, episode.nonce or ""),
            "job": job.id,
            "k": episode.k,
            "dataset": job.dataset,
            "lane": job.lane,
            "prompt": job.prompt,
            "label": job.label,
            "metadata": job.metadata,
        }

    def find(self, key: EpisodeKey) -> AgentEpisode:
        """Return the episode of a key.

        Raises:
            EpisodeMoved: this worker does not have the episode.
            EpisodeSuperseded: the episode started over.
        """
        episode = self._episodes.get((key.job, key.k))
        if episode is None:
            raise EpisodeMoved
        if episode.attempt != key.attempt:
            raise EpisodeSuperseded
        episode.open(key.nonce)
        return episode

    async def _answer(self, sample: Sample, index: int, turn: Turn, request: Request) -> dict[str, Any]:
        """Build the response to an agent for a turn."""
        ids = sample.tokens[turn.start : turn.end]
        if isinstance(request, TextRequest) or not self._chat.parses(request.tools):
            answer = Answer(sample.turns[index])
        else:
            answer = await self._chat.parse(ids, request.tools, f"{sample.id}/{index}", request.limits.stop)
        is_call = bool(answer.tool_calls) and turn.reason != FinishReason.LENGTH
        return {
            "turn": index + 1,
            "content": answer.content,
            "reasoning": answer.reasoning or None,
            "tool_calls": [asdict(call) for call in answer.tool_calls],
            "finish_reason": "tool_calls" if is_call else turn.reason,
            "prompt_tokens": turn.start - turn.part,
            "completion_tokens": len(ids),
            "version": sample.versions[turn.end - 1] if ids else -1,
            "tokens": ids,
            "logprobs": sample.logprobs[turn.start : turn.end],
        }
