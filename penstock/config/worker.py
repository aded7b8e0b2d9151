"""Section ``worker``: leases, slots and intervals of a worker."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.config.hooks import EnvironmentName, RewardName
from penstock.config.section import Positive, Seconds, Section


class WorkerConfig(Section):
    #: Worker processes that ``penstock run`` starts.
    count: Positive = 1
    #: Maximum number of samples that a worker generates concurrently.
    slots: Positive = 64
    #: How new weights are applied (docs/workers.md): in_place (running answers continue with the new weights), abort
    #: (they stop, and resume with the new weights) or drain (they finish first). one_step always drains.
    apply: Literal["in_place", "abort", "drain"] = "in_place"
    #: Time in seconds after which a lease that was not renewed runs out, and another worker takes the job.
    lease_s: Seconds = 15.0
    #: Interval in seconds at which a worker renews its leases and writes its presence.
    heartbeat_s: Seconds = 2.0
    #: Time in seconds after which a worker with a blocked event loop stops renewing its leases, so that other workers
    #: take its jobs.
    stuck_s: Seconds = 120.0
    #: Time in seconds that running samples have after SIGTERM; then unfinished ones are handed back. A worker that has
    #: not exited 20 s later is killed.
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    #: Number of failed attempts after which a job becomes a dead letter.
    max_attempts: Positive = 3
    #: Wait in seconds before the first retry of a job; it doubles with each retry, up to 60 s.
    retry_s: Seconds = 1.0
    #: Number of new tokens after which a sample's prefix is stored in Redis, which limits the tokens lost by a crash.
    #: None: store it only when the worker hands the job back or its engine crashes. Not allowed with routed_experts
    #: among ``rollout.sides``, or if a hook makes the samples.
    checkpoint_tokens: Positive | None = None
    #: Rewards and environments (``module:name``) that jobs may name, in addition to those of ``reward`` and ``data``. A
    #: worker imports no other code, because jobs come from Redis, and processes that write to Redis must not choose the
    #: code that a worker runs.
    rewards: list[RewardName] = Field(default_factory=list)
    #: Environments (module:class) that jobs may name, in addition to those of ``data``; no other environment is
    #: imported.
    environments: list[EnvironmentName] = Field(default_factory=list)

    #: With trainer.transport delta: folder for copies of versions, on a disk of this machine; the machine's workers may
    #: share it. None: runs/NAME/copies/HOST.
    copies_dir: str | None = None
    #: Maximum number of bytes of all copies in ``copies_dir``, including HTTP downloads for them. Engines need room for
    #: three versions: the loaded one, the next one, and an intermediate one.
    copies_bytes: Positive = 256 * 1024**3

    FOLLOWING: ClassVar[frozenset[str]] = frozenset({"apply"})

    @model_validator(mode="after")
    def _check_heartbeat(self) -> Self:
        if self.heartbeat_s * 2 > self.lease_s:
            raise ValueError(
                f"heartbeat_s {self.heartbeat_s:g} is more than half of lease_s {self.lease_s:g}, so one lost "
                "heartbeat loses every lease: lower heartbeat_s or raise lease_s"
            )
        return self
