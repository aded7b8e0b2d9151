"""The runs of a folder: their files, and snapshots of the Redis of each, at most one per second, with rates."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError, ResponseError

from penstock.console.cli.target import RunUnknown, Target
from penstock.console.web.replies import NotThere, trouble_of
from penstock.consumers.grpo.rows import Rows, read_rows
from penstock.errors import ConfigError, PenstockError, ProtocolError, QueueUnavailable
from penstock.names import is_name
from penstock.protocol.gate import Room, read_gates, read_rooms
from penstock.protocol.snapshot import snapshot
from penstock.redis.saved_config import CONFIG_FILE
from penstock.redis.server import ADDRESS_FILE, read_address
from penstock.system.run_folder import RunFolder, RunRecord

#: Files that mark a folder as a run's.
_MARKS = (CONFIG_FILE, ADDRESS_FILE, "run.json", "steps.jsonl")
_ROWS = ("steps.jsonl", "eval.jsonl", "queue.jsonl")
#: Most bytes of a last row, and of summary.json.
_MOST = 2**16


class Runs:
    """The runs of one folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def folder(self, run: str) -> RunFolder:
        """Return the folder of a run; raise NotThere if it does not exist."""
        path = self.directory / run
        if not is_name(run) or not _is_run(path):
            raise NotThere(f"There is no run {run!r} under {self.directory}.")
        return RunFolder(path)

    def all(self) -> list[dict[str, Any]]:
        """Return a row per run, last changed first. Blocks for a few reads per run."""
        try:
            found = [path for path in self.directory.iterdir() if is_name(path.name) and _is_run(path)]
        except OSError:
            return []
        return sorted((_row(RunFolder(path)) for path in found), key=lambda row: -row["moved_s"])

    def rows(self, run: str) -> Rows:
        """Return all rows of a run, read again only if a file has grown."""
        path = self.folder(run).path
        return _rows(path, sizes(path))


def sizes(path: Path) -> tuple[int, ...]:
    """Return the sizes of the files of rows: equal sizes mean no new rows."""
    return tuple(_size(path / name) for name in _ROWS)


@lru_cache(maxsize=4)
def _rows(path: Path, _: tuple[int, ...]) -> Rows:
    return read_rows(path)


def record_of(folder: RunFolder) -> tuple[RunRecord | None, str]:
    """Read ``run.json``; also return why it cannot be read, or ''. None if the run was not started by the launcher."""
    try:
        return folder.record(), ""
    except ConfigError as exc:
        return None, str(exc)


def state_of(folder: RunFolder) -> dict[str, Any]:
    """Return ``state``: that of ``run.json``, ``killed`` if a running one has no process, or ''; and ``reason``."""
    record, trouble = record_of(folder)
    if record is None:
        return {"state": "", "reason": trouble, "started_s": None, "active_s": None}
    state = "killed" if record.state == "running" and not folder.is_held() else record.state
    return {"state": state, "reason": record.reason, "started_s": record.started_s, "active_s": record.active_s}


def summary_of(folder: RunFolder) -> dict[str, Any]:
    """Read ``summary.json``; {} if it is missing or unreadable."""
    return _map(_tail(folder.path / "summary.json"))


def _row(folder: RunFolder) -> dict[str, Any]:
    last = _map(_last_line(folder.path / "steps.jsonl"))
    evaluated = _map(_last_line(folder.path / "eval.jsonl"))
    moved = max((_moved(folder.path / name) for name in (*_MARKS, *_ROWS)), default=0.0)
    return {
        "run": folder.path.name,
        **state_of(folder),
        "step": last.get("step"),
        "reward_mean": last.get("reward_mean"),
        "accuracy": evaluated.get("accuracy"),
        "moved_s": moved,
        "age_s": max(0.0, time.time() - moved),
    }


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _MARKS)


def _last_line(path: Path) -> bytes:
    lines = _tail(path).rstrip(b"\n").splitlines()
    return lines[-1] if lines else b""


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(path) - _MOST))
            return file.read(_MOST)
    except OSError:
        return b""


