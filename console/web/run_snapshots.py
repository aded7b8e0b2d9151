"""Snapshots of the Redis of each run: at most one per second, however many pages are open, and rates between them."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError, ResponseError

from penstock.console.cli.target import RunUnknown, Target
from penstock.console.web.replies import trouble_of
from penstock.errors import ConfigError, PenstockError, ProtocolError, QueueUnavailable
from penstock.protocol.gate import Room, read_gates, read_rooms
from penstock.protocol.snapshot import snapshot
from penstock.redis.server import ADDRESS_FILE, read_address

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
