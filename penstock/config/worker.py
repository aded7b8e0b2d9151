"""Section ``worker``: leases, slots and intervals of a worker."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.config.hooks import EnvironmentName, RewardName
from penstock.config.section import Positive, Seconds, Section


class WorkerConfig(Section):
    #: Worker processes that ``penstock run`` starts.
    count: Positive = 1
    #: Samples generated at once per worker.
    slots: Positive = 64
    #: How new weights are applied (docs/workers.md): in_place (running answers continue under them), abort
    #: (they stop and are resumed under them) or drain (they end first); one_step always drains.
    apply: Literal["in_place", "abort", "drain"] = "in_place"
    #: A lease not renewed for so long is taken over.
    lease_s: Seconds = 15.0
    #: Leases are renewed, and presence is written, so often.
    heartbeat_s: Seconds = 2.0
    #: A worker whose event loop made no step for so long stops renewing its leases: others take its jobs.
    stuck_s: Seconds = 120.0
    #: Longest wait for running samples after SIGTERM; then partial ones are handed back. A worker that has not ended
    #: 20 s later is killed.
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    #: Attempts of a job that fails, before it becomes a dead letter.
    max_attempts: Positive = 3
    #: Wait before the first retry; doubles, up to 60 s.
    retry_s: Seconds = 1.0
    #: A sample's prefix is kept in Redis after so many new tokens, which limits the loss of a kill; None: only
    #: when the worker hands it back or its engine crashes. Not with routed_experts among ``rollout.sides``, and not if
    #: a hook makes the samples.
    checkpoint_tokens: Positive | None = None
    #: Rewards and environments, ``module:name``, that jobs may name beside those of ``reward`` and ``data``. A worker
    #: imports nothing else: jobs come from Redis, and its writers must not choose the code that runs here.
    rewards: list[RewardName] = Field(default_factory=list)
    #: Environments (module:class) that jobs may name beside those of ``data``; no other is imported.
    environments: list[EnvironmentName] = Field(default_factory=list)

    #: With trainer.transport delta: folder on a disk of this machine for copies of versions, which its workers may
    #: share. null: runs/NAME/copies/HOST.
    copies_dir: str | None = None
    #: Most bytes of all copies in it, including HTTP downloads for them; engines need room for three versions: the
    #: loaded one, the next, and one on the way there.
    copies_bytes: Positive = 256 * 1024**3

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"apply"})

    @model_validator(mode="after")
    def _renewed_in_time(self) -> Self:
        if self.heartbeat_s * 2 > self.lease_s:
            raise ValueError(
                f"heartbeat_s {self.heartbeat_s:g} is more than half of lease_s {self.lease_s:g}, so one lost "
                "heartbeat loses every lease: lower heartbeat_s or raise lease_s"
            )
        return self
