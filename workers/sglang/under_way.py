"""Track requests for tokens: their names, and when tokens last arrived for each."""

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: A request is reported as hanging if nothing arrived for this long, and it is this many times as old as an answer of
#: all its tokens would take at the current rate.
SHORTEST_S, TIMES = 10.0, 3.0
#: The minimum age before any answer has been measured.
UNMEASURED_S = 120.0
#: Weight of the latest answer in the rate.
_NEW = 0.2


@dataclass(slots=True)
class _Sent:
    """One request in flight: when (monotonic) it was sent, when tokens last arrived, and its token limit."""

    sent: float
    heard: float
    most: int | None


class UnderWay:
    """Requests in flight of one client. All methods belong to one event loop; none blocks."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._client = secrets.token_hex(4)
        #: rid -> its requests, in the order of sending.
        self._live: dict[str, dict[str, None]] = {}
        self._sent: dict[str, _Sent] = {}
        #: Tokens per second of one request, by the latest answers; 0 before the first.
        self._tokens_per_s = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def wire_rid(self, rid: str) -> str:
        """Return a name that no other request to the server ever has, of this client or of another.

        SGLang aborts whatever runs under the name of a stream two seconds after that has ended, and refuses a name in
        use: a restarted worker requests the same samples again. An abort matches by prefix: the terminator prevents
        j/1 from ending j/10.
        """
        return f"{rid}:{self._client}.{next(self._serial)};"

    @contextmanager
    def sent(self, rid: str, wire_rid: str, *, most: int | None = None) -> Iterator[None]:
        """Track a request of at most ``most`` tokens inside the ``with``; None: no limit."""
        live = self._live.setdefault(rid, {})
        live[wire_rid] = None
        now = time.monotonic()
        self._sent[wire_rid] = _Sent(now, now, most)
        try:
            yield
        finally:
            live.pop(wire_rid, None)
            self._sent.pop(wire_rid, None)
            if not live:
                self._live.pop(rid, None)

    def hear(self, wire_rid: str) -> None:
        """Record that tokens of a request arrived."""
        if (one := self._sent.get(wire_rid)) is not None:
            one.heard = time.monotonic()

    def answered(self, wire_rid: str, tokens: int) -> None:
        """Record that a request was answered with this many tokens, and update the rate."""
        one = self._sent.get(wire_rid)
        if one is None or not tokens:
            return
        rate = tokens / max(time.monotonic() - one.sent, 1e-3)
        # Times are averaged, not rates: one fast answer must not make a slow one look hung.
        mean = _NEW / rate + (1 - _NEW) / (self._tokens_per_s or rate)
        self._tokens_per_s = 1 / mean

    def limit_s(self, most: int | None) -> float:
        """Return the age at which a request of ``most`` tokens is reported."""
        if not self._tokens_per_s or most is None:
            return UNMEASURED_S
        return max(SHORTEST_S, TIMES * most / self._tokens_per_s)

    def named(self, rid: str) -> list[str]:
        """Return the wire names of the requests for ``rid``."""
        return list(self._live.get(rid, ()))

    def silent(self, limit_s: float | None = None) -> list[tuple[str, float]]:
        """Return (rid, seconds since tokens last arrived) of requests that hang, longest first.

        Args:
            limit_s: report requests silent for this long; None: for ``SHORTEST_S`` and older than their ``limit_s``.
        """
        now = time.monotonic()
        late = []
        for wire_rid, one in self._sent.items():
            is_old = limit_s is not None or now - one.sent >= self.limit_s(one.most)
            if is_old and now - one.heard >= (SHORTEST_S if limit_s is None else limit_s):
                late.append((wire_rid.rpartition(":")[0], now - one.heard))
        return sorted(late, key=lambda one: -one[1])
