"""What could hurt a run, looked at one by one: Redis, clocks, disks, environments, GPUs, payload servers, weights."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import redis

from penstock.addresses import is_folder, path_of
from penstock.config import Config
from penstock.errors import PenstockError, ProtocolError
from penstock.payloads.servers import ServerState
from penstock.payloads.servers import read as read_servers
from penstock.payloads.store import open_store
from penstock.protocol.keys import Keys
from penstock.protocol.presence import FRESH_S, GONE_S, read_workers
from penstock.protocol.records.publication import Publication
from penstock.redaction import redact
from penstock.redis.commands import Client
from penstock.redis.connect import MIN_VERSION
from penstock.redis.memory import FULL, is_full
from penstock.redis.refusals import disk_trouble
from penstock.words import said

#: A clock may be off by so much, seconds, before it is told of; from ``FRESH_S`` on its worker counts as gone.
CLOCK_S = 1.0
#: A worker shows itself twice a second; one whose record moves on within this is alive.
BEAT_S = 1.5
#: Shares of a disk: nearly full, and full, from where a payload folder takes nothing more.
NEARLY, FULL_DISK = 0.90, 0.97
_STORE_TIMEOUT_S = 2.0


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    #: What was looked at.
    what: str
    level: Level
    #: What was found.
    found: str
    #: What to do about it; '' where nothing is to be done.
    todo: str = ""


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """The findings of all checks, each as it comes; one that fails is a finding itself. Blocks for seconds."""
    for what, check in checks:
        try:
            yield from check()
        except (PenstockError, redis.RedisError, OSError, ValueError) as exc:
            told = str(exc) if isinstance(exc, PenstockError) else said(exc)
            yield Finding(what, Level.ERROR, redact(told))


def checks_of_run(client: Client, keys: Keys, models: Iterable[str]) -> list[tuple[str, Check]]:
    """What can be looked at of a run through its Redis."""
    return [
        ("redis", lambda: look_at_redis(client)),
        ("clocks", lambda: look_at_clocks(client, keys)),
        ("payload servers", lambda: look_at_payloads(client, keys)),
        ("weights", lambda: look_at_weights(client, keys, models)),
    ]


def checks_of_machine(config: Config | None, folder: Path) -> list[tuple[str, Check]]:
    """What can be looked at on this machine. ``folder``: of the run; its disk counts even where it is not made yet."""
    checks: list[tuple[str, Check]] = [("run's folder", lambda: [look_at_disk("run's folder", folder)])]
    if config is None:
        return [*checks, ("environments", lambda: [_no_config(folder)])]
    return [
        *checks,
        ("packages", lambda: look_at_packages(config)),
        ("engine", lambda: look_at_engine(config)),
        ("gpus", lambda: look_at_gpus(config)),
    ]


def _no_config(folder: Path) -> Finding:
    todo = "give --config FILE, or --directory of the runs, to have environments and GPUs looked at too"
    return Finding("environments", Level.WARNING, f"there is no configuration in {folder}", todo)


# Redis


def look_at_redis(client: Client) -> Iterator[Finding]:
    """Its version, its settings, its memory and its disk. Blocks for a few round trips."""
    info = client.info()
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        yield Finding("redis version", Level.ERROR, version, "use 6.2 or later")
    else:
        yield Finding("redis version", Level.OK, version)
    yield from _settings(client, info)
    yield _memory(info)
    if trouble := disk_trouble(client):
        yield Finding("redis disk", Level.ERROR, f"Redis waits for {trouble}", "make room there; all goes on by itself")


def _settings(client: Client, info: dict[str, Any]) -> Iterator[Finding]:
    try:
        raw = {**client.config_get("appendfsync"), **client.config_get("maxmemory-policy")}
    except redis.ResponseError:  # managed servers forbid CONFIG
        raw = {}
    known = {_text(name): _text(value) for name, value in raw.items()}
    if int(info.get("aof_enabled", 1)):
        yield Finding("redis appendonly", Level.OK, "yes")
    else:
        yield Finding("redis appendonly", Level.ERROR, "no: the run is lost when Redis dies", "set appendonly yes")
    yield _appendfsync(known.get("appendfsync", ""))
    policy = known.get("maxmemory-policy", str(info.get("maxmemory_policy", "")))
    if policy == "noeviction":
        yield Finding("redis maxmemory-policy", Level.OK, policy)
    else:
        told = f"{policy or 'not known'}: jobs vanish when Redis is full"
        yield Finding("redis maxmemory-policy", Level.ERROR, told, "set maxmemory-policy noeviction")


def _appendfsync(policy: str) -> Finding:
    what = "redis appendfsync"
    match policy:
        case "always" | "everysec":
            lost = "nothing" if policy == "always" else "up to a second"
            return Finding(what, Level.OK, f"{policy}: a power loss loses {lost}")
        case "":
            return Finding(what, Level.WARNING, "the server does not say", "see that it is everysec or always")
    told = f"{policy}: a power loss loses up to half a minute"
    return Finding(what, Level.WARNING, told, "set appendfsync everysec, or always")


def _memory(info: dict[str, Any]) -> Finding:
    used, most = int(info["used_memory"]), int(info["maxmemory"])
    if not most:
        return Finding("redis memory", Level.OK, f"{_mb(used)} used, no maxmemory")
    told = f"{_mb(used)} of {_mb(most)} used ({used / most:.0%})"
    if is_full(info):
        todo = "raise maxmemory, add payload servers, or let the trainers catch up"
        return Finding("redis memory", Level.ERROR, f"{told}: above {FULL:.0%} nothing is admitted", todo)
    return Finding("redis memory", Level.OK, told)


# Clocks


def look_at_clocks(client: Client, keys: Keys) -> Iterator[Finding]:
    """Those of Redis and of each worker against this machine's. Blocks for seconds where a worker seems to be late."""
    before = time.time()
    seconds, micros = client.time()
    after = time.time()
    theirs = int(seconds) + int(micros) / 1e6
    off = theirs - min(max(theirs, before), after)
    yield _clock("clock of redis", off, "run a time service (chrony, ntpd) on both machines")
    yield from _worker_clocks(client, keys)


