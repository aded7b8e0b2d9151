"""Register penstock in verl (0.9) on import: ``actor_rollout_ref.rollout.name=penstock``.

verl imports this module in every process that reads its model configuration, if
``actor_rollout_ref.model.external_lib`` names it. The rollout's two sides are imported when verl needs them.
"""

import importlib
from typing import Any

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

#: Name in verl's configuration.
NAME = "penstock"


def _replica() -> Any:
    from penstock.consumers.adapters.verl_replica import PenstockReplica

    return PenstockReplica


# verl has a function to register a replica, but none for its worker side.
_ROLLOUT_REGISTRY[(NAME, "async")] = "penstock.consumers.adapters.verl_replica.PenstockAdapter"
RolloutReplicaRegistry.register(NAME, _replica)
# Importing the agent loop registers it.
importlib.import_module("penstock.consumers.adapters.verl_agent")
