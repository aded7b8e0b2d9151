"""Makes one run of a night: what came of it as a row, and its history, small."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.night.choice import Run
from tests.chaos.night.sampled import FOUND_BYTES, KEPT_BYTES, sampled
from tests.chaos.places import ROOT
from tests.small_disks import unmount_below

#: Longest run, in seconds, and seconds more for each fault.
RUN_S, FAULT_S = 1200.0, 60.0
#: Lines of what was found that are kept.
KEPT_LINES = 20
#: What a row keeps of a result.
OF_RESULT = (
    "faults", "counted", "recovery_s", "missed", "violations", "operations", "batches", "unchecked", "ends",
)  # fmt: skip
#: Where runs are made, if there is room.
FAST, FAST_BYTES = Path("/dev/shm"), 2 * 1024**3


@dataclass(frozen=True)
class Made:
    """A run that is over."""

    row: dict[str, Any]
    history: bytes
    #: Its folder, where something was found.
    folder: Path | None


def make(run: Run, kept: Path) -> Made:
    """Make it. Blocks for minutes.

    Args:
        kept: where the folder of a run is kept in which something was found.
    """
    fast = FAST if FAST.is_dir() and shutil.disk_usage(FAST).free > FAST_BYTES else None
    with tempfile.TemporaryDirectory(prefix="night-", dir=fast, ignore_cleanup_errors=True) as name:
        folder = Path(name) / "run"
        row = _row(run, folder)
        found = bool(row["violations"])
        history = sampled(folder, most=FOUND_BYTES if found else KEPT_BYTES)
        return Made(row, history, _keep(folder, kept / run.name) if found else None)


def _row(run: Run, folder: Path) -> dict[str, Any]:
    began = time.time()
    out, err = _process(run, folder)
    row: dict[str, Any] = {
        "seed": run.seed, "workload": run.workload, "kinds": list(run.kinds), "asked": run.faults, "redis": run.redis,
        "commit": commit(), "began": round(began), "wall_s": round(time.time() - began, 1),
    }  # fmt: skip
    if not out:  # it could not even be judged
        words = err.replace(f"{ROOT}/", "").splitlines()[-KEPT_LINES:]
        return row | {"faults": {}, "counted": {}, "recovery_s": {}, "violations": {"run": 1}, "words": words}
    result = json.loads(out)
    words = [one.replace(f"{folder}/", "") for one in result["words"][:KEPT_LINES]]
    return row | {key: result[key] for key in OF_RESULT} | {"words": words}


def _process(run: Run, folder: Path) -> tuple[str, str]:
    """What the run printed; it has a session of its own, and is killed with all its parts when it is too late."""
    command = [sys.executable, "-m", "tests.chaos.run", *run.words, "--folder", str(folder)]
    limit_s = RUN_S + FAULT_S * run.faults
    done = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        return done.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)
        err = done.communicate()[1]
        unmount_below(folder)
        return "", f"{err}\nit did not end in {limit_s:g} s"


def _keep(folder: Path, kept: Path) -> Path:
    shutil.rmtree(kept, ignore_errors=True)
    # Sockets and small disks of a run that was killed are no evidence.
    shutil.copytree(folder, kept, symlinks=True, ignore_dangling_symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
    return kept


def commit() -> str:
    """What the checkout stands at; '+' behind it where files differ from it. Without a repository ``CHAOS_COMMIT``."""
    if said := os.environ.get("CHAOS_COMMIT"):
        return said
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
