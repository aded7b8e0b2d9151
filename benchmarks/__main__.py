"""``python -m benchmarks [NAMES]``: each benchmark in a process of its own; all fit 10 minutes on 2 cores."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import execute

#: Name -> arguments, in the order they run.
SIZES: dict[str, list[str]] = {
    "trajectory_path": ["--rounds", "2", "--more-rounds", "1", "--groups", "3072"],
    "scale": ["--jobs", "100000", "--groups", "10000"],
    "trainer_wait": ["--steps", "6"],
    "buffer": ["--samples", "100000", "--count", "40"],
    "engine_overhead": ["--rounds", "2"],
    "modes": ["--accuracy", "0.5"],
    "on_expiry": ["--steps", "8"],
    "balance": [],
    "history": ["--samples", "50000"],
    "history_cost": ["--budget-s", "100", "--window-s", "4"],
    "page": ["--no-browser"],
    "rewards": ["--checks", "100", "--hang-checks", "60", "--pairs", "2"],
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(SIZES)}; all when none.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.json.")] = Path("runs/bench"),
) -> None:
    """Run benchmarks one after the other; exit code 1 when one of them fails."""
    if unknown := [name for name in names or [] if name not in SIZES]:
        raise SystemExit(f"There is no benchmark {unknown[0]!r}; choose from {', '.join(SIZES)}.")
    failed = []
    for name in names or SIZES:
        began_s = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(out / f"{name}.json"), *SIZES[name]]
        code = subprocess.run(command, check=False).returncode
        print(
            f"{name}: {'done' if code == 0 else f'failed with exit code {code}'}, {time.monotonic() - began_s:.0f} s\n"
        )
        if code:
            failed.append(name)
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    execute(main)
