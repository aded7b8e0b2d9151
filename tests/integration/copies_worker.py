"""A process that makes one local copy and says so; it kills or stops itself at an act that it is told."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.records.publication import Publication
from penstock.weights import delta_format
from penstock.weights.delta_store import DeltaStore
from penstock.workers.weights import version_folders
from penstock.workers.weights.local_copies import LocalCopies

#: What of the making is counted as an act: a fetched range, a decoded piece, a synced folder, a rename.
ACTS: list[tuple[Any, str]] = [
    (DeltaStore, "_range"),
    (delta_format, "decode"),
    (delta_format, "fsync"),
    (version_folders, "fsync"),
    (os, "rename"),
    (os, "fsync"),
    (Path, "rename"),
]


def main(store: str, copies: str, path: str, index: str, version: str, die_at: str, how: str = "SIGKILL") -> None:
    left = int(die_at)

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.Signals[how])
            return act(*args, **kwargs)

        return call

    for module, name in ACTS:
        setattr(module, name, counted(getattr(module, name)))
    publication = Publication("m", int(version), "delta", path, index=index)
    print(LocalCopies(Path(copies), DeltaStore(store), 2**30).get(publication))
    print(f"acts {int(die_at) - left}")


if __name__ == "__main__":
    main(*sys.argv[1:])
