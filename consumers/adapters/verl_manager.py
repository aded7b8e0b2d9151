"""verl's agent loop manager, whose workers pass on whether a prompt is for training or validation.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=penstock.consumers.adapters.verl_manager.PenstockAgentLoopManager

Set verl's option above; verl itself does not pass this on (inside_verl/sampling.py).
"""

from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker

from penstock.consumers.adapters.inside_verl.sampling import told
from penstock.errors import ConfigError


class PenstockAgentLoopWorker(AgentLoopWorker):  # type: ignore[misc]
    """verl's worker; adds to each prompt's sampling parameters whether it is for training."""

    _run_agent_loop = told(AgentLoopWorker._run_agent_loop)


class PenstockAgentLoopManager(AgentLoopManager):  # type: ignore[misc]
    """verl's manager with such workers. Raises ConfigError under verl's newer trainer, whose manager differs."""

    def __init__(self, config: Any, *given: Any, **named: Any) -> None:
        if config.trainer.get("use_v1"):
            raise ConfigError(
                "rollout.name=penstock serves verl's trainer without TransferQueue: set trainer.use_v1=False."
            )
        self.agent_loop_workers_class = ray.remote(PenstockAgentLoopWorker)
        super().__init__(config, *given, **named)
