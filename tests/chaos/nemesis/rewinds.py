"""Rewinds: a trainer whose newest checkpoints are gone goes back to an older one, or says that it cannot."""

import signal
import time
from pathlib import Path
from random import Random

from tests.chaos.cluster.supervisor import Part
from tests.chaos.nemesis.act import Facts, Ground, Kind, NotStruck, pick

#: Longest wait for a trainer to go on from an older checkpoint.
GOES_ON_S = 30.0


def checkpoints(ground: Ground, group: str) -> list[Path]:
    """Of one trainer, newest first."""
    folder = ground.cluster.folder / "checkpoints" / group
    return sorted(folder.glob("*.json"), key=lambda path: int(path.stem), reverse=True)


def _groups(ground: Ground) -> list[str]:
    return [seats.group for seats in ground.cluster.workload.trainers if not seats.role]


def _choose(ground: Ground, rng: Random) -> Facts | None:
    group = pick(rng, [one for one in _groups(ground) if len(checkpoints(ground, one)) > 1])
    if group is None:
        return None
    there = len(checkpoints(ground, group))
    return {"group": group, "lost": rng.randint(1, there - 1)}


def _strike(ground: Ground, facts: Facts) -> None:
    """The newest checkpoints are put aside; where the trainer cannot go on from those that are left, they come back."""
    cluster = ground.cluster
    parts = [part for part in cluster.of("trainer") if part.name.rpartition(".")[0] == facts["group"]]
    lost = checkpoints(ground, facts["group"])[: facts["lost"]]
    if not lost or not parts:
        raise NotStruck(f"{facts['group']} has no checkpoints")
    aside = [path.rename(path.with_suffix(".aside")) for path in _killed(ground, parts, lost)]
    if not _goes_on(ground, facts["group"], parts):
        _killed(ground, parts, [])
        for path in aside:
            path.rename(path.with_suffix(".json"))
    for part in parts:
        cluster.let_up(part)


def _killed(ground: Ground, parts: list[Part], lost: list[Path]) -> list[Path]:
    """``lost``, once the ranks are dead and held down."""
    for part in parts:
        ground.cluster.hold_down(part)
    for part in parts:
        ground.cluster.kill(part, signal.SIGKILL)
    ground.cluster.wait("a trainer to be dead", lambda: not any(part.is_alive for part in parts))
    return lost


def _goes_on(ground: Ground, sub: str, parts: list[Part]) -> bool:
    """Whether batches of the subscription are committed once the ranks are let up again."""
    assert ground.cluster.watch is not None
    committed = ground.cluster.watch.committed_of
    before, deadline = committed.get(sub, 0), time.monotonic() + GOES_ON_S
    ends = sum(len(part.exits) for part in parts)
    for part in parts:
        ground.cluster.let_up(part)
    while committed.get(sub, 0) <= before + 1:  # one may have been committed before they died, and be seen after it
        died = sum(len(part.exits) for part in parts) - ends
        if died >= 3 * len(parts) or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def kinds() -> dict[str, Kind]:
    """By name."""
    return {"rewind:older": Kind(_choose, _strike)}
