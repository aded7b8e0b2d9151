"""Track requests for tokens: their names, and when each was heard of last."""

import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager


class UnderWay:
    """Those of one client. All methods belong to one event loop; none blocks."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._client = secrets.token_hex(4)
        #: rid -> its requests, in the order of their sending.
        self._live: dict[str, dict[str, None]] = {}
        #: Request -> when (monotonic) it was sent, or tokens of it were heard last.
        self._heard: dict[str, float] = {}

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
    def sent(self, rid: str, wire_rid: str) -> Iterator[None]:
        """Track a request inside the ``with``."""
        live = self._live.setdefault(rid, {})
        live[wire_rid] = None
        self.hear(wire_rid)
        try:
            yield
        finally:
            live.pop(wire_rid, None)
            self._heard.pop(wire_rid, None)
            if not live:
                self._live.pop(rid, None)

    def hear(self, wire_rid: str) -> None:
        """Tokens of it were heard."""
        self._heard[wire_rid] = time.monotonic()

    def named(self, rid: str) -> list[str]:
        """The requests for ``rid``."""
        return list(self._live.get(rid, ()))

    def silent(self, limit_s: float) -> list[tuple[str, float]]:
        """(rid, seconds) of requests of which nothing was heard for ``limit_s``, longest first."""
        now = time.monotonic()
        late = [(wire_rid.rpartition(":")[0], now - at) for wire_rid, at in self._heard.items() if now - at >= limit_s]
        return sorted(late, key=lambda one: -one[1])
