"""``penstock run`` with parts that stand for the real ones, so that the launcher is tested alone: no engine, no torch.

The launcher, its Redis and all children are real processes.
"""

import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.console.cli import main as cli
from penstock.console.launch import observer, preflight
from penstock.console.launch import run as launch
from penstock.system import processes

PARTS = Path(__file__).with_name("launch_parts.py")


@dataclass
class Audit:
    ok: bool = True
    differences: list[str] = field(default_factory=list)
    lost: int = 0
    duplicated: int = 0


def stand_in(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    sys.modules[name] = module


def main() -> None:
    launch.python_command = lambda module, *arguments: [sys.executable, str(PARTS), *arguments]
    observer.engine_version = lambda config: "0.0"
    processes.BACKOFF_S = 0.02
    if "PENSTOCK_TEST_ANY_ENGINE" in os.environ:
        preflight.check_engine = lambda python: None
        preflight.check_engine_arguments = lambda config: None
        # Of the trainer's stand-in as little as of the engine's is asked.
        preflight.check_interpreter = lambda python: None
        preflight.check_device = lambda config: None
    stand_in(
        "penstock.protocol.snapshot",
        snapshot=lambda client, keys: {"step": int(client.incr("snapshots")), "version": 1},
    )
    stand_in("penstock.protocol.audit", audit=lambda client, keys: Audit())
    cli.main()


if __name__ == "__main__":
    main()
