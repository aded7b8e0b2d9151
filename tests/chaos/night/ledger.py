"""Runs that were made: a line each, safe on the disk before it is said, and their histories, small."""

import json
import os
import threading
from pathlib import Path
from typing import Any

#: Most bytes of all histories together; beyond it a run's is left out, unless something was found.
ALL_BYTES = 9 * 1024 * 1024

Row = dict[str, Any]


class Ledger:
    """``night.jsonl`` and ``histories`` of a folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "night.jsonl"
        self.histories = folder / "histories"
        self._lock = threading.Lock()
        if self.path.exists():  # what a kill tore
            data = self.path.read_bytes()
            os.truncate(self.path, data.rfind(b"\n") + 1)

    def rows(self) -> list[Row]:
        """All runs so far."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def append(self, name: str, row: Row, history: bytes) -> None:
        """Keep a run. Blocks for the disk."""
        with self._lock:
            self.histories.mkdir(parents=True, exist_ok=True)
            if row["violations"] or self._taken() + len(history) <= ALL_BYTES:
                (self.histories / f"{name}.jsonl.xz").write_bytes(history)
            with self.path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def _taken(self) -> int:
        return sum(path.stat().st_size for path in self.histories.iterdir())
