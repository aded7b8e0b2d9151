"""Full disks: a small file system under the append-only file, the payloads, the weights or the checkpoints."""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random

from tests.chaos.nemesis.act import Facts, Ground, Kind
from tests.integration.small_disk import SmallDisk

#: What may lie on a small disk: where it is below the folder of a cluster, and its size in MB.
PLACES = {
    "redis": ("redis", 192),
    "payloads": ("payloads", 64),
    "weights": ("runs/chaos/weights", 16),
    "checkpoints": ("checkpoints", 16),
}


@contextlib.contextmanager
def small_disks(folder: Path, sizes: Mapping[str, tuple[str, int]] = PLACES) -> Iterator[dict[str, SmallDisk]]:
    """Mount them below the folder of a cluster that is not yet started; none where nothing may be mounted here."""
    disks: dict[str, SmallDisk] = {}
    try:
        for name, (place, megabytes) in sizes.items():
            path = folder / place
            path.mkdir(parents=True, exist_ok=True)
            if not _mount(path, megabytes):
                break
            disks[name] = SmallDisk(path)
        yield disks
    finally:
        for disk in disks.values():
            subprocess.run(["umount", "-l", str(disk.path)], check=False)


def _mount(path: Path, megabytes: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "penstock-chaos", str(path)]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def _choose(name: str, ground: Ground, rng: Random) -> Facts | None:
    return {"disk": name, "hold_s": round(rng.uniform(1.0, 5.0), 3)} if name in ground.disks else None


def _strike(ground: Ground, facts: Facts) -> None:
    disk = ground.disks[facts["disk"]]
    try:
        disk.fill()
        time.sleep(facts["hold_s"])
    finally:
        disk.make_room()


def kinds() -> dict[str, Kind]:
    """By name."""
    return {f"disk:{name}": Kind(partial(_choose, name), _strike, moments=("commit", "cut")) for name in PLACES}