def _map(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _moved(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


#: Seconds between two snapshots of a run, and between two attempts to reach a Redis that did not answer.
EVERY_S = 0.9
RETRY_S = 3.0
#: Longest wait for one answer.
TIMEOUT_S = 3.0
#: Seconds over which rates are averaged.
RATES_S = 20.0


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot (``penstock.protocol.snapshot``), and rates per second of the counters that changed."""

    state: dict[str, Any]
    #: {} in the first snapshot.
    rates: dict[str, float]
    #: Places at each gate, by its first subscription; {} if the records in Redis are invalid.
    rooms: dict[str, Room]


@dataclass(slots=True)
class _Seen:
    lock: threading.Lock = field(default_factory=threading.Lock)
    target: Target | None = None
    failed: PenstockError | None = None
    failed_at: float = 0.0
    look: Look | None = None
    looked_at: float = 0.0
    counters: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)


class Looks:
    """Snapshots of the runs of one folder. Thread-safe."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}

    def target(self, run: str) -> Target:
        """Return the run, connected. Blocks for ``TIMEOUT_S`` at most per answer.

        Raises:
            ConfigError, ProtocolError: its Redis is unknown, or has no such run, or one of another schema.
            QueueUnavailable: Redis does not answer, or did not within the last ``RETRY_S``.
        """
        seen = self._of(run)
        with seen.lock:
            return self._target(seen, run)

    def look(self, run: str) -> Look:
        """Return a snapshot at most ``EVERY_S`` old. Blocks and raises as ``target``."""
        seen = self._of(run)
        with seen.lock:
            if seen.look is None or self._clock() - seen.looked_at >= EVERY_S:
                seen.look, seen.looked_at = self._look(seen, run), self._clock()
            return seen.look

    def _of(self, run: str) -> _Seen:
        with self._lock:
            return self._seen.setdefault(run, _Seen())

    def _target(self, seen: _Seen, run: str) -> Target:
        if seen.target is not None:
            return seen.target
        if seen.failed is not None and self._clock() - seen.failed_at < RETRY_S:
            raise seen.failed
        try:
            seen.target = self._connected(run)
        except PenstockError as exc:
            seen.failed, seen.failed_at = exc, self._clock()
            raise
        return seen.target

    def _connected(self, run: str) -> Target:
        folder = self._directory / run
        if read_address(folder) is None:
            raise ConfigError(f"No Redis is known for run {run!r}: its folder {folder} has no {ADDRESS_FILE} any more.")
        try:
            return Target(run, None, self._directory, timeout_s=TIMEOUT_S)
        except RunUnknown:
            raise ConfigError(
                f"The Redis of run {run!r} has nothing of it: no part of it has begun yet, or its keys were deleted."
            ) from None

    def _look(self, seen: _Seen, run: str) -> Look:
        target = self._target(seen, run)
        try:
            state, rooms = snapshot(target.client, target.keys), _rooms(target)
        except RedisError as exc:
            target.client.close()
            seen.target = seen.look = None
            seen.counters.clear()
            raise (ProtocolError if isinstance(exc, ResponseError) else QueueUnavailable)(trouble_of(exc)) from exc
        return Look(state, self._rates(seen, state["counters"]), rooms)

    def _rates(self, seen: _Seen, counters: dict[str, int]) -> dict[str, float]:
        now, kept = self._clock(), seen.counters
        kept.append((now, counters))
        while now - kept[0][0] > RATES_S and len(kept) > 2:
            kept.popleft()
        began, before = kept[0]
        if now <= began:
            return {}
        return {name: max(0, count - before.get(name, 0)) / (now - began) for name, count in counters.items()}


def _rooms(target: Target) -> dict[str, Room]:
    try:
        return read_rooms(target.client, target.keys, read_gates(target.client, target.keys)[1])
    except ProtocolError:
        return {}
