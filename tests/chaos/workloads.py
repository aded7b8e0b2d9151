"""What is run under faults: configurations of the product and the parts that work on them, by name."""

from dataclasses import dataclass, field
from typing import Any

#: What all have in common: short leases, tiny samples, quick retries.
BASE: dict[str, Any] = {
    "run": "chaos",
    "directory": "runs",
    "model": {"path": "model"},
    "data": {"train": [{"name": "sums", "path": "train.jsonl"}], "epochs": None},
    "rollout": {"n": 2, "sampling": {"max_new_tokens": 24, "temperature": 1.0}, "max_context_tokens": 512},
    "staleness": {"mode": "async", "bound": 2},
    "engine": {
        "health_interval_s": 0.5, "health_timeout_s": 2.0, "health_failures": 2, "load_timeout_s": 10,
        "restart_wait_s": 0.2, "max_restart_wait_s": 1.0, "request_timeout_s": 60,
    },
    "worker": {
        "slots": 12, "lease_s": 2.0, "heartbeat_s": 0.4, "drain_timeout_s": 2.0, "retry_s": 0.1, "max_retry_s": 1.0,
        "max_attempts": 20,
    },
    "reward": {"function": "exact_match"},
    "buffer": {"lease_s": 2.5},
    "trainer": {"batch_groups": 4, "checkpoint_every": 3, "keep_versions": 4, "rank_timeout_s": 60},
}  # fmt: skip


@dataclass(frozen=True)
class Seats:
    """The ranks of one trainer: one place at the buffer, or one role there."""

    name: str = "actor"
    ranks: int = 1
    role: str = ""
    roles: tuple[str, ...] = ()
    #: Whether it publishes weights.
    drives: bool = True
    #: Fields of ``trainer.subscription`` that differ for it.
    subscription: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """What its ranks are called."""
        return f"{self.name}-{self.role}" if self.role else self.name


@dataclass(frozen=True)
class Workload:
    """A configuration, and who works on it."""

    name: str
    #: On top of ``BASE``.
    config: dict[str, Any] = field(default_factory=dict)
    trainers: tuple[Seats, ...] = (Seats(),)
    workers: int = 2
    buffers: int = 2
    payload_servers: int = 0
    #: Settings of the Redis servers, on top of those of a run's own.
    redis: dict[str, str] = field(default_factory=dict)
    #: Tokens per second of each request.
    pace: float = 150.0

    def resolved(self) -> dict[str, Any]:
        """The whole configuration, as it stands in its file."""
        return merged(BASE, self.config)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``below`` with what ``above`` says otherwise, key by key; neither is changed."""
    both = dict(below)
    for key, value in above.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


WORKLOADS = {one.name: one for one in (Workload("async"),)}
