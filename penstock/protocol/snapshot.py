"""State of a run in one instant, for status, live view, page and metrics: a few round trips, read-only."""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from redis.exceptions import ResponseError

from penstock.config.subscription import Definition
from penstock.errors import ProtocolError
from penstock.names import LANES, Lane
from penstock.protocol.position import Position
from penstock.protocol.presence import GONE_S, parse_workers
from penstock.protocol.scripts import ready_groups, run
from penstock.protocol.tokens import tokens_of
from penstock.protocol.user_failures import parse_pauses
from penstock.protocol.waits import describe, waits_in
from penstock.records.cause import Cause
from penstock.records.codec import (
    count_shown,
    name_in,
    name_shown,
    number_in,
    unpack_map,
    value_shown,
)
from penstock.records.keys import GROUP, Keys
from penstock.records.record import readable
from penstock.records.worker_causes import RedisDiskFull, RedisEvicts
from penstock.redis.call import evicting_policy, loss
from penstock.redis.commands import Client
from penstock.redis.refusals import disk_trouble, is_lost
from penstock.text import safe_repr

#: Most suspect jobs that are named.
SUSPECTS = 3
#: Fields that views use, by kind of record; a trainer may report any others.
_TEXTS = {"trainer": ("name",), "verifier": ("name", "host", "state"), "part": ("part", "host", "name", "metrics")}
_NUMBERS = {
    "trainer": (
        *("rank", "pid", "step", "version", "reward_mean", "staleness_mean", "staleness_max", "wait_share"),
        "total_steps",
    ),
    "verifier": ("pid", "checks", "killed"),
    "part": ("pid",),
}
_NEEDED = {"part": ("part", "host", "pid")}
#: Properties of ``Keys``: sets that are counted, and hashes that are read completely.
_SETS = ("delayed", "ready", "inflight")
_HASHES = (
    "counters", "clock", "subs", "workers", "trainers", "leader", "verifiers", "parts", "tokens", "paused_by", "waits",
)  # fmt: skip


def snapshot(client: Client, keys: Keys) -> dict[str, Any]:
    """Return the state of a run as plain values, except its workers (``WorkerPresence``).

    ``trainer`` is the subscription that publishes the weights, or else one that trains, with its ``mode``, ``bound``
    and ``step`` (batches that it has committed) are of it. ``ready_lanes`` counts the groups of each lane that a batch
    may still take, ``ready`` those of lane train; ``kept`` are all complete groups that are not retired. ``oldest_s``
    has for how long the next job of each lane has been queued; None if none is.

    Invalid entries are logged and left out, or read as 0 if a count is needed, so that views keep working.
    Blocks for a few round trips; raises redis' errors.
    """
    found = _read(client, keys)
    clock, leader = found["clock"], found["leader"]
    versions = {name_shown(k[8:]): _count(v) for k, v in clock.items() if k.startswith(b"version:")}
    definitions = _subs(client, keys, found["subs"])
    main = _main_sub(definitions)
    workers = [worker for worker in parse_workers(found["workers"]) if worker.age_s < GONE_S]
    return {
        "run": keys.run,
        "trainer": main.get("name", ""),
        "mode": main.get("mode", ""),
        "bound": main.get("bound", 0),
        "version": max(versions.values(), default=0),
        "versions": versions,
        "step": main.get("cursor", 0),
        "lanes": _lanes(client, keys, found["lengths"]),
        "oldest_s": _ages(found["heads"], found["time"]),
        **_ready(client, keys),
        "kept": found["ready"],
        **{name: found[name] for name in ("delayed", "dead", "inflight", "checks")},
        "counters": {name_shown(name): _count(value) for name, value in sorted(found["counters"].items())},
        "tokens": {lane: one.to_map() for lane, one in tokens_of(found["tokens"], found["counters"]).items()},
        "workers": workers,
        "trainers": _present(found["trainers"], "trainer"),
        "verifiers": _present(found["verifiers"], "verifier"),
        "parts": present_parts(found["parts"]),
        "paused": sorted(map(name_shown, found["paused"])),
        "pauses": [asdict(one) for one in parse_pauses(found["paused"], found["paused_by"], time.time())],
        "suspects": [name_shown(fields.get(b"id", b"")) for _, fields in found["suspects"]],
        "leader": {"epoch": _count(leader.get(b"epoch", b"0"))} if leader else None,
        "waits": [*_storage(client, keys), *(one.to_map() for one in waits_in(found["waits"], workers))],
        "subs": definitions,
    }


