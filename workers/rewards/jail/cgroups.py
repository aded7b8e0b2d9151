"""Create a cgroup for the programs of one process, if allowed: it limits memory and processes of all of them together.

It complements rlimits, which bind each process separately, and root not at all. Version 1 has one hierarchy for each of
the two limits, version 2 one for both. The folder is created below our own group's, or beside it if version 2 allows
none below. It is reused for each program and removed at the end; one of a killed process is removed by the next that is
created there.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.text import format_exc

_PREFIX = "penstock-jail-"
#: Processes that a warden needs besides the program's.
_SPARE = 2


@dataclass(frozen=True, slots=True)
class Groups:
    """Folders of cgroups that programs may be put into."""

    folders: tuple[Path, ...] = ()
    #: Why there are none, or ''.
    lack: str = ""

    def open(self) -> tuple[int, ...]:
        """Open the files to which a process writes 0 to join the groups; the caller closes them."""
        return tuple(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self.folders)

    def remove(self) -> None:
        """Remove the groups; one that still has a process is left."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def make(memory_bytes: int, processes: int, root: Path = Path("/")) -> Groups:
    """Create groups for this process; none if not allowed here. ``root`` of the file system is set in tests."""
    made: list[Path] = []
    try:
        for parent, limits in _parents(root, memory_bytes, processes + _SPARE):
            _sweep(parent)
            folder = parent / f"{_PREFIX}{os.getpid()}"
            folder.mkdir(exist_ok=True)
            made.append(folder)
            for name, value in limits.items():
                (folder / name).write_text(str(value))
            # Swap counts as memory if it is counted at all.
            for name, value in (("memory.memsw.limit_in_bytes", memory_bytes), ("memory.swap.max", 0)):
                if (folder / name).exists() and any(limit.startswith("memory") for limit in limits):
                    with contextlib.suppress(OSError):
                        (folder / name).write_text(str(value))
    except OSError as exc:
        Groups(tuple(made)).remove()
        return Groups(lack=format_exc(exc))
    return Groups(tuple(made))


def _parents(root: Path, memory_bytes: int, processes: int) -> list[tuple[Path, dict[str, int]]]:
    """Return the folders for new groups, with the limits to set there. Raises OSError if there are none."""
    own = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    mounts = root / "sys/fs/cgroup"
    if "memory" in own and "pids" in own:
        return [
            (mounts / "memory" / own["memory"], {"memory.limit_in_bytes": memory_bytes}),
            (mounts / "pids" / own["pids"], {"pids.max": processes}),
        ]
    return [(_parent_2(mounts / own.get("", "")), {"memory.max": memory_bytes, "pids.max": processes})]


def _parent_2(own: Path) -> Path:
    """Return our own group, or its parent if ours may have none below it because it has processes itself."""
    try:
        _enable(own)
    except OSError:
        _enable(own.parent)
        return own.parent
    return own


def _enable(folder: Path) -> None:
    """Enable memory and process limits for groups below it. Raises OSError."""
    control = folder / "cgroup.subtree_control"
    if missing := {"memory", "pids"} - set(control.read_text().split()):
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _sweep(parent: Path) -> None:
    """Remove groups of killed processes."""
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
