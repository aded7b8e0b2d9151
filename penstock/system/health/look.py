"""Checks of what several machines have to reach: disks, payload servers, weights, and the clock of Redis."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import redis

from penstock.errors import PenstockError, ProtocolError
from penstock.payloads.addresses import is_folder, path_of
from penstock.payloads.servers import ServerState
from penstock.payloads.servers import read as read_servers
from penstock.payloads.store import open_store
from penstock.protocol.keys import Keys
from penstock.protocol.presence import FRESH_S
from penstock.protocol.records.publication import Publication
from penstock.protocol.scripts import read_whole
from penstock.redaction import redact
from penstock.redis.commands import Client
from penstock.system.health.finding import Finding, Level

#: Largest offset of a clock in seconds without a warning; from ``FRESH_S`` on its worker counts as gone.
CLOCK_S = 1.0
#: Shares of a disk: nearly full, and full, when a payload folder is no longer written.
NEARLY, FULL_DISK = 0.90, 0.97
_STORE_TIMEOUT_S = 2.0


def look_at_clock(client: Client) -> Finding:
    """Compare the clock of Redis with this machine's. Blocks for a round trip."""
    before = time.time()
    seconds, micros = client.time()
    after = time.time()
    theirs = int(seconds) + int(micros) / 1e6
    off = theirs - min(max(theirs, before), after)
    return clock("clock of redis", off, "run a time service (chrony, ntpd) on both machines")


def clock(what: str, off_s: float, todo: str) -> Finding:
    """Return the finding for a clock that is ahead of this machine's by ``off_s``."""
    level = Level.OK if abs(off_s) < CLOCK_S else Level.WARNING if abs(off_s) < FRESH_S else Level.ERROR
    if level is Level.OK:
        return Finding(what, level, "agrees with this machine's")
    return Finding(what, level, f"{abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} this machine's", todo)


def look_at_disk(what: str, path: Path) -> Finding:
    """Check how full the file system of ``path`` is."""
    there = next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))
    disk = os.statvfs(there)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    share = 1 - free / total if total else 0.0
    told = f"{path}: {in_mb(free)} free of {in_mb(total)}"
    if not os.access(there, os.W_OK):
        return Finding(what, Level.ERROR, f"{path} cannot be written by this user", "give it the right, or another one")
    if share < NEARLY:
        return Finding(what, Level.OK, told)
    level = Level.ERROR if share >= FULL_DISK else Level.WARNING
    return Finding(what, level, f"{told}: it is {share:.0%} full", "free space")


def look_at_payloads(client: Client, keys: Keys) -> Iterator[Finding]:
    """Check whether each payload server answers from here, and has room. Blocks for up to seconds per server."""
    servers = [one for one in read_servers(client, keys).servers.values() if one.state is not ServerState.LOST]
    for server in sorted(servers, key=lambda one: one.name):
        what = f"payload server {server.name}"
        try:
            with contextlib.closing(open_store(server.url, timeout_s=_STORE_TIMEOUT_S)) as store:
                store.check()
                used, most = store.usage()
        except (PenstockError, redis.RedisError) as exc:
            todo = f"start it again, or give it up with `penstock payloads lose {server.name}`"
            yield Finding(what, Level.ERROR, redact(str(exc)), todo)
            continue
        if is_folder(server.url):
            yield look_at_disk(what, path_of(server.url))
        else:
            yield Finding(what, Level.OK, f"answers; {in_mb(used)} of {in_mb(most) if most else 'no maxmemory'} used")


def look_at_weights(client: Client, keys: Keys, models: Iterable[str], *, needed: bool = False) -> Iterator[Finding]:
    """Check whether the folder of each model's newest publication can be read from here, and its disk.

    Args:
        needed: whether this process loads them.
    """
    for model in models:
        what = f"weights of {model}"
        for name, fields in client.xrevrange(keys.weights(model), count=1):
            try:
                told = Publication.from_bytes(fields.get(b"p", b""), f"publication {name.decode(errors='replace')}")
            except ProtocolError as exc:
                yield Finding(what, Level.ERROR, str(exc))
                continue
            try:
                whole = read_whole(client, keys, told)
            except ProtocolError as exc:
                yield Finding(what, Level.ERROR, str(exc))
                continue
            if whole is None:
                yield Finding(what, Level.OK, f"the folder of version {told.version} is not complete yet")
                continue
            yield from _weights(what, Path(whole.path), needed)


def _weights(what: str, folder: Path, needed: bool) -> Iterator[Finding]:
    config = folder / "config.json"
    try:
        config.open("rb").close()
    except OSError as exc:
        level = Level.ERROR if needed else Level.WARNING
        todo = "mount the folder of weights here"
        todo += "" if needed else ", if a worker or trainer is to run on this machine"
        yield Finding(what, level, f"{config} cannot be read from here ({exc.strerror})", todo)
        return
    yield look_at_disk(what, folder)


def in_mb(num_bytes: int) -> str:
    """Return a size as text."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
