"""Connect to the payload servers by their names in sample metadata.

A server that does not answer is away: the state of its payloads is unknown, and the server is retried after a pause,
until it answers, an operator declares it lost (``penstock payloads lose``), or ``redis.payload_patience_s`` is over.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

from penstock.config import RedisConfig
from penstock.errors import QueueUnavailable
from penstock.payloads import servers as payload_servers
from penstock.payloads.servers import Directory, ServerState, read
from penstock.payloads.sides import key_of
from penstock.payloads.store import PayloadStore, open_store
from penstock.records.keys import CONTROL, Keys
from penstock.records.sample_meta import SampleMeta, stored
from penstock.redis.commands import Client
from penstock.redis.control import PASSING
from penstock.text import redact

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Keys per round trip; bounds the time of one call on the server.
CHUNK = 2048
#: Longest wait for an answer, so that one server does not delay the others.
ANSWER_S = 2.0
#: Pause before a server is retried: doubles up to a limit; at least PAUSE_SHARE times the last attempt's duration.
PAUSE_S, LONGEST_PAUSE_S, PAUSE_SHARE = 0.25, 5.0, 10.0


@dataclass(slots=True)
class Away:
    """Payload server that does not answer."""

    why: str
    since: float = field(default_factory=time.monotonic)
    pause_s: float = PAUSE_S
    #: Not retried before this time (monotonic).
    next_try: float = 0.0


class PayloadServers:
    """Access payload stores by server name; each is contacted at its first use. Only keys are sent, never payloads."""

    def __init__(self, config: RedisConfig, control: Client, keys: Keys | None = None) -> None:
        self._config = config
        self._control = control
        self._keys = keys
        self._directory = Directory()
        self._lost: frozenset[str] = frozenset()
        self._away: dict[str, Away] = {}
        self._stores = {name: open_store(url, timeout_s=ANSWER_S) for name, url in config.payload_servers.items()}
        self._stores[CONTROL] = PayloadStore(control, config.url or "")
        #: Servers whose connection was checked.
        self._in_use = {CONTROL}

    def _store(self, server: str) -> PayloadStore:
        """Return a server's store. Blocks at its first use. Raises ProtocolError if the server is unknown.

        Also raises the errors of ``check``: retrying does not help if a server refuses the connection.
        """
        if server not in self._stores:
            if server not in self._directory.servers and self._keys:
                self._directory = read(self._control, self._keys)
            self._stores[server] = open_store(self._directory.url(server, self._config), timeout_s=ANSWER_S)
        if server not in self._in_use:
            self._stores[server].check()
            self._in_use.add(server)
        return self._stores[server]

    def check(self) -> None:
        """Check which servers are lost, and whether those in use answer.

        Blocks for at most ``ANSWER_S`` per server that does not answer, in total at most a tenth of the time.
        """
        self._read_directory()
        for server in sorted((self._in_use | self._away.keys()) - self._lost - {CONTROL}):
            self._try(server, partial(self._ping, server))
        self._declare_lost()

    @property
    def lost_and_away(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the servers that are lost, and those that do not answer, as of the last check."""
        return self._lost, frozenset(self._away)

    def _ping(self, server: str) -> None:
        self._store(server).client.ping()

    def _read_directory(self) -> None:
        if self._keys is None:
            return
        rev = payload_servers.revision(self._control.hget(self._keys.servers, "rev"))
        if rev != self._directory.rev:
            self._directory = read(self._control, self._keys)
            self._lost = frozenset(self._directory.lost)
            for server in self._lost & self._away.keys():
                log.warning("payload server %s was declared lost, with all its payloads", server)
                del self._away[server]

    def _declare_lost(self) -> None:
        patience_s = self._config.payload_patience_s
        if patience_s is None or self._keys is None:
            return
        for server, away in list(self._away.items()):
            if server in self._directory.servers and time.monotonic() - away.since >= patience_s:
                log.warning("payload server %s has not answered for %g s and is declared lost", server, patience_s)
                payload_servers.set_state(self._control, self._keys, server, ServerState.LOST)
        self._read_directory()

    def is_away(self, server: str) -> bool:
        """Return whether the state of the server's payloads is unknown."""
        return server in self._away

    def away(self) -> dict[str, Away]:
        """Return the servers that do not answer, by name."""
        return dict(self._away)

    def _is_due(self, server: str) -> bool:
        return server not in self._away or time.monotonic() >= self._away[server].next_try

    def _try(self, server: str, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; None if the server does not answer, or is not due for a retry."""
        if not self._is_due(server):
            return None
        began = time.monotonic()
        try:
            answer = work()
        except (*PASSING, QueueUnavailable) as exc:
            if server == CONTROL:
                raise
            now = time.monotonic()
            if server not in self._away:
                log.warning(
                    "payload server %s does not answer; its groups will not be cut until it does: %s",
                    server,
                    redact(str(exc)),
                )
            away = self._away.setdefault(server, Away(redact(str(exc))))
            away.why = redact(str(exc))
            away.next_try = now + max(away.pause_s, PAUSE_SHARE * (now - began))
            away.pause_s = min(2 * away.pause_s, LONGEST_PAUSE_S)
            return None
        if self._away.pop(server, None):
            log.info("payload server %s answers again", server)
        return answer

    def persist(self, keys: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Make (server, key) payloads permanent. Blocks.

        Returns True, False for a missing payload, or None if its server does not answer.
        """
        kept: dict[tuple[str, str], bool | None] = {}
        for server, names in _by_server(keys).items():
            for start in range(0, len(names), CHUNK):
                chunk = names[start : start + CHUNK]
                done_all = self._persist(server, chunk)
                kept.update(((server, name), done) for name, done in zip(chunk, done_all, strict=True))
        return [kept[key] for key in keys]

    def _persist(self, server: str, names: list[str]) -> Sequence[bool | None]:
        if server in self._lost:
            self._read_directory()  # the server may be live again
        if server in self._lost:
            return [False] * len(names)

        return self._try(server, lambda: self._store(server).keep(names)) or [None] * len(names)

    def unlink(self, keys: Sequence[tuple[str, str]]) -> set[str]:
        """Free (server, key) payloads; missing keys are ignored. Blocks. Returns the servers that do not answer."""
        silent = set()
        for server, names in _by_server(keys).items():
            if server in self._lost:
                continue
            for start in range(0, len(names), CHUNK):
                if self._try(server, partial(self._unlink, server, names[start : start + CHUNK])) is None:
                    silent.add(server)
        return silent

    def _unlink(self, server: str, names: list[str]) -> bool:
        self._store(server).unlink(names)
        return True

    @property
    def in_use(self) -> frozenset[str]:
        """Return the servers, except the control Redis and lost ones, that this process uses or that are draining."""
        draining = {one.name for one in self._directory.servers.values() if one.state is ServerState.DRAINING}
        return frozenset(self._in_use | draining) - self._lost - {CONTROL}

    def names(self, server: str) -> Iterator[tuple[str, bool]]:
        """Yield (key, whether it is permanent) of the run's payloads on a server, lazily; see :meth:`next_of`."""
        assert self._keys is not None
        yield from self._store(server).names(self._keys.prefix)

    def next_of(self, server: str, listed: Iterator[T], most: int) -> list[T] | None:
        """Return the next items of a listing; None if the server does not answer and must be listed again. Blocks."""
        return self._try(server, lambda: list(islice(listed, most)))

    def unkeep(self, server: str, names: Sequence[str]) -> bool:
        """Give permanent payloads a time to live again; return False if their server does not answer. Blocks."""
        return self._try(server, partial(self._unkeep, server, names)) is not None

    def _unkeep(self, server: str, names: Sequence[str]) -> bool:
        self._store(server).unkeep(names)
        return True

    def close(self) -> None:
        for store in self._stores.values():
            store.close()


def keys_of(keys: Keys, job: str, record: SampleMeta) -> list[tuple[str, str]]:
    """Return (server, key) of a committed sample's payload, and of each side array."""
    sides = [(record.server, key_of(keys, job, record.k, record.token, side)) for side in record.sides]
    return [(record.server, stored(keys, job, record)), *sides]


def _by_server(keys: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group keys by server without duplicates: samples that were committed together share a key."""
    grouped: dict[str, list[str]] = {}
    for server, name in dict.fromkeys(keys):
        grouped.setdefault(server, []).append(name)
    return grouped