def _main_sub(subs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the subscription that drives the clock, or else the first one of lane train; {} if there is none."""
    trains = (sub for sub in subs if Lane.TRAIN in str(sub.get("lanes", "")).split(","))
    return next((sub for sub in subs if sub.get("driving")), next(trains, {}))


def main_trainer(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what rank 0 of the run's trainer shows of itself, of a snapshot; {} before its first step."""
    name, trainers = state.get("trainer"), state.get("trainers") or ()
    return next((one for one in trainers if not name or (one.get("name") == name and not one.get("rank"))), {})


def _read(client: Client, keys: Keys) -> dict[str, Any]:
    """Return Redis' answers by property of ``Keys``, its ``time``, and ``lengths`` and ``heads`` of the lanes.

    Blocks for a round trip.
    """
    pipe = client.pipeline(transaction=False)
    for lane in LANES:
        pipe.xlen(keys.jobs(lane))
    for lane in LANES:
        pipe.zrange(keys.queued(lane), 0, 0)
    pipe.time()
    for name in _SETS:
        pipe.zcard(getattr(keys, name))
    for name in _HASHES:
        pipe.hgetall(getattr(keys, name))
    pipe.xlen(keys.dead)
    pipe.smembers(keys.paused)
    pipe.llen(f"rq:queue:{keys.checks}")
    pipe.xrange(keys.jobs(Lane.SUSPECT), count=SUSPECTS)
    answers = pipe.execute()
    names, lanes = ("time", *_SETS, *_HASHES, "dead", "paused", "checks", "suspects"), len(LANES)
    rest = dict(zip(names, answers[2 * lanes :], strict=True))
    return {"lengths": answers[:lanes], "heads": answers[lanes : 2 * lanes], **rest}


def _ready(client: Client, keys: Keys) -> dict[str, Any]:
    found = run(client, ready_groups(keys))
    return {"ready": found.get(Lane.TRAIN, 0), "ready_lanes": {lane.value: found.get(lane, 0) for lane in LANES}}


def jobs_to_train(state: Mapping[str, Any], what: str) -> int:
    """Return how many jobs are ``queued`` or ``leased`` in the lanes whose groups are trained, of a snapshot."""
    lanes = (state.get("lanes") or {}).items()
    return sum(int(counts.get(what, 0)) for lane, counts in lanes if lane not in (Lane.EVAL, Lane.SCORE))


def _storage(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return the wait of Redis itself: it takes no writes, lost keys of the run, or may delete some at any time."""
    cause: Cause | None = None
    if disk_trouble(client):
        cause = RedisDiskFull()
    elif found := run(client, loss(keys)):
        cause = found.cause
    elif policy := evicting_policy(client):
        cause = RedisEvicts(policy)
    return [{"who": "redis", "since_s": 0.0, **describe(cause)}] if cause is not None else []


def _lanes(client: Client, keys: Keys, lengths: list[int]) -> dict[str, dict[str, int]]:
    lanes = {}
    for lane, length in zip(LANES, lengths, strict=True):
        # Lag is unknown once an undelivered entry was deleted: the backlog is what is not pending.
        leased = _num_pending(client, keys.jobs(lane)) if length else 0
        lanes[lane.value] = {"queued": length - leased, "leased": leased}
    return lanes


def _ages(heads: list[list[bytes]], now: tuple[int, int]) -> dict[str, float | None]:
    """Return the age of the first entry of each lane, whose id begins with the server's time in milliseconds."""
    begun = [re.match(rb"\d{1,20}(?=-)", head[0]) if head else None for head in heads]
    now_s = now[0] + now[1] / 1e6
    ages = (max(0.0, now_s - int(found[0]) / 1000) if found else None for found in begun)
    return {lane.value: age for lane, age in zip(LANES, ages, strict=True)}


def _num_pending(client: Client, stream: str) -> int:
    """Return the number of delivered entries; 0 if the group is lost, which ``loss`` reports."""
    try:
        return int(client.xpending(stream, GROUP)["pending"])
    except ResponseError as exc:
        if is_lost(exc):
            return 0
        raise


def _subs(client: Client, keys: Keys, subs: dict[bytes, bytes]) -> list[dict[str, Any]]:
    names = {field: value for field, value in subs.items() if field.startswith(b"sub:")}
    return readable(names, lambda field, _: _sub(client, keys, name_in(field[4:], "A subscription")))


def _sub(client: Client, keys: Keys, name: str) -> dict[str, Any]:
    """Return its fields; if they are invalid, ``unreadable`` says why."""
    raw = client.hgetall(keys.sub(name))
    owned = bool(client.exists(keys.owner(name)))
    try:
        Definition.read(raw, name), Position.read(raw, name)
    except ProtocolError as exc:
        return {"name": name, "unreadable": str(exc), "owned": owned}
    known = {name_shown(key): value_shown(value) for key, value in raw.items() if key != b"owner"}
    # Both by the server's clock: its trainer renews its lease every 2 s, and records the time.
    renewed_ms = count_shown(raw.get(b"seen")) or 0
    silent_s = max(0.0, _now_ms(client) - renewed_ms) / 1000 if renewed_ms and owned else 0.0
    return {**known, "name": name, "owned": owned, "silent_s": silent_s}


def _now_ms(client: Client) -> float:
    seconds, microseconds = client.time()
    return seconds * 1000 + microseconds / 1000


def _count(value: bytes) -> int:
    """Parse a number; 0 if it is invalid."""
    return count_shown(value) or 0


def present_parts(records: dict[bytes, bytes]) -> list[dict[str, Any]]:
    """Parse the hash ``parts``, including silent processes; unreadable records are skipped and logged once."""
    return _present(records, "part")


def _present(records: dict[bytes, bytes], what: str) -> list[dict[str, Any]]:
    now = time.time()
    found = readable(records, lambda name, raw: _presence(name, raw, what, now))
    return [one for one in found if one["age_s"] < GONE_S or what in ("trainer", "part")]


def _presence(name: bytes, raw: bytes, what: str, now: float) -> dict[str, Any]:
    who = f"The presence of {what} {safe_repr(name_shown(name))}"
    value = unpack_map(raw, who)
    for field in _TEXTS[what]:
        if not isinstance(value.get(field, ""), str):
            raise ProtocolError(f"{who} has a field {field} that it cannot have: {safe_repr(value[field])}.")
    for field in _NUMBERS[what]:
        # Figures of a trainer may be NaN: a mean of nothing.
        if type(value.get(field, 0)) not in (int, float):
            raise ProtocolError(f"{who} has a field {field} that it cannot have: {safe_repr(value[field])}.")
    if missing := [field for field in _NEEDED.get(what, ()) if field not in value]:
        raise ProtocolError(f"{who} lacks {', '.join(missing)}.")
    value["age_s"] = max(0.0, now - number_in(value, "at", who, 0.0))
    return value
