"""Find problems of a run's Redis, clocks, payload servers, weights and workers."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

from penstock.metrics.probes import (
    CLOCK_S,
    Answer,
    Check,
    Finding,
    Level,
    ask,
    clock,
    in_mb,
    look_at_clock,
    look_at_payloads,
    look_at_weights,
    read_answers,
)
from penstock.protocol.presence import GONE_S, live_workers, read_workers
from penstock.records.keys import Keys
from penstock.redis.append_only import EVERY_S, IDENT, Synced, read_synced
from penstock.redis.commands import FULL, Client, is_full
from penstock.redis.connect import MIN_VERSION
from penstock.redis.refusals import disk_trouble

#: Workers send a heartbeat twice a second; a worker whose record changes within this time is alive.
BEAT_S = 1.5
#: Longest wait for answers of workers, and seconds between two reads.
ANSWER_S, LOOK_S = 8.0, 0.1
#: Seconds without a sync of the server's append-only file that are reported.
LATE_S = 5 * EVERY_S


def checks_of_run(client: Client, keys: Keys, models: Iterable[str]) -> list[tuple[str, Check]]:
    """Return the checks of a run that use its Redis."""
    return [
        ("redis", lambda: look_at_redis(client)),
        ("clocks", lambda: look_at_clocks(client, keys)),
        ("payload servers", lambda: look_at_payloads(client, keys)),
        ("weights", lambda: look_at_weights(client, keys, models)),
        ("workers", lambda: look_from_workers(client, keys)),
    ]


# Redis


def look_at_redis(client: Client) -> Iterator[Finding]:
    """Check Redis: version, settings, memory and disk. Blocks for a few round trips."""
    info = client.info()
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        yield Finding("redis version", Level.ERROR, version, "use 6.2 or later")
    else:
        yield Finding("redis version", Level.OK, version)
    yield from _settings(client, info)
    yield _memory(info)
    if trouble := disk_trouble(client):
        yield Finding("redis disk", Level.ERROR, f"Redis waits for {trouble}", "free space there; Redis then resumes")


def sync_trouble(client: Client) -> str:
    """Return why penstock cannot sync the append-only file of its own server, and what to do; '' if it can.

    Unknown on another machine. Blocks for a few round trips.
    """
    known = _known(client)
    noted = read_synced(Path(known.get("dir", ""))) if known.get("syslog-ident") == IDENT else None
    if noted is None:
        return ""
    found = _synced(known.get("appendfsync", ""), noted)
    return "" if found.level is Level.OK else f"{found.what}: {found.found}; {found.todo}"


def _known(client: Client) -> dict[str, str]:
    """Return the server's settings; {} if it forbids CONFIG, as managed ones do."""
    try:
        raw = {
            name: value
            for asked in ("appendfsync", "maxmemory-policy", "syslog-ident", "dir")
            for name, value in client.config_get(asked).items()
        }
    except redis.ResponseError:
        return {}
    return {_text(name): _text(value) for name, value in raw.items()}


def _settings(client: Client, info: dict[str, Any]) -> Iterator[Finding]:
    known = _known(client)
    if int(info.get("aof_enabled", 1)):
        yield Finding("redis appendonly", Level.OK, "yes")
    else:
        yield Finding("redis appendonly", Level.ERROR, "no: the run is lost when Redis dies", "set appendonly yes")
    policy = known.get("appendfsync", "")
    if known.get("syslog-ident") == IDENT:
        yield _synced(policy, read_synced(Path(known.get("dir", ""))))
    else:
        yield _appendfsync(policy)
    policy = known.get("maxmemory-policy", str(info.get("maxmemory_policy", "")))
    if policy == "noeviction":
        yield Finding("redis maxmemory-policy", Level.OK, policy)
    else:
        told = f"{policy or 'not known'}: jobs vanish when Redis is full"
        yield Finding("redis maxmemory-policy", Level.ERROR, told, "set maxmemory-policy noeviction")


def _appendfsync(policy: str) -> Finding:
    what = "redis appendfsync"
    match policy:
        case "always":
            return Finding(what, Level.OK, "always: a power loss loses nothing")
        case "everysec":
            told = "everysec: a power loss, or kill -9 while the disk is slow, loses up to two seconds"
            return Finding(what, Level.OK, told)
        case "":
            return Finding(what, Level.WARNING, "the server does not say", "see that it is everysec or always")
    told = f"{policy}: a power loss loses up to half a minute"
    return Finding(what, Level.WARNING, told, "set appendfsync everysec, or always")


