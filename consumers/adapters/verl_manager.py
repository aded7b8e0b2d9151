"""verl's agent loop manager, whose workers tell their loops what a prompt is for.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=penstock.consumers.adapters.verl_manager.PenstockAgentLoopManager

The setting is verl's own; verl itself tells loops nothing of validation (inside_verl/sampling.py).
"""

from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker

from penstock.consumers.adapters.inside_verl.sampling import told
from penstock.errors import ConfigError


class PenstockAgentLoopWorker(AgentLoopWorker):  # type: ignore[misc]
    """verl's, which says in the sampling parameters of each prompt whether it is for training."""

    _run_agent_loop = told(AgentLoopWorker._run_agent_loop)


class PenstockAgentLoopManager(AgentLoopManager):  # type: ignore[misc]
    """verl's, with such workers. Raises ConfigError under verl's newer trainer, which has a manager of another kind."""

    def __init__(self, config: Any, *given: Any, **named: Any) -> None:
        if config.trainer.get("use_v1"):
            raise ConfigError(
                "rollout.name=penstock serves verl's trainer without TransferQueue: set trainer.use_v1=False."
            )
        self.agent_loop_workers_class = ray.remote(PenstockAgentLoopWorker)
        super().__init__(config, *given, **named)
