"""Waits (I8): a part that waits for longer than a moment reports the cause, where `penstock why` finds it.

A worker's waits are in its presence record; other parts write theirs into the hash ``waits``.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.protocol.presence import GONE_S, WorkerPresence, parse_workers
from penstock.protocol.scripts import note, run
from penstock.records.cause import Cause
from penstock.records.causes import decode
from penstock.records.codec import count_in, name_shown, number_in, pack, unpack_map
from penstock.records.keys import Keys
from penstock.records.record import readable
from penstock.redis.commands import Client
from penstock.redis.control import PASSING
from penstock.text import safe_repr

#: Waits shorter than this are normal, and are not shown.
MOMENT_S = 0.5
#: Interval of confirmation; a wait not confirmed for ``GONE_S`` is of a process that is gone.
CONFIRM_S = 2.0
#: Most waits that are read of one worker.
MAX_TASKS = 64


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of one process: its name, the cause, and the start (Unix time)."""

    who: str
    cause: Cause
    since_s: float
    #: How many of the awaited items have come, and how many are needed; None if they are not counted.
    count: int | None = None
    needed: int | None = None
    #: Seconds since it was last confirmed.
    age_s: float = 0.0

    def to_map(self) -> dict[str, Any]:
        """Return the wait for views and ``--json``; ``since_s`` is the seconds until now."""
        since_s = max(0.0, time.time() - self.since_s)
        return {"who": self.who, "since_s": since_s, "age_s": self.age_s, **describe(self.cause)}


def describe(cause: Cause) -> dict[str, Any]:
    """Return a cause for views: ``what`` in words, ``name`` and ``fields``."""
    return {"what": str(cause), "name": cause.name, "fields": cause.fields()}


class Waiting:
    """The wait of one task. Its clock restarts with another cause or subject, not with other counts.

    Cheap to call in a loop. ``record`` is what is shown.
    """

    def __init__(self) -> None:
        #: The cause that is shown; None: not waiting.
        self.cause: Cause | None = None
        self._next_key: tuple[Any, ...] = ()
        #: When it began, and was last reported; when another cause was reported first. Unix time, 0: never.
        self._since = self._reported = self._next_since = 0.0
        self._counts: dict[str, int] = {}

    def blocked_on(
        self, cause: Cause | None, since_s: float = 0.0, *, count: int | None = None, needed: int | None = None
    ) -> None:
        """Report the cause of a wait; None ends the wait. An unreachable Redis is ignored.

        Args:
            since_s: start (Unix time); 0: when this cause was first reported.
            count: how many of the awaited items have come.
            needed: how many are needed.
        """
        if cause is None:
            self.end()
            return
        if since_s or self._is_its_turn(cause):
            self._since = since_s or self._since
            self.cause = cause
            counts = {"count": count, "needed": needed}
            self._counts = {name: value for name, value in counts.items() if value is not None}
        self.tick()

    def _is_its_turn(self, cause: Cause) -> bool:
        """Return whether ``cause`` is shown: the one so far, or another one that lasts for longer than a moment.

        A cause that passes at once neither hides the one before it nor restarts its clock.
        """
        now = time.time()
        if self.cause is not None and cause.key == self.cause.key:
            self._next_key, self._reported = (), now
            return True
        if cause.key != self._next_key:
            self._next_key, self._next_since = cause.key, now
        if self.cause is not None and now - self._next_since < MOMENT_S and now - self._reported < CONFIRM_S:
            return False
        self._since, self._reported, self._next_key = self._next_since, now, ()
        return True

    def record(self) -> dict[str, Any] | None:
        """Return the record of the wait; None if it is not waiting, or not long enough to be shown."""
        if self.cause is None or time.time() - self._since < MOMENT_S:
            return None
        return {"cause": self.cause.name, "fields": self.cause.fields(), "since": self._since, **self._counts}

    def tick(self) -> None:
        """Publish or confirm the wait if that is due."""

    def end(self) -> None:
        """End the wait."""
        self.cause, self._next_key = None, ()
        self._since = self._reported = self._next_since = 0.0


class PublishedWaiting(Waiting):
    """A wait that is written to the hash ``waits``: at most every ``CONFIRM_S`` unless it changes. Blocks for that.

    A caller that reports once and then blocks has another thread call ``tick`` meanwhile.
    """

    def __init__(self, client: Client, keys: Keys, who: str) -> None:
        super().__init__()
        self._client = client
        self._keys = keys
        self.who = who
        self._shown: Cause | None = None
        self._shown_at = 0.0

    def tick(self) -> None:
        now, record = time.time(), self.record()
        if record is None or now - self._shown_at < (CONFIRM_S if self.cause == self._shown else MOMENT_S):
            return
        self._shown, self._shown_at = self.cause, now
        self._write(pack({**record, "at": now}))

    def end(self) -> None:
        if self._shown_at:
            self._write(b"")
        self._shown, self._shown_at = None, 0.0
        super().end()

    def _write(self, record: bytes) -> None:
        try:
            run(self._client, note(self._keys, self._keys.waits, self.who, record))
        except PASSING:
            self._shown_at = 0.0


def read_waits(client: Client, keys: Keys) -> list[Wait]:
    """Return the waits that are confirmed, longest first; unreadable ones are skipped. Blocks for two round trips."""
    return waits_in(client.hgetall(keys.waits), parse_workers(client.hgetall(keys.workers)))


def waits_in(records: Mapping[bytes, bytes], workers: Sequence[WorkerPresence]) -> list[Wait]:
    """Return the waits in the hash ``waits`` and in the workers' presence records, as :func:`read_waits`."""
    found = readable(records, _wait)
    for one in workers:
        tasks = {f"worker:{one.name}:{value.get('task')!s:.100}".encode(): value for value in one.waits[:MAX_TASKS]}
        found += [replace(wait, age_s=one.age_s) for wait in readable(tasks, _of_map)]
    return sorted((wait for wait in found if wait.age_s < GONE_S), key=lambda wait: wait.since_s)


def read_wait(client: Client, keys: Keys, who: str) -> Wait | None:
    """Return the wait of ``who``, not a worker; None without one, or if it is unreadable. Blocks for a round trip."""
    raw = client.hget(keys.waits, who)
    return next(iter(waits_in({who.encode(): raw} if raw else {}, ())), None)


def _wait(name: bytes, raw: bytes) -> Wait:
    value = unpack_map(raw, record := f"The wait of {safe_repr(name_shown(name))}")
    at = number_in(value, "at", record)
    return replace(_of_map(name, value), age_s=max(0.0, time.time() - at))


def _of_map(name: bytes, value: dict[str, Any]) -> Wait:
    record = f"The wait of {safe_repr(who := name_shown(name))}"
    since = number_in(value, "since", record)
    count, needed = (count_in(value, field, record) if field in value else None for field in ("count", "needed"))
    return Wait(who, decode(value.get("cause"), value.get("fields"), record), since, count, needed)
