"""Penstock's names in verl's registries (0.9): ``actor_rollout_ref.rollout.name=penstock``. Importing it is all.

verl imports this module in every process that reads its model's configuration, where that says so:
``actor_rollout_ref.model.external_lib``. The rollout's two sides are imported when verl asks for them.
"""

import importlib
from typing import Any

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

#: What verl's configuration says.
NAME = "penstock"


def _replica() -> Any:
    from penstock.consumers.adapters.verl_replica import PenstockReplica

    return PenstockReplica


# verl has a function that registers a replica, and none for the worker's side of it.
_ROLLOUT_REGISTRY[(NAME, "async")] = "penstock.consumers.adapters.verl_replica.PenstockAdapter"
RolloutReplicaRegistry.register(NAME, _replica)
# Its agent loop, which registers itself.
importlib.import_module("penstock.consumers.adapters.verl_agent")
