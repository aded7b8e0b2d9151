"""Receive weights through a process group with the trainer, whose rank 0 broadcasts buckets (nccl, gloo)."""

import logging
from collections.abc import Callable
from typing import Any

from penstock.weights.index import in_buckets
from penstock.workers.engine import Engine
from penstock.workers.weights.receive.receive import Arrival, Receiver

log = logging.getLogger(__name__)


class Collective(Receiver):
    """Make the engine join the group, unless it has, and receive bucket after bucket."""

    def __init__(self, engine: Engine, birth: Callable[[], int]) -> None:
        super().__init__(engine, birth)
        #: Start number of the engine that is in a group, and the group.
        self._group: tuple[int, str] = (-1, "")

    @property
    def standing(self) -> str:
        """Return the group that the engine is in; '' for none."""
        birth, group = self._group
        return group if birth == self.birth() else ""

    async def receive(self, arrival: Arrival) -> str:
        if refusal := await self._join(arrival):
            return f"the engine refused the invitation to a group: {refusal}"
        decision = arrival.decision
        buckets = list(in_buckets(arrival.entries, decision.bucket_bytes))
        for number, bucket in enumerate(buckets, start=1):
            body: dict[str, Any] = {
                "names": [entry.name for entry in bucket],
                "dtypes": [entry.dtype for entry in bucket],
                "shapes": [list(entry.shape) for entry in bucket],
                "group_name": decision.group,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            if number == len(buckets):
                body["weight_version"] = str(arrival.publication.version)
            if refusal := await arrival.post("/update_weights_from_distributed", body):
                await self._leave(arrival)
                return f"the engine refused bucket {number} of {len(buckets)}: {refusal}"
        return ""

    async def _join(self, arrival: Arrival) -> str:
        decision = arrival.decision
        if self.standing == decision.group:
            return ""
        await self._leave(arrival)
        body = {
            "master_address": decision.address,
            "master_port": decision.port,
            "rank_offset": arrival.rank,
            "world_size": decision.world_size,
            "group_name": decision.group,
            "backend": decision.transport,
        }
        self._group = (self.birth(), decision.group)
        if refusal := await arrival.post("/init_weights_update_group", body):
            self._group = (-1, "")
            return refusal
        return ""

    async def _leave(self, arrival: Arrival) -> None:
        group = self.standing
        self._group = (-1, "")
        if group and (refusal := await arrival.post("/destroy_weights_update_group", {"group_name": group})):
            log.warning("the engine refused the end of a group: %s", refusal)
