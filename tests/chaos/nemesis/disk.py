"""Full disks: a small file system under the append-only file, weights, checkpoints or the history."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random

from tests.chaos.cluster.redis_conf import version_of
from tests.chaos.nemesis.act import Facts, Ground, Kind
from tests.chaos.nemesis.storage import rewrite
from tests.small_disks import fill, mount, unmount

#: What may lie on a small disk: where it is below the folder of a cluster, and its size in MB.
PLACES = {
    "redis": ("redis", 192),
    "weights": ("runs/chaos/weights", 16),
    "checkpoints": ("checkpoints", 16),
    "history": ("runs/chaos/history", 64),
}


@contextlib.contextmanager
def small_disks(folder: Path, sizes: Mapping[str, tuple[str, int]] = PLACES) -> Iterator[dict[str, Path]]:
    """Mount them below the folder of a cluster that is not yet started; none where nothing may be mounted here."""
    disks: dict[str, Path] = {}
    with contextlib.ExitStack() as stack:
        for name, (place, megabytes) in sizes.items():
            path = folder / place
            path.mkdir(parents=True, exist_ok=True)
            if mount(path, megabytes):
                break
            stack.callback(unmount, path)
            disks[name] = path
        yield disks


def _choose(name: str, ground: Ground, rng: Random) -> Facts | None:
    if name not in ground.disks or (name == "history" and not ground.cluster.workload.recorders):
        return None
    return {"disk": name, "hold_s": round(rng.uniform(1.0, 5.0), 3)}


def _strike(ground: Ground, facts: Facts) -> None:
    """Room that others give back meanwhile is taken as well."""
    ballast = ground.disks[facts["disk"]] / ".ballast"
    deadline = time.monotonic() + facts["hold_s"]
    try:
        while time.monotonic() < deadline:
            fill(ballast)
            time.sleep(0.1)
    finally:
        ballast.unlink()
    # Where a write was cut short Redis 7.0 leaves zeros in its append-only file, and would not start with them.
    if facts["disk"] == "redis" and version_of(ground.cluster.binary).startswith("7."):
        rewrite(ground)


def kinds() -> dict[str, Kind]:
    """By name."""
    at = {name: ("retirement",) if name == "history" else ("commit", "cut") for name in PLACES}
    return {f"disk:{name}": Kind(partial(_choose, name), _strike, moments=at[name]) for name in PLACES}
