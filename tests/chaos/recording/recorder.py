"""Writes the history of one process: what it asked for, and what it was told, before it goes on.

Two lines an operation: the call before it is sent, and its end once the answer is known. A process that is killed in
between leaves a call without an end: whether it happened is unknown. A file is one process, a line one record:

    {"who": "worker", "pid": 7}                                                            the first line
    {"seq": 1, "mono": NS, "wall": NS, "op": "commit", "facts": {...}}                     a call
    {"seq": 2, "mono": NS, "wall": NS, "of": 1, "outcome": "yes", "facts": {...}}          the end of call 1

``mono`` is CLOCK_MONOTONIC, which all processes of one machine share, and which stands when a fault moves ``wall``.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import orjson

#: Most bytes of a line. A longer record ends the process: a history with a hole would prove nothing.
MAX_LINE_BYTES = 8 * 1024 * 1024

YES, NO, UNKNOWN = "yes", "no", "unknown"


class Recorder:
    """The history of the process that asks; a child that was forked begins its own. Thread-safe. Blocks for the disk.

    Args:
        folder: where histories lie; one file for each process.
        who: what part the process is.

    Raises:
        OSError: the disk takes no more.
        ValueError: a record is longer than a line may be.
    """

    def __init__(self, folder: Path, who: str) -> None:
        self.folder = folder
        self.who = who
        self._lock = threading.Lock()
        self._pid = self._seq = 0
        self._file = -1
        os.register_at_fork(after_in_child=self._begin_anew)

    def call(self, op: str, facts: dict[str, Any]) -> int:
        """``op`` is about to be asked for; the number by which ``end`` names it."""
        return self._write({"op": op, "facts": facts})

    def end(self, call: int, outcome: str, facts: dict[str, Any] | None = None) -> None:
        """What became of ``call``: yes, no, or unknown."""
        self._write({"of": call, "outcome": outcome, "facts": facts or {}})

    def note(self, op: str, facts: dict[str, Any]) -> None:
        """Something that happened here, and needs nobody's answer."""
        self.end(self.call(op, facts), YES)

    def _write(self, record: dict[str, Any]) -> int:
        with self._lock:
            if self._pid != os.getpid():
                self._open()
            self._seq += 1
            stamp = {"seq": self._seq, "mono": time.monotonic_ns(), "wall": time.time_ns()}
            self._append(stamp | record)
            return self._seq

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pid, self._seq = os.getpid(), 0
        # Pids come again in a run of many kills.
        path = self.folder / f"{self.who}-{self._pid}-{time.monotonic_ns()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._append({"who": self.who, "pid": self._pid})

    def _append(self, record: dict[str, Any]) -> None:
        line = memoryview(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"A record of {len(line):,} bytes is longer than a line of a history: record less of it.")
        while line:
            line = line[os.write(self._file, line) :]
        os.fdatasync(self._file)

    def _begin_anew(self) -> None:
        # Another thread of the parent may have held the lock; the file stays the parent's.
        self._lock, self._pid = threading.Lock(), 0
