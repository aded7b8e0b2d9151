"""Choose where a worker writes payloads: the run's live payload servers, or the control Redis without any.

live, responding, has room ──> gets writes
  ├ silent, or fails: its share goes to the others; retried with exponential backoff
  └ full: its share waits
"""

import hashlib
import logging
import time
from collections.abc import Collection, Sequence

from redis.exceptions import RedisError

from penstock.config import RedisConfig
from penstock.errors import PenstockError, QueueFull, QueueUnavailable
from penstock.payloads import servers as payload_servers
from penstock.payloads.format import PAYLOAD_TTL_S
from penstock.payloads.store import AsyncPayloadStore
from penstock.records.keys import CONTROL, Keys
from penstock.redis.control import AsyncControl
from penstock.text import redact

log = logging.getLogger(__name__)

#: Errors that set a server aside: it does not respond, or refuses a command (missing permission, for example).
_FAILURES = (QueueUnavailable, RedisError)
#: Seconds for which a memory check of a server stays valid.
ROOM_CHECK_S = 1.0
#: Seconds that a payload server may stay silent before samples go to another server; first pause before a retry; and
#: longest pause, as pauses double.
SILENT_S, AWAY_S, LONGEST_AWAY_S = 2.0, 2.0, 60.0


class PayloadStores:
    """Write and read payloads on the servers of one worker.

    Args:
        control: control Redis of this worker, which is also a payload server.
    """

    def __init__(self, config: RedisConfig, keys: Keys, control: AsyncControl) -> None:
        self._config = config
        self._keys = keys
        self._control = control
        self._servers = {name: _open(url) for name, url in config.payload_servers.items()}
        #: Names of the servers that currently get writes.
        self.names = list(self._servers) or [CONTROL]
        self._servers[CONTROL] = AsyncPayloadStore(control)
        #: Server -> time of its last memory check (monotonic), and whether it was full.
        self._checked: dict[str, tuple[float, bool]] = {}
        #: Unresponsive server -> (time of the next retry (monotonic), pause after that).
        self._away: dict[str, tuple[float, float]] = {}
        self._directory = payload_servers.Directory()

    async def refresh(self) -> None:
        """Refresh the list of payload servers; one round trip if nothing changed.

        A server that cannot be opened on this machine is set aside.
        """
        rev = payload_servers.revision(await self._control.do(lambda client: client.hget(self._keys.servers, "rev")))
        if self._directory.rev is None:
            for call in payload_servers.seeds(self._keys, self._config):
                await self._control.call(call)
        elif rev == self._directory.rev:
            return
        raw = await self._control.do(lambda client: client.hgetall(self._keys.servers))
        directory = payload_servers.parse(raw)
        names = directory.live or [CONTROL]
        if names != sorted(self.names):
            log.info("payload servers changed: writing to %s", ", ".join(names))
        self._directory, self.names = directory, names
        for name in names:
            if not self.is_away(name):
                self._opens(name)

    def _opens(self, name: str) -> bool:
        """Open a server; if its address does not exist on this machine, set it aside and return False."""
        if name in self._servers:
            return True
        try:
            self._servers[name] = _open(self._directory.url(name, self._config))
        except PenstockError as exc:
            self._set_aside(name, exc)
            return False
        return True

    @property
    def rev(self) -> str:
        """Directory revision at the last refresh; '' before the first one."""
        return self._directory.rev or ""

    def choose(self, sample_id: str) -> str:
        """Choose the server for a sample's payload by rendezvous hashing over the responding servers."""
        return choose_server(sample_id, [name for name in self.names if not self.is_away(name)] or self.names)

    def is_away(self, server: str) -> bool:
        """Return whether a server did not respond and its retry is not due yet."""
        return server in self._away and time.monotonic() < self._away[server][0]

    def silent(self, servers: Collection[str]) -> list[str]:
        """Return the ``servers`` that are set aside."""
        return [name for name in self._away if name in servers]

    async def is_full(self, server: str) -> bool:
        """Return whether a server takes no writes now, because it is full or does not respond."""
        if self.is_away(server) or not self._opens(server):
            return True
        try:
            return await self._check_room(server)
        except _FAILURES as exc:
            if server == CONTROL:
                raise
            self._set_aside(server, exc)
            return True

    async def _check_room(self, server: str) -> bool:
        """Return whether a server was full at most ``ROOM_CHECK_S`` ago."""
        now, store = time.monotonic(), self._servers[server]
        checked_at, was_full = self._checked.get(server, (-ROOM_CHECK_S, False))
        if now - checked_at < ROOM_CHECK_S:
            return was_full
        is_full = await store.is_full()
        if is_full and not was_full:
            log.warning("payload store %s is full; buffering samples locally", redact(store.url))
        self._checked[server] = now, is_full
        return is_full

    async def put(self, server: str, pairs: Sequence[tuple[str, bytes]]) -> list[QueueFull | None] | None:
        """Write (key, bytes) pairs unless the key exists; return None or the refusal (no room) for each pair.

        If a payload server fails, set it aside and return None instead. The control Redis is awaited.
        """
        if not self._opens(server):
            return None
        try:
            answers = await self._servers[server].put(pairs, PAYLOAD_TTL_S)
        except _FAILURES as exc:
            if server == CONTROL:
                raise
            self._set_aside(server, exc)
            return None
        self._away.pop(server, None)
        return answers

    async def read(self, server: str, wanted: Sequence[str], renewed: Sequence[str]) -> list[bytes | None] | None:
        """Return the bytes of each key, or None if it is gone; renew the expiry of ``renewed`` keys.

        If a payload server does not respond, set it aside and return None instead. The control Redis is awaited.
        """
        if server in self._directory.lost:
            return [None] * len(wanted)
        if self.is_away(server) or not self._opens(server):
            return None
        try:
            await self._servers[server].renew(renewed, PAYLOAD_TTL_S)
            answers = await self._servers[server].read(wanted)
        except _FAILURES as exc:
            if server == CONTROL:
                raise
            self._set_aside(server, exc, "read")
            return None
        self._away.pop(server, None)
        return answers

    def _set_aside(self, server: str, exc: Exception, what: str = "written to") -> None:
        """Exclude a failed server from writes until its next retry."""
        pause_s = self._away[server][1] if server in self._away else AWAY_S
        self._away[server] = (time.monotonic() + pause_s, min(2 * pause_s, LONGEST_AWAY_S))
        log.warning(
            "payload server %s cannot be %s; using other servers for %g s: %s",
            server,
            what,
            pause_s,
            redact(str(exc)),
        )

    async def close(self) -> None:
        """Close all payload servers except the control Redis."""
        for name, server in self._servers.items():
            if name != CONTROL:
                await server.close()


def choose_server(sample_id: str, servers: Sequence[str]) -> str:
    """Choose by rendezvous hashing (Thaler and Ravishankar 1998): a changed server moves only its own share."""
    if len(servers) == 1:
        return servers[0]
    return max(servers, key=lambda name: hashlib.blake2b(f"{name}\0{sample_id}".encode(), digest_size=8).digest())


def _open(url: str) -> AsyncPayloadStore:
    """Create the client of a replaceable payload server, without connecting yet."""
    return AsyncPayloadStore(AsyncControl(url, patience_s=SILENT_S))
