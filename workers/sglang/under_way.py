"""Track requests for tokens: their names, and when each was heard of last."""

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: A request is named when nothing was heard of it for so long, and it is so many times as old as an answer of all its
#: tokens would be at the rate of the latest answers.
SHORTEST_S, TIMES = 10.0, 3.0
#: The same before any answer has shown that rate.
UNMEASURED_S = 120.0
#: Share of the latest answer in the rate.
_NEW = 0.2


@dataclass(slots=True)
class _Sent:
    """One request on its way: when (monotonic) it was sent, and heard of last; most tokens that it asks for."""

    sent: float
    heard: float
    most: int | None


class UnderWay:
    """Those of one client. All methods belong to one event loop; none blocks."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._client = secrets.token_hex(4)
        #: rid -> its requests, in the order of their sending.
        self._live: dict[str, dict[str, None]] = {}
        self._sent: dict[str, _Sent] = {}
        #: Tokens a second of one request, by the latest answers; 0 before the first.
        self._tokens_per_s = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def wire_rid(self, rid: str) -> str:
        """A name that no other request to the server ever has, of this client or of another.

        SGLang aborts whatever runs under the name of a stream two seconds after that has ended, and refuses a name that
        is taken: a worker that was started again asks for the samples of the one before. An abort matches by prefix:
        the terminator keeps j/1 from ending j/10.
        """
        return f"{rid}:{self._client}.{next(self._serial)};"

    @contextmanager
    def sent(self, rid: str, wire_rid: str, *, most: int | None = None) -> Iterator[None]:
        """Track a request inside the ``with``, which asks for ``most`` tokens; None: it does not say."""
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
        """Tokens of it were heard."""
        if (one := self._sent.get(wire_rid)) is not None:
            one.heard = time.monotonic()

    def answered(self, wire_rid: str, tokens: int) -> None:
        """It was answered with so many tokens, which shows the rate of one request."""
        one = self._sent.get(wire_rid)
        if one is None or not tokens:
            return
        rate = tokens / max(time.monotonic() - one.sent, 1e-3)
        # Times are averaged, not rates: a single fast answer makes no slow one hang.
        mean = _NEW / rate + (1 - _NEW) / (self._tokens_per_s or rate)
        self._tokens_per_s = 1 / mean

    def limit_s(self, most: int | None) -> float:
        """Return how old a request of ``most`` tokens gets before it is named."""
        if not self._tokens_per_s or most is None:
            return UNMEASURED_S
        return max(SHORTEST_S, TIMES * most / self._tokens_per_s)

    def named(self, rid: str) -> list[str]:
        """The requests for ``rid``."""
        return list(self._live.get(rid, ()))

    def silent(self, limit_s: float | None = None) -> list[tuple[str, float]]:
        """(rid, seconds) of requests that hang, by how long nothing was heard of each, longest first.

        Args:
            limit_s: nothing was heard for so long; None: for ``SHORTEST_S``, of one older than its ``limit_s``.
        """
        now = time.monotonic()
        late = []
        for wire_rid, one in self._sent.items():
            is_old = limit_s is not None or now - one.sent >= self.limit_s(one.most)
            if is_old and now - one.heard >= (SHORTEST_S if limit_s is None else limit_s):
                late.append((wire_rid.rpartition(":")[0], now - one.heard))
        return sorted(late, key=lambda one: -one[1])
