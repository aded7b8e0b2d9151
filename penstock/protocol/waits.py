"""Named waits (I8): whoever waits longer than a moment has said what for, where `penstock why` finds it."""

import re
import time
from dataclasses import dataclass

from penstock.errors import ProtocolError
from penstock.protocol.keys import Keys
from penstock.protocol.presence import GONE_S
from penstock.protocol.records.codec import pack
from penstock.protocol.records.readable import readable
from penstock.protocol.records.small_maps import count_in, name_shown, number_in, unpack_map
from penstock.protocol.scripts import note, run
from penstock.redaction import redact
from penstock.redis.commands import Client
from penstock.redis.control import PASSING
from penstock.words import shown, writable

#: A wait is shown after so long; shorter ones are the normal rhythm.
MOMENT_S = 0.5
#: It is confirmed so often while it lasts; one that nobody confirmed for ``GONE_S`` is of a process that is gone.
CONFIRM_S = 2.0
#: Most characters of what is waited for.
MAX_WHAT = 4000
#: What a cause is known by leaves out: what stands in parentheses, and counts; not numbers that name a subject.
_ASIDE = re.compile(r"\([^()]*\)")
_COUNT = re.compile(r"(?<![\w/:.@#-])(?<!version )(?<!batch )(?<!rank )(?<!port )(?<!pid )\d[\d,.]*(?![\w/:@#-])")


@dataclass(frozen=True, slots=True)
class Wait:
    """One process waiting: who, for what (words that name the next one in the chain), since when (Unix time)."""

    who: str
    what: str
    since_s: float
    #: How many of what it waits for have come, and how many it needs; None where they are not counted.
    count: int | None = None
    needed: int | None = None
    #: For how long it has not been confirmed: a process that waits confirms it every ``CONFIRM_S``.
    age_s: float = 0.0


def cause_of(what: str) -> str:
    """Return what tells one cause from another: the sentence without counts and parentheses."""
    return _COUNT.sub("#", _ASIDE.sub("", what))


class Waiting:
    """What one waiter waits for. Its clock belongs to the cause: it restarts when that changes, not when counts do.

    Cheap to call in a loop; writes at most every ``CONFIRM_S`` unless words change.

    Who says it once and then blocks has somebody else call ``tick`` meanwhile.
    """

    def __init__(self, client: Client, keys: Keys, who: str) -> None:
        self._client = client
        self._keys = keys
        self.who = who
        self._what = self._told_what = self._next_cause = ""
        #: When it began, was last said and last shown; when another cause was said first. Unix time, 0: never.
        self._since = self._said = self._told = self._next_since = 0.0
        self._counts: dict[str, int] = {}

    def for_(self, what: str, since_s: float = 0.0, *, count: int | None = None, needed: int | None = None) -> None:
        """Say what is waited for, with secrets masked; '' ends the wait. A Redis that is gone is not an error here.

        Args:
            since_s: since when (Unix time); 0: since this was said first.
            count: how many of what is waited for have come.
            needed: how many have to come.
        """
        if not what:
            self.end()
            return
        if since_s or self._is_its_turn(what):
            self._since = since_s or self._since
            self._what = what
            counts = {"count": count, "needed": needed}
            self._counts = {name: value for name, value in counts.items() if value is not None}
        self.tick()

    def _is_its_turn(self, what: str) -> bool:
        """Return whether ``what`` is shown: the cause so far, or another one that lasts for longer than a moment.

        A reason that passes at once neither hides the cause nor restarts its clock.
        """
        now, cause = time.time(), cause_of(what)
        if self._what and cause == cause_of(self._what):
            self._next_cause, self._said = "", now
            return True
        if cause != self._next_cause:
            self._next_cause, self._next_since = cause, now
        if self._what and now - self._next_since < MOMENT_S and now - self._said < CONFIRM_S:
            return False
        self._since, self._said, self._next_cause = self._next_since, now, ""
        return True

    def tick(self) -> None:
        """Show, or confirm, what is waited for, if it is due."""
        now = time.time()
        if not self._what or now - self._since < MOMENT_S:
            return
        if now - self._told < (CONFIRM_S if self._what == self._told_what else MOMENT_S):
            return
        self._told_what, self._told = self._what, now
        what = writable(redact(self._what), MAX_WHAT)
        self._write({"what": what, "since": self._since, "at": now, **self._counts})

    def end(self) -> None:
        """No longer waiting."""
        if self._told:
            self._write(None)
        self._what = self._told_what = self._next_cause = ""
        self._since = self._said = self._told = self._next_since = 0.0

    def _write(self, value: dict[str, object] | None) -> None:
        try:
            run(self._client, note(self._keys, self._keys.waits, self.who, pack(value) if value else b""))
        except PASSING:
            self._told = 0.0


def read_waits(client: Client, keys: Keys) -> list[Wait]:
    """Waits that are being confirmed, longest first; what cannot be read is left out. Blocks for one round trip."""
    now = time.time()
    found = readable(client.hgetall(keys.waits), _wait)
    return sorted((wait for wait, at in found if now - at < GONE_S), key=lambda wait: wait.since_s)


def read_wait(client: Client, keys: Keys, who: str) -> Wait | None:
    """What ``who`` waits for; None where it waits for nothing, or its wait cannot be read. Blocks for a round trip."""
    raw = client.hget(keys.waits, who)
    found = readable({who.encode(): raw} if raw else {}, _wait)
    return next((wait for wait, at in found if time.time() - at < GONE_S), None)


def _wait(name: bytes, raw: bytes) -> tuple[Wait, float]:
    """A wait, and when it was last confirmed (Unix time)."""
    who = name_shown(name)
    record = f"The wait of {shown(who)}"
    value = unpack_map(raw, record)
    since, at, what = number_in(value, "since", record), number_in(value, "at", record), value.get("what")
    if not isinstance(what, str):
        raise ProtocolError(f"{record} does not say what for.")
    count, needed = (count_in(value, field, record) if field in value else None for field in ("count", "needed"))
    return Wait(who, what[:MAX_WHAT], since, count, needed, max(0.0, time.time() - at)), at