def _worker_clocks(client: Client, keys: Keys) -> Iterator[Finding]:
    now = time.time()
    first = {one.name: one.at for one in read_workers(client, keys)}
    if all(abs(now - at) < CLOCK_S for at in first.values()):
        if first:
            yield Finding("clocks of workers", Level.OK, f"{len(first)} workers agree with this machine")
        return
    time.sleep(BEAT_S)
    now = time.time()
    for one in read_workers(client, keys):
        if one.at != first.get(one.name) or one.at - now > CLOCK_S:
            # It may have been written a moment before it is read: that much behind says nothing.
            off = one.at - now
            yield _clock(f"clock of worker {one.name} on {one.host}", off if off > 0 else min(0.0, off + BEAT_S),
                         f"run a time service on {one.host}")  # fmt: skip
        elif now - one.at < GONE_S:
            told = f"it has not shown itself for {now - one.at:.0f} s"
            yield Finding(f"worker {one.name}", Level.WARNING, told, f"see whether it lives on {one.host}")


def _clock(what: str, off_s: float, todo: str) -> Finding:
    level = Level.OK if abs(off_s) < CLOCK_S else Level.WARNING if abs(off_s) < FRESH_S else Level.ERROR
    if level is Level.OK:
        return Finding(what, level, "agrees with this machine's")
    return Finding(what, level, f"{abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} this machine's", todo)


# Disks


def look_at_disk(what: str, path: Path) -> Finding:
    """How full the file system is that ``path`` lies on, or would."""
    there = next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))
    disk = os.statvfs(there)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    share = 1 - free / total if total else 0.0
    told = f"{path}: {_mb(free)} free of {_mb(total)}"
    if not os.access(there, os.W_OK):
        return Finding(what, Level.ERROR, f"{path} cannot be written by this user", "give it the right, or another one")
    if share < NEARLY:
        return Finding(what, Level.OK, told)
    level = Level.ERROR if share >= FULL_DISK else Level.WARNING
    return Finding(what, level, f"{told}: it is {share:.0%} full", "make room there")


# Payload servers and weights


def look_at_payloads(client: Client, keys: Keys) -> Iterator[Finding]:
    """Whether each payload server answers from here, and has room. Blocks for up to seconds a server."""
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
            yield Finding(what, Level.OK, f"answers; {_mb(used)} of {_mb(most) if most else 'no maxmemory'} used")


def look_at_weights(client: Client, keys: Keys, models: Iterable[str]) -> Iterator[Finding]:
    """Whether the folder of each model's newest publication can be read from here, and its disk."""
    for model in models:
        what = f"weights of {model}"
        for name, fields in client.xrevrange(keys.weights(model), count=1):
            try:
                told = Publication.from_bytes(fields.get(b"p", b""), f"publication {name.decode(errors='replace')}")
            except ProtocolError as exc:
                yield Finding(what, Level.ERROR, str(exc))
                continue
            yield from _weights(what, Path(told.path))


def _weights(what: str, folder: Path) -> Iterator[Finding]:
    config = folder / "config.json"
    try:
        config.open("rb").close()
    except OSError as exc:
        todo = "mount the folder of weights here, if a worker or trainer is to run on this machine"
        yield Finding(what, Level.WARNING, f"{config} cannot be read from here ({exc.strerror})", todo)
        return
    yield look_at_disk(what, folder)


# This machine


def look_at_packages(config: Config) -> Iterator[Finding]:
    """Whether the extras that this configuration needs are installed here."""
    from console.launch.preflight import check_extras

    yield passes("packages", lambda: check_extras(config, trains=True), "all that the configuration needs is there")


def look_at_engine(config: Config) -> Iterator[Finding]:
    """Whether the engine's environment runs here, or the external engine answers. Blocks for seconds."""
    from console.launch.preflight import check_engine
    from penstock.system.engine_http import fetch

    if (url := config.engine.url) is not None:
        health = f"{url.rstrip('/')}/health"
        yield passes("engine", lambda: fetch(health, timeout_s=5), f"the one at {redact(url)} answers")
    else:
        yield passes("engine", lambda: check_engine(config.engine.python), f"{config.engine.python} has sglang")


def look_at_gpus(config: Config) -> Iterator[Finding]:
    """The GPUs that processes started here may use, and whether the trainer's device is one of them."""
    from console.launch.trainable import check_device
    from penstock.system.gpus import visible_gpus

    found = visible_gpus()
    yield passes("gpus", lambda: check_device(config), f"{', '.join(found)} visible" if found else "none, none needed")


def passes(what: str, check: Callable[[], object], fine: str) -> Finding:
    """A finding of a check that says by an error of penstock what is wrong."""
    try:
        check()
    except PenstockError as exc:
        return Finding(what, Level.ERROR, redact(str(exc)))
    return Finding(what, Level.OK, fine)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
