"""What is run under faults: configurations of the product and the parts that work on them, by name."""

import os
from dataclasses import dataclass, field
from typing import Any

#: How long a step of a trainer takes, where nothing else is said.
STEP_S = 0.15
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
        "restart_wait_s": 0.05, "request_timeout_s": 60,
    },
    "worker": {
        "slots": 12, "lease_s": 2.0, "heartbeat_s": 0.4, "drain_timeout_s": 2.0, "retry_s": 0.1,
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
    #: What it takes, where that is not a trainer's share of the train lane.
    definition: dict[str, Any] = field(default_factory=dict)

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
    scorers: int = 0
    #: Recorders of the history; with any the run keeps one.
    recorders: int = 0
    verifiers: int = 0
    #: Processes of agents, and gateways that they use.
    agents: int = 0
    gateways: int = 0
    #: Whether workers start real engines.
    is_real: bool = False
    #: Whether those need a GPU, and are of this very Python: nothing chooses it by itself.
    is_cuda: bool = False
    #: Engines of each worker; of several a router is before them.
    engines: int = 1
    #: Whether `penstock run` starts producer, buffer and a worker, and keeps them up.
    is_launched: bool = False
    #: Families of faults that its parts cannot be struck by.
    spared: tuple[str, ...] = ()
    #: Settings of the Redis servers, on top of those of a run's own.
    redis: dict[str, str] = field(default_factory=dict)
    #: Tokens per second of each request.
    pace: float = 150.0

    def resolved(self) -> dict[str, Any]:
        """The whole configuration, as it stands in its file; a key that is None is left out."""
        return _without_none(merged(BASE, self.config))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``below`` with what ``above`` says otherwise, key by key; neither is changed."""
    both = dict(below)
    for key, value in above.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


#: Weights whose folder is there before they are announced.
FOLDERS = {"folder_first": True}
#: Weights that are sent before their folder is there.
SENDS = {"folder_first": False, "transport": "tests.integration.sent_files:ToFiles", "transfer_timeout_s": 3.0}
#: Answers long enough that a fault finds them half drawn.
LONG = {"sampling": {"max_new_tokens": 64, "temperature": 1.0}}
#: Turns of ten tokens on average.
TURNS = {"sampling": {"max_new_tokens": 64, "temperature": 1.0, "stop_token_ids": [2, 12, 22, 32]}}
ACTOR = Seats()
JUDGE = Seats("judge", drives=False, subscription={"driving": False})
ROLES = ("actor", "critic")
STUDENTS = {"driving": False, "share": "students"}
EVALS = {"lanes": ["eval"], "size": 4, "mode": "async", "sampler": "fifo", "bound": -1, "driving": False}
TRAIN = {"name": "sums", "path": "train.jsonl"}
TASKS = "tests.chaos.parts.tasks"
EPISODES = {
    "data": {"train": [{**TRAIN, "environment": "agent"}]},
    "rollout": {"max_turns": 12, **TURNS},
    "agents": {"idle_s": 20.0},
}
CURRICULUM = {"skip_above": 1.0, "skip_below": 0.0, "revisit": 0.33}

REAL: dict[str, Any] = {
    "preset": "cpu",
    "health_timeout_s": 5.0,
    "load_timeout_s": 60,
}  # fmt: skip

#: What runs with every build of SGLang's kernels, and starts soonest; many share one GPU.
CUDA: dict[str, Any] = {
    "args": {
        "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
        "disable-cuda-graph": True, "disable-overlap-schedule": True, "max-total-tokens": 20000,
        "max-running-requests": 32, "mem-fraction-static": 0.3, "disable-radix-cache": True,
    },
    "env": {
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_ENABLE_JIT_DEEPGEMM": "0", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    },
    "health_timeout_s": 5.0,
    "load_timeout_s": 60,
}  # fmt: skip

WORKLOADS = {
    one.name: one
    for one in (
        # Two copies; any version within the bound, changed in place.
        Workload("async", trainers=(ACTOR, JUDGE)),
        # Versions are announced and sent before they have a folder; or nobody sends them, and all wait for it.
        Workload("sends", {"trainer": SENDS}, trainers=(ACTOR, JUDGE)),
        Workload("late", {"staleness": {"bound": 1}, "worker": {"apply": "drain"}, "trainer": {"folder_first": False}}),
        # Rewards differ within a group, so that each rank's advantages can be checked.
        Workload("ranks", {"trainer": FOLDERS, "reward": {"function": f"{TASKS}:parity"}}, trainers=(Seats(ranks=2),)),
        Workload("sync", {"staleness": {"mode": "sync", "bound": None}, "trainer": FOLDERS}),
        Workload("one_step", {"staleness": {"mode": "one_step", "bound": None}}),
        Workload("wait", {"staleness": {"bound": 1, "on_expiry": "wait"}, "worker": {"apply": "drain"}}),
        Workload("drop", {"staleness": {"bound": 1, "on_expiry": "drop"}, "worker": {"apply": "abort"}}),
        Workload(
            "pool",
            trainers=(
                ACTOR,
                Seats("left", drives=False, subscription=STUDENTS),
                Seats("right", drives=False, subscription=STUDENTS),
            ),
            payload_servers=2,
        ),
        # Groups of versions that a rewind abandoned stay within this bound while batches are replayed.
        Workload(
            "reuse",
            {"staleness": {"bound": 8}, "trainer": {"subscription": {"reuse": 2, "sampler": "uniform"}}},
        ),
        Workload(
            "roles",
            trainers=(Seats(role="actor", roles=ROLES), Seats(role="critic", roles=ROLES, drives=False)),
            payload_servers=1,
        ),
        Workload(
            "filters",
            {
                "reward": {"function": f"{TASKS}:parity"},
                "trainer": {"filter": {"functions": ["nonzero_std"]}, "over_sampling_groups": 4},
            },
        ),
        # So few prompts that every fault finds another epoch: five of nine are skipped, and a third of these comes.
        Workload(
            "curriculum",
            {
                "data": {"train": [{**TRAIN, "path": "train.jsonl@[0:24]", "curriculum": CURRICULUM}]},
                "reward": {"function": f"{TASKS}:parity"},
            },
        ),
        Workload(
            "failing",
            {
                "reward": {"function": f"{TASKS}:raises", "max_attempts": 1, "max_died_share": 1.0},
                "worker": {"max_attempts": 3},
            },
        ),
        Workload(
            "lanes",
            {
                "data": {"eval": [{"name": "heldout", "path": "heldout.jsonl"}], "eval_every": 6},
                "rollout": {"eval_sampling": {"temperature": 1.0}},
                "buffer": {"score_ttl_s": 5},
            },
            trainers=(ACTOR, Seats("evals", drives=False, subscription={"driving": False}, definition=EVALS)),
            scorers=1,
        ),
        Workload("given", {"data": {"train": [{**TRAIN, "answer_key": "answer"}]}}),
        # Half of the episodes are brought back by replay, half by snapshots.
        Workload(
            "turns",
            {
                "data": {
                    "train": [
                        {**TRAIN, "environment": f"{TASKS}:Echo"},
                        {**TRAIN, "name": "saved", "environment": f"{TASKS}:SavedEcho"},
                    ]
                },
                "rollout": {"max_turns": 9, **TURNS},
            },
        ),
        Workload(
            "agents",
            EPISODES,
            agents=1,
            gateways=2,
        ),
        Workload("agents_engine", {"engine": REAL, **EPISODES}, agents=1, gateways=2, is_real=True),
        Workload("leases", {"rollout": LONG | {"lease_tokens": 12}}),
        # Two recorders, and so few groups that may wait for them that some are given up when both are struck.
        Workload("history", {"history": {"backlog": 64, "patience_s": 4.0}}, recorders=2),
        # A real engine on the CPU, which its worker starts; the law says nothing of its tokens.
        Workload("engine", {"engine": REAL}, is_real=True),
        Workload(
            "engine_cuda", {"engine": CUDA, "model": {"dtype": "bfloat16"}}, workers=4, is_real=True, is_cuda=True
        ),
        Workload("prefixes", {"rollout": LONG, "worker": {"checkpoint_tokens": 6}}),
        Workload(
            "verifiers",
            {
                # Every kill of a check is one of its tries.
                "reward": {
                    "function": f"{TASKS}:parity",
                    "pool": {"kind": "rq", "workers": 2},
                    "max_attempts": 5,
                    "max_died_share": 1.0,
                }
            },
            verifiers=1,
        ),
        Workload(
            "groups",
            {
                "rollout": {"n": 4},
                "reward": {
                    "function": f"{TASKS}:parity",
                    "group": f"{TASKS}:places",
                    "max_attempts": 1,
                    "max_died_share": 1.0,
                },
            },
            payload_servers=1,
        ),
        Workload("router", engines=2),
        # Its parts are told where Redis is by `penstock run` alone, and read the clock as it does.
        Workload("launched", workers=1, buffers=1, is_launched=True, spared=("net", "disk", "clock", "sentinel")),
        # Answers that outlive versions.
        Workload("slow", {"rollout": LONG, "worker": {"checkpoint_tokens": 6}}, pace=40.0),
    )
}
