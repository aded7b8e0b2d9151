"""Signals: kill -9, SIGTERM, and SIGSTOP past a lease then SIGCONT, of every kind of part."""

import os
import signal
import time
from functools import partial
from random import Random

from tests.chaos.cluster.processes import descendants, kept
from tests.chaos.nemesis.act import USUAL_MOMENTS, Facts, Ground, Kind, NotStruck, names_of, own_names, pick

PARTS = (
    "redis", "producer", "worker", "engine", "leader", "standby", "trainer", "verifier", "router", "launcher",
    "payload", "recorder", "gateway", "agent",
)  # fmt: skip
#: Those that leave cleanly when asked to, and are started again.
ASKED = ("producer", "worker", "leader", "standby", "trainer", "verifier", "launcher", "redis", "recorder", "gateway")
#: Those by which groups leave.
RETIRING = ("leader", "recorder", "buffers", "recorders")
#: Longest wait for a check, of those that are made beside each other.
CHECK_S = 15.0


def _one(kind: str, ground: Ground, rng: Random) -> Facts | None:
    name = pick(rng, names_of(ground, kind))
    return name and {"parts": [name]}


def _asked(kind: str, ground: Ground, rng: Random) -> Facts | None:
    name = pick(rng, own_names(ground, kind))
    return name and {"parts": [name]}


def _below(ground: Ground, rng: Random) -> Facts | None:
    """A process of a pool of verifiers: one that takes checks, or the check that it makes."""
    name = pick(rng, names_of(ground, "verifier"))
    return name and {"part": name, "depth": rng.choice([1, 2, 2])}


def _strike_below(ground: Ground, facts: Facts) -> None:
    """A check is over soon, so it is waited for."""
    pool = ground.cluster.parts[facts["part"]]
    deadline = time.monotonic() + CHECK_S
    while not (pids := [pid for depth, pid in descendants(kept(pool.pid)[-1]) if depth == facts["depth"]]):
        if time.monotonic() > deadline:
            raise NotStruck(f"{pool.name} made no check in {CHECK_S:g} s")
        time.sleep(0.002)
    try:
        os.kill(pids[0], signal.SIGKILL)
    except ProcessLookupError as exc:
        raise NotStruck("the check was over") from exc


def _all(kinds: tuple[str, ...], ground: Ground, rng: Random) -> Facts | None:
    names = names_of(ground, *kinds)
    return {"parts": sorted(names)} if len(names) > 1 else None


def _held(kind: str, ground: Ground, rng: Random) -> Facts | None:
    name = pick(rng, names_of(ground, kind))
    return name and {"parts": [name], "hold_s": ground.past_lease_s(kind, rng), "then_kill": rng.random() < 0.25}


def _kill(ground: Ground, facts: Facts) -> None:
    for name in facts["parts"]:
        ground.cluster.kill(ground.cluster.parts[name])


def _ask_to_end(ground: Ground, facts: Facts) -> None:
    """Each is started again once it has left, also one that would be done for good by itself."""
    parts = [ground.cluster.parts[name] for name in facts["parts"]]
    for part in parts:
        lives, may_finish = part.lives, part.may_finish
        part.may_finish = False
        ground.cluster.kill(part, signal.SIGTERM)
        ground.cluster.wait(f"{part.name} to leave and come back", lambda: part.lives > lives)  # noqa: B023
        part.may_finish = may_finish


def _stop(ground: Ground, facts: Facts) -> None:
    """Whoever is started in its place meanwhile is another process, and is left alone."""
    parts = [ground.cluster.parts[name] for name in facts["parts"]]
    stopped = {part.name: ground.cluster.stop(part) for part in parts}
    time.sleep(facts["hold_s"])
    for part in parts:
        if part.pid == stopped[part.name]:
            if facts["then_kill"]:
                ground.cluster.kill(part)
            ground.cluster.cont(part)


def _moments(part: str) -> tuple[str, ...]:
    """Who seals, records and sweeps is struck at that, too."""
    return (*USUAL_MOMENTS, "retirement") if part in RETIRING else USUAL_MOMENTS


def kinds() -> dict[str, Kind]:
    """By name."""
    made = {f"kill:{part}": Kind(partial(_one, part), _kill, moments=_moments(part)) for part in PARTS}
    made |= {f"stop:{part}": Kind(partial(_held, part), _stop) for part in PARTS}
    made |= {f"term:{part}": Kind(partial(_asked, part), _ask_to_end, weight=0.5) for part in ASKED}
    made["kill:check"] = Kind(_below, _strike_below)
    together = {
        "workers": ("worker", "engine"),
        "trainers": ("trainer",),
        "buffers": ("buffer",),
        "recorders": ("recorder",),
        "all": ("producer", "worker", "engine", "buffer", "trainer"),
        "everything": (
            "launcher",
            "redis",
            "producer",
            "worker",
            "engine",
            "verifier",
            "buffer",
            "trainer",
            "payload",
            "recorder",
        ),
    }
    return made | {
        f"kill:{name}": Kind(partial(_all, kinds), _kill, weight=0.5, moments=_moments(name))
        for name, kinds in together.items()
    }
