"""Run verl's agent loop with the run's rewards: ``actor_rollout_ref.rollout.agent.default_agent_loop=penstock``.

verl's other loops also work, but only request tokens from the server and compute rewards in verl.
"""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.profiler import simple_timer

from penstock.consumers.adapters.rows import plain
from penstock.consumers.adapters.verl import HANDED_ON, label_of


@register("penstock")
class PenstockAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Run one job per answer; the run's workers compute rewards and run environments of several turns."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Answer ``raw_prompt``; the reward gets ``reward_model["ground_truth"]`` as its label.

        Raises ConfigError if the prompt has other data than text, and the errors of ``PenstockServer.generate``.
        """
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.ct_build_initial_tokens(messages)
        timing: dict[str, float] = {}
        with simple_timer("generate_sequences", timing):
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
                takes_mask=True,
                label=label_of({key: [value] for key, value in kwargs.items()}, 0),
                metadata={key: plain(kwargs[key], key) for key in HANDED_ON if key in kwargs},
            )
        length = self.rollout_config.response_length
        fields = output.extra_fields
        for name in ("penstock_teacher_logprobs", "penstock_reference_logprobs"):
            if name in fields:
                fields[name] = fields[name][:length]
        mask, reward = fields.pop("penstock_mask", []), fields.pop("penstock_reward", None)
        turns, info = fields.pop("penstock_turns", 1), fields.pop("penstock_reward_info", {})
        fields.update(turn_scores=[], tool_rewards=[], reward_extra_info=info)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[:length],
            response_mask=mask[:length],
            response_logprobs=(output.log_probs or [])[:length],
            reward_score=reward,
            # verl counts the turns of both sides.
            num_turns=2 * turns,
            metrics=AgentLoopMetrics(**timing),
            extra_fields=fields,
        )
