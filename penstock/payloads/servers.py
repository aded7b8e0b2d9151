"""The payload servers of a run: a small directory in the control Redis, so that servers can join or leave at run time.

    live ──drain──> draining ──empty──> drained
      └── workers write here   └── only read, until its payloads are trained and freed
    any of them ──lose──> lost: gone for good, and readers of its payloads continue without them

A sample's record names the server that has its payload, so payloads are found wherever they were written. A server is
chosen by rendezvous hash of the sample's id among the live ones; without any, payloads are on the control Redis. If a
process's own configuration gives a URL for a name, that one is used: machines may reach a server at other addresses.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from penstock.config import RedisConfig
from penstock.errors import ConfigError, ProtocolError
from penstock.names import check_name
from penstock.payloads.store import PayloadStore
from penstock.protocol import scripts
from penstock.protocol.presence import GONE_S, parse_workers
from penstock.protocol.scripts import run
from penstock.records.codec import name_in, name_shown, pack, unpack_map
from penstock.records.job import JobState
from penstock.records.keys import CONTROL, Keys
from penstock.records.record import readable
from penstock.redis.commands import Client
from penstock.text import safe_repr

#: Most characters that are read of the revision of a directory.
MAX_REV = 64


class ServerState(StrEnum):
    """State of a payload server."""

    #: Workers write to it.
    LIVE = "live"
    #: Workers no longer write to it; it is read until all that it holds is freed.
    DRAINING = "draining"
    #: It is empty.
    DRAINED = "drained"
    #: It is gone with its payloads.
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Server:
    """One payload server."""

    name: str
    url: str
    state: ServerState = ServerState.LIVE


@dataclass(frozen=True, slots=True)
class Directory:
    """All payload servers of a run, at one revision."""

    #: Random, new after each change: a counter could repeat a value after a failover. None: not read yet.
    rev: str | None = None
    servers: dict[str, Server] = field(default_factory=dict)

    @property
    def live(self) -> list[str]:
        """Names of the servers that workers write to, sorted."""
        return sorted(name for name, server in self.servers.items() if server.state is ServerState.LIVE)

    @property
    def lost(self) -> list[str]:
        """Names of the servers that are gone with their payloads, sorted."""
        return sorted(name for name, server in self.servers.items() if server.state is ServerState.LOST)

    def named(self, name: str) -> Server:
        """Return the server of that name. Raises ConfigError if it is unknown."""
        if name not in self.servers:
            known = ", ".join(sorted(self.servers)) or "none"
            raise ConfigError(f"The run has no payload server {name!r} (known: {known}).")
        return self.servers[name]

    def url(self, name: str, config: RedisConfig) -> str:
        """Return the URL of a server. Raises ProtocolError if it is unknown."""
        if name in config.payload_servers:
            return config.payload_servers[name]
        if name in self.servers:
            return self.servers[name].url
        known = ", ".join(sorted({CONTROL, *self.servers, *config.payload_servers}))
        raise ProtocolError(
            f"A sample lies on payload server {name!r}, which neither redis.payload_servers nor the run names (known: "
            f"{known}): add it with `penstock payloads add`."
        )


def parse(raw: Mapping[bytes, bytes]) -> Directory:
    """Parse the hash ``servers``. Unreadable servers are logged and skipped."""
    entries = {key: value for key, value in raw.items() if key.startswith(b"s:")}
    return Directory(revision(raw.get(b"rev")), {server.name: server for server in readable(entries, _server)})


def _server(key: bytes, value: bytes) -> Server:
    name = name_in(key[2:], "A payload server")
    what = f"The record of payload server {safe_repr(name)}"
    record = unpack_map(value, what)
    state, url = record.get("state"), record.get("url")
    if state not in list(ServerState) or not isinstance(url, str):
        raise ProtocolError(f"{what} is not one that penstock wrote.")
    return Server(name, url, ServerState(state))


def _record(url: str, state: ServerState) -> bytes:
    return pack({"url": url, "state": state})


def revision(raw: bytes | None) -> str:
    """Return the field ``rev`` of the hash; '' if it is not set."""
    return name_shown(raw or b"")[:MAX_REV]


def read(client: Client, keys: Keys) -> Directory:
    """Read the directory. Blocks for one round trip."""
    return parse(client.hgetall(keys.servers))


def seeds(keys: Keys, config: RedisConfig) -> list[scripts.Call[int]]:
    """Return the calls that add the servers of a configuration which the directory does not know yet."""
    return [
        scripts.server(keys, name, _record(url, ServerState.LIVE), only_new=True)
        for name, url in sorted(config.payload_servers.items())
    ]


def add(client: Client, keys: Keys, name: str, url: str) -> None:
    """Add a live server; one that is drained or lost becomes live again. Blocks for two round trips.

    Raises:
        ConfigError: the name is taken by a server at another address, or is invalid.
    """
    check_name("payload server", name)
    if name == CONTROL:
        raise ConfigError(f"{CONTROL!r} is the control Redis itself, which takes payloads while no server is live.")
    known = read(client, keys).servers.get(name)
    if known is not None and known.url != url:
        raise ConfigError(f"Payload server {name!r} is at another address, where payloads may lie: take another name.")
    run(client, scripts.server(keys, name, _record(url, ServerState.LIVE)))


def set_state(client: Client, keys: Keys, name: str, state: ServerState) -> Server:
    """Set the state of a server. Blocks for two round trips. Raises ConfigError if it is unknown."""
    server = Server(name, read(client, keys).named(name).url, state)
    run(client, scripts.server(keys, name, _record(server.url, state)))
    return server


@dataclass(frozen=True, slots=True)
class Drain:
    """Progress of draining a server."""

    #: Payloads and side arrays that may still be read.
    left: int
    #: Payloads of lost leases: they are never read, and expire.
    orphans: int
    #: Workers that may still write there.
    writers: list[str]
    #: How many of ``left`` are of dead jobs.
    buried: int = 0

    @property
    def done(self) -> bool:
        return not self.left and not self.writers

    def words(self) -> str:
        """Return what draining waits for, as text."""
        parts = []
        if self.writers:
            parts.append(f"workers {', '.join(self.writers[:4])} to stop writing there")
        if self.left:
            buried = f" ({self.buried} of them of buried jobs: requeue or cancel these)" if self.buried else ""
            parts.append(f"{self.left} payloads to be trained and freed{buried}")
        return " and ".join(parts)


def drain(client: Client, store: PayloadStore, keys: Keys, server: Server) -> Drain:
    """Inspect a draining server. Blocks for a scan of its keys (about 10 us each).

    Args:
        client: control Redis.
        store: the server itself.

    Raises:
        ConfigError: it is no longer draining: an operator changed its state.
    """
    # In this order: a worker that reports this revision has written all that it will, and it is found below.
    directory = read(client, keys)
    state = directory.named(server.name).state
    if state is not ServerState.DRAINING:
        raise ConfigError(f"Payload server {server.name!r} is {state} by now: drain it again, if it is to be left.")
    writers = []
    now = _now(client)
    for worker in parse_workers(client.hgetall(keys.workers), now=now, all_=True):
        if worker.age_s < GONE_S and worker.servers_seen != directory.rev:
            writers.append(worker.name)
    found: Counter[str] = Counter()
    names = store.names(keys.prefix)
    while batch := list(islice(names, 1000)):
        found.update(_sort(client, keys, batch))
    return Drain(found["kept"] + found["held"] + found["buried"], found["orphan"], sorted(writers), found["buried"])


def _now(client: Client) -> float:
    seconds, micros = client.time()
    return float(seconds) + float(micros) / 1e6


def _sort(client: Client, keys: Keys, found: list[tuple[str, bool]]) -> Iterator[str]:
    """Yield the kind of each key: kept (permanent), held (not yet), buried (of a dead job), or orphan (of no lease)."""
    yield from ("kept" for _, kept in found if kept)
    parts = [parts_of(keys, key) for key, kept in found if not kept]
    pipe = client.pipeline(transaction=False)
    for job, k, _ in parts:
        pipe.hmget(keys.group(job), "st", "tok", f"s:{k}")
    for (job, _, token), (state, *tokens) in zip(parts, pipe.execute(), strict=True):
        # Its lease is neither held nor has committed it: it is never read.
        if job and token.encode() not in tokens:
            yield "orphan"
        else:
            yield "buried" if state == JobState.DEAD.encode() else "held"


def parts_of(keys: Keys, name: str) -> tuple[str, str, str]:
    """Split the name of a payload or side array into job, k and lease token; ('', '', '') for anything else."""
    for kind in ("payload:", "side:"):
        prefix = keys.of(kind)
        if name.startswith(prefix):
            sample, _, rest = name.removeprefix(prefix).partition(":")
            job, _, k = sample.rpartition("/")
            return job, k, rest.partition(":")[0]
    return "", "", ""
