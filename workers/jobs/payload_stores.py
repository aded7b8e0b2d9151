"""Where a worker writes payloads: the live payload servers of its run, or the control Redis where there are none.

live, answers, has room ──> written to
  ├ silent: its share goes to the others; asked again after a pause, which doubles
  └ full: its share waits
"""

import hashlib
import logging
import time
from collections.abc import Collection, Sequence

from penstock.config import RedisConfig
from penstock.errors import ConfigError, PenstockError, QueueFull, QueueUnavailable
from penstock.payloads import servers as payload_servers
from penstock.payloads.async_store import AsyncPayloadRedis, AsyncPayloadStore, open_async_store
from penstock.protocol.keys import CONTROL, Keys
from penstock.redaction import redact
from penstock.redis.control import AsyncControl

log = logging.getLogger(__name__)

#: How long a look at a server's memory holds.
LOOK_S = 1.0
#: How long a payload server may stay silent before samples go to another one; it is asked again after a pause, which
#: doubles.
SILENT_S, AWAY_S, LONGEST_AWAY_S = 2.0, 2.0, 60.0


class PayloadStores:
    """The servers of one worker, by name.

    Args:
        control: the control Redis of this worker, which is one of them.
        ttl_s: payloads that nobody commits expire after this many seconds.
    """

    def __init__(self, config: RedisConfig, keys: Keys, control: AsyncControl, ttl_s: int) -> None:
        self._config = config
        self._keys = keys
        self._control = control
        self._ttl_s = ttl_s
        self._servers = {name: _open(url) for name, url in config.payload_servers.items()}
        #: Those that are written to now.
        self.names = list(self._servers) or [CONTROL]
        self._servers[CONTROL] = AsyncPayloadRedis(control)
        self._room = {name: _Room(server) for name, server in self._servers.items()}
        #: Servers that do not answer -> (not asked before then (monotonic), pause after that).
        self._away: dict[str, tuple[float, float]] = {}
        self._directory = payload_servers.Directory()

    async def look(self) -> None:
        """See which payload servers there are by now. One round trip where nothing changed.

        One that cannot be opened here is set aside.
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
            log.info("payloads go to %s from now on", ", ".join(names))
        self._directory, self.names = directory, names
        for name in names:
            if not self.is_away(name):
                self._opens(name)

    def _opens(self, name: str) -> bool:
        """Whether a server can be opened here; else it is set aside: its address is none here."""
        if name in self._servers:
            return True
        try:
            self._servers[name] = _open(self._directory.url(name, self._config), makes=False)
        except PenstockError as exc:
            self._set_aside(name, exc)
            return False
        self._room[name] = _Room(self._servers[name])
        return True

    @property
    def rev(self) -> str:
        """Revision of the directory as it was last seen; '' before."""
        return self._directory.rev or ""

    def choose(self, sample_id: str) -> str:
        """The server for a sample's payload, by rendezvous hash among those that are written to and answer."""
        return choose_server(sample_id, [name for name in self.names if not self.is_away(name)] or self.names)

    def is_away(self, server: str) -> bool:
        """Whether it did not answer, and is not asked yet again."""
        return server in self._away and time.monotonic() < self._away[server][0]

    def silent(self, servers: Collection[str]) -> list[str]:
        """Those of ``servers`` that have not answered since they fell silent."""
        return [name for name in self._away if name in servers]

    async def is_full(self, server: str) -> bool:
        """Whether it takes nothing now, for lack of room or because it does not answer."""
        if self.is_away(server) or not self._opens(server):
            return True
        try:
            return await self._room[server].is_full()
        except (QueueUnavailable, ConfigError) as exc:
            if server == CONTROL:
                raise
            self._set_aside(server, exc)
            return True

    async def put(self, server: str, pairs: Sequence[tuple[str, bytes]]) -> list[QueueFull | None] | None:
        """Write (key, bytes) where there is no such key: for each None, or that it found no room.

        None instead of all: it cannot be written to, and is set aside. The control Redis is waited for.
        """
        if not self._opens(server):
            return None
        try:
            answers = await self._servers[server].put(pairs, self._ttl_s)
        except (QueueUnavailable, ConfigError) as exc:
            if server == CONTROL:
                raise
            self._set_aside(server, exc)
            return None
        self._away.pop(server, None)
        return answers

    async def read(
        self, server: str, wanted: Sequence[tuple[str, int]], renewed: Sequence[str]
    ) -> list[bytes | None] | None:
        """Bytes of (key, bytes by its record), None where one is gone; the time of ``renewed`` keys begins anew.

        None instead of all: it does not answer, and is set aside. A server that was lost has nothing. The control Redis
        is waited for.
        """
        if server in self._directory.lost:
            return [None] * len(wanted)
        if self.is_away(server) or not self._opens(server):
            return None
        try:
            await self._servers[server].renew(renewed, self._ttl_s)
            answers = await self._servers[server].read(wanted)
        except (QueueUnavailable, ConfigError) as exc:
            if server == CONTROL:
                raise
            self._set_aside(server, exc, "read")
            return None
        self._away.pop(server, None)
        return answers

    def _set_aside(self, server: str, exc: PenstockError, what: str = "written to") -> None:
        """What was for a server that does not answer goes to another one, and it is asked again later."""
        pause_s = self._away[server][1] if server in self._away else AWAY_S
        self._away[server] = (time.monotonic() + pause_s, min(2 * pause_s, LONGEST_AWAY_S))
        log.warning(
            "payload server %s cannot be %s; finished samples go to others for %g s: %s", server, what, pause_s, exc
        )

    async def close(self) -> None:
        """Close all but the control Redis."""
        for name, server in self._servers.items():
            if name != CONTROL:
                await server.close()


def choose_server(sample_id: str, servers: Sequence[str]) -> str:
    """Rendezvous hash (Thaler and Ravishankar 1998): a server that joins or leaves moves only its own share."""
    if len(servers) == 1:
        return servers[0]
    return max(servers, key=lambda name: hashlib.blake2b(f"{name}\0{sample_id}".encode(), digest_size=8).digest())


def _open(url: str, *, makes: bool = True) -> AsyncPayloadStore:
    """A payload server, in whose place others may be used.

    Args:
        makes: its folder, where it is not there; False where only a record in Redis says where it is.
    """
    return open_async_store(url, patience_s=SILENT_S, makes=makes)


class _Room:
    """Whether a server has room, looked up at most once per ``LOOK_S``."""

    def __init__(self, store: AsyncPayloadStore) -> None:
        self._store = store
        self._looked = 0.0
        self._full = False

    async def is_full(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            full = await self._store.is_full()
            if full and not self._full:
                log.warning("finished samples are kept here: %s has no room for them", redact(self._store.url))
            self._full, self._looked = full, now
        return self._full