def _synced(policy: str, noted: Synced | None) -> Finding:
    """Report on a server of penstock's own, whose keeper syncs it."""
    what = "redis appendfsync"
    if noted is None:
        told = "by penstock, each second; its state is visible on the server's machine only"
        return Finding(what, Level.WARNING, told, "run `penstock doctor` on the machine of that server, as its user")
    why = f": {noted.trouble}" if noted.trouble else ""
    if policy != "no":
        told = f"{policy}, by Redis itself, since penstock could not sync its append-only file{why}"
        todo = "check its disk; when syncs succeed again the file is rewritten, and penstock resumes"
        return Finding(what, Level.ERROR, told, todo)
    if noted.trouble or noted.age_s > LATE_S:
        told = f"by penstock, which has not synced it for {noted.age_s:.0f} s{why}: a power loss loses all since"
        todo = "check that `penstock run`, or `penstock redis`, is running and not stopped, and check the disk"
        return Finding(what, Level.WARNING, told, todo)
    return Finding(what, Level.OK, "by penstock, each second: a power loss loses up to a second")


def _memory(info: dict[str, Any]) -> Finding:
    used, most = int(info["used_memory"]), int(info["maxmemory"])
    if not most:
        return Finding("redis memory", Level.OK, f"{in_mb(used)} used, no maxmemory")
    told = f"{in_mb(used)} of {in_mb(most)} used ({used / most:.0%})"
    if is_full(info):
        todo = "raise maxmemory, add payload servers, or let the trainers catch up"
        return Finding("redis memory", Level.ERROR, f"{told}: above {FULL:.0%} nothing is admitted", todo)
    return Finding("redis memory", Level.OK, told)


# Clocks


def look_at_clocks(client: Client, keys: Keys) -> Iterator[Finding]:
    """Compare the clocks of Redis and of each worker with this machine's. Blocks for seconds if a worker seems late."""
    yield look_at_clock(client)
    yield from _worker_clocks(client, keys)


def _worker_clocks(client: Client, keys: Keys) -> Iterator[Finding]:
    now = time.time()
    first = {one.name: one.at for one in read_workers(client, keys)}
    if all(abs(now - at) < CLOCK_S for at in first.values()):
        if first:
            agree = "1 worker agrees" if len(first) == 1 else f"{len(first)} workers agree"
            yield Finding("clocks of workers", Level.OK, f"{agree} with this machine")
        return
    time.sleep(BEAT_S)
    now = time.time()
    for one in read_workers(client, keys):
        if one.at != first.get(one.name) or one.at - now > CLOCK_S:
            # The record may be up to one heartbeat old when it is read: allow for that.
            off = one.at - now
            yield clock(f"clock of worker {one.name} on {one.host}", off if off > 0 else min(0.0, off + BEAT_S),
                         f"run a time service on {one.host}")  # fmt: skip
        elif now - one.at < GONE_S:
            told = f"no heartbeat for {now - one.at:.0f} s"
            yield Finding(f"worker {one.name}", Level.WARNING, told, f"check that it is running on {one.host}")


# Every worker


def look_from_workers(client: Client, keys: Keys) -> Iterator[Finding]:
    """Report what each worker can reach from its machine. Blocks until all have answered, for at most ``ANSWER_S``."""
    workers = {one.name: one.host for one in live_workers(client, keys)}
    if not workers:
        return
    asked_at, until = ask(client, keys), time.monotonic() + ANSWER_S
    answers: list[Answer] = []
    while (silent := workers.keys() - {one.worker for one in answers}) and time.monotonic() < until:
        time.sleep(LOOK_S)
        answers = read_answers(client, keys, asked_at)
    fine = 0
    for one in answers:
        bad = [found for found in one.findings if found.level is not Level.OK]
        fine += not bad
        for found in bad:
            yield replace(found, what=f"worker {one.worker} on {one.host}: {found.what}")
    if fine:
        yield Finding("workers", Level.OK, f"{fine} of {len(workers)} reach payload servers, weights and their disks")
    for name in sorted(silent):
        told = f"no report of what it can reach within {ANSWER_S:g} s"
        todo = f"run `penstock doctor` on {workers[name]}; a worker of an older release does not report"
        yield Finding(f"worker {name} on {workers[name]}", Level.WARNING, told, todo)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
