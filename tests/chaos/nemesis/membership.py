"""Who takes part: workers come and go, a second producer, a second trainer, other configurations, other sizes."""

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from tests.chaos.cluster.supervisor import Part
from tests.chaos.cluster.workloads import Workload, merged
from tests.chaos.nemesis.act import Facts, Ground, Kind, NotStruck, own_names, pick

#: Longest wait for a run to go on with another configuration.
TAKEN_S = 60.0
#: Most workers at a time.
MOST_WORKERS = 4
#: What an older configuration of a worker had otherwise.
OLDER: list[dict[str, Any]] = [
    {"staleness": {"bound": 1}},
    {"rollout": {"sampling": {"max_new_tokens": 12}}},
    {"rollout": {"n": 4}},
    {"worker": {"lease_s": 4.0, "heartbeat_s": 1.0}},
    {"worker": {"slots": 3}},
]
#: What may be another when a run is started again.
OTHERS: list[dict[str, Any]] = [
    {"trainer": {"batch_groups": 3}},
    {"trainer": {"batch_groups": 6}},
    {"trainer": {"subscription": {"sampler": "fifo"}}},
    {"trainer": {"subscription": {"sampler": "oldest_version"}}},
    {"staleness": {"mode": "sync", "bound": None}},
    {"staleness": {"mode": "one_step", "bound": None}},
    {"staleness": {"mode": "async", "bound": 2}},
    {"staleness": {"mode": "async", "bound": 1}},
]


def _join(ground: Ground, rng: Random) -> Facts | None:
    return {"config": {}} if len(ground.cluster.of("worker")) < MOST_WORKERS else None


def _join_older(ground: Ground, rng: Random) -> Facts | None:
    return _join(ground, rng) and {"config": rng.choice(OLDER)}


def _strike_join(ground: Ground, facts: Facts) -> None:
    ground.cluster.start("worker", config=facts["config"])


def _leave(ground: Ground, rng: Random) -> Facts | None:
    """The last one stays."""
    names = own_names(ground, "worker")
    return {"part": pick(rng, names)} if len(names) > 1 else None


def _strike_leave(ground: Ground, facts: Facts) -> None:
    ground.cluster.retire(ground.cluster.parts[facts["part"]])


# --- two of one ----------------------------------------------------------------------------------------------------


def _second(kind: str, ground: Ground, rng: Random) -> Facts | None:
    name = pick(rng, own_names(ground, kind))
    return name and {"part": name, "hold_s": ground.past_lease_s(kind, rng), "kill_first": rng.random() < 0.5}


def _strike_second(ground: Ground, facts: Facts) -> None:
    """Another process does what a part does, under its name, while it lives or after it was killed."""
    cluster = ground.cluster
    part = cluster.parts[facts["part"]]
    taken = sum(name.startswith(f"second-{part.name}") for name in cluster.parts)
    name = f"second-{part.name}-{taken}"
    second = Part(part.kind, name, part.command, part.environment, log=cluster.folder / "logs" / f"{name}.log")
    second.is_forked = part.is_forked
    cluster.supervisor.add(second)
    cluster.wait(f"{name} to be started", lambda: second.lives)
    if facts["kill_first"]:
        cluster.kill(part)
    time.sleep(facts["hold_s"])
    cluster.supervisor.retire(second, signal.SIGKILL)


# --- another configuration at a restart ----------------------------------------------------------------------------


def _ranks(ground: Ground, rng: Random) -> Facts | None:
    """Of a trainer without roles: another number of ranks."""
    seats = [one for one in ground.cluster.workload.trainers if not one.role]
    if not seats:
        return None
    one = rng.choice(seats)
    now = len(_ranks_of(ground, one.group))
    return {"group": one.group, "ranks": rng.choice([n for n in (1, 2) if n != now])}


def _ranks_of(ground: Ground, group: str) -> list[Part]:
    return [part for part in ground.cluster.of("trainer") if part.name.rpartition(".")[0] == group]


def _strike_ranks(ground: Ground, facts: Facts) -> None:
    cluster = ground.cluster
    seats = next(one for one in cluster.workload.trainers if one.group == facts["group"])
    _take_down(ground, _ranks_of(ground, facts["group"]))
    cluster.start("trainer", name=f"{facts['group']}-{facts['ranks']}", seats=replace(seats, ranks=facts["ranks"]))


def _take_down(ground: Ground, parts: Sequence[Part]) -> None:
    """For good, and wait until they are gone: what follows takes their names."""
    for part in parts:
        ground.cluster.supervisor.retire(part, signal.SIGKILL)
    ground.cluster.wait("parts to be gone", lambda: not any(part.is_alive for part in parts))


def _other(ground: Ground, rng: Random) -> Facts | None:
    if ground.cluster.workload.is_launched:  # its parts read no file that is written here
        return None
    return {"config": rng.choice(OTHERS), "rolling": rng.random() < 0.5}


def _strike_other(ground: Ground, facts: Facts) -> None:
    """Every part has another configuration at its restart: one after the other, or all at once.

    What a run refuses, such as another mode, is taken back, as the refusal says.
    """
    before = ground.cluster.workload
    _start_again(ground, replace(before, config=merged(before.config, facts["config"])), facts["rolling"])
    if not _is_taken(ground):
        _start_again(ground, before, facts["rolling"])


def _start_again(ground: Ground, workload: Workload, rolling: bool) -> None:
    cluster = ground.cluster
    cluster.workload = workload
    parts = [part for kind in ("buffer", "producer", "worker", "trainer") for part in cluster.of(kind)]
    for part in parts:
        _rewrite(ground, part)
    for part in parts:
        cluster.kill(part)
        if rolling:
            time.sleep(0.3)


def _is_taken(ground: Ground) -> bool:
    """Whether all that drive commit batches before parts have refused their configuration twice, or time is over.

    Asked for once all parts were killed: what a trainer commits before its turn it commits as it was.
    """
    batches = _driven(ground)
    refused, deadline = _refusals(ground), time.monotonic() + TAKEN_S
    while any(now <= batches[name] + 1 for name, now in _driven(ground).items()):  # one may have been under way
        if _refusals(ground) >= refused + 2 or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _driven(ground: Ground) -> dict[str, int]:
    """Batches that were committed of each subscription that drives: copies of it go on without it."""
    assert ground.cluster.watch is not None
    committed = ground.cluster.watch.committed_of
    return {seats.name: committed.get(seats.name, 0) for seats in ground.cluster.workload.trainers if seats.drives}


def _refusals(ground: Ground) -> int:
    """Ends of parts by themselves, and not clean."""
    return len(ground.cluster.supervisor.unexpected())


def _rewrite(ground: Ground, part: Part) -> None:
    """The file that the part reads at its next start."""
    words = list(part.command)
    if "--config" not in words:
        raise NotStruck(f"{part.name} has no configuration file")
    name = words[words.index("--config") + 1].rpartition("/")[2].removesuffix(".yaml")
    ground.cluster.write_config(name)


def kinds() -> dict[str, Kind]:
    """By name."""
    return {
        "member:join": Kind(_join, _strike_join, weight=0.5),
        "member:join_older": Kind(_join_older, _strike_join, weight=0.5),
        "member:leave": Kind(_leave, _strike_leave),
        "member:second_producer": Kind(partial(_second, "producer"), _strike_second),
        "member:second_trainer": Kind(partial(_second, "trainer"), _strike_second),
        "member:ranks": Kind(_ranks, _strike_ranks),
        "member:config": Kind(_other, _strike_other),
    }
