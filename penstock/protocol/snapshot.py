"""What a run looks like in one instant: a few round trips, read-only, for status, live view, page and metrics."""

import time
from dataclasses import asdict
from typing import Any

from penstock.config.subscription import Definition
from penstock.errors import ProtocolError
from penstock.names import LANES, Lane
from penstock.protocol.keys import GROUP, Keys
from penstock.protocol.pauses import parse_pauses
from penstock.protocol.position import Position
from penstock.protocol.presence import GONE_S, parse_workers
from penstock.protocol.records.readable import readable
from penstock.protocol.records.small_maps import count_shown, name_in, name_shown, number_in, unpack_map
from penstock.protocol.waits import read_waits
from penstock.redis.commands import Client
from penstock.redis.refusals import disk_trouble
from penstock.words import shown

#: Jobs named of those that engines died of.
SUSPECTS = 3
#: Fields that others reckon with or look for, by who shows them; a trainer shows what else it likes.
_TEXTS = {"trainer": ("name",), "verifier": ("name", "host", "state"), "part": ("part", "host", "name", "metrics")}
_NUMBERS = {
    "trainer": ("rank", "pid", "step", "version", "reward_mean", "staleness_mean", "staleness_max", "wait_share"),
    "verifier": ("pid", "checks", "killed"),
    "part": ("pid",),
}
_NEEDED = {"part": ("part", "host", "pid")}


def snapshot(client: Client, keys: Keys) -> dict[str, Any]:
    """State of a run as plain values, but for its workers (``WorkerPresence``).

    An entry that somebody else wrote is logged and left out, or read as 0 where a count should be: who looks goes on.
    Blocks for a few round trips; raises redis' errors.
    """
    pipe = client.pipeline(transaction=False)
    for lane in LANES:
        pipe.xlen(keys.jobs(lane))
    pipe.zcard(keys.delayed)
    pipe.xlen(keys.dead)
    pipe.zcard(keys.ready)
    pipe.zcard(keys.inflight)
    hashes = (
        keys.counters,
        keys.clock,
        keys.subs,
        keys.workers,
        keys.trainers,
        keys.leader,
        keys.verifiers,
        keys.parts,
    )
    for name in hashes:
        pipe.hgetall(name)
    pipe.smembers(keys.paused)
    pipe.hgetall(keys.paused_by)
    pipe.llen(f"rq:queue:{keys.checks}")
    pipe.xrange(keys.jobs(Lane.SUSPECT), count=SUSPECTS)
    answers = pipe.execute()
    lengths, answers = answers[: len(LANES)], answers[len(LANES) :]
    delayed, dead, ready, inflight, *answers = answers
    counters, clock, subs, workers, trainers, leader, verifiers, parts, paused, paused_by, checks, suspects = answers
    versions = {name_shown(k[8:]): _count(v) for k, v in clock.items() if k.startswith(b"version:")}
    definitions = _subs(client, keys, subs)
    driving = next((sub for sub in definitions if sub.get("driving")), {})
    return {
        "run": keys.run,
        "mode": driving.get("mode", ""),
        "bound": driving.get("bound", 0),
        "version": max(versions.values(), default=0),
        "versions": versions,
        "step": _count(clock.get(b"step", b"0")),
        "lanes": _lanes(client, keys, lengths),
        "delayed": delayed,
        "dead": dead,
        "ready": ready,
        "inflight": inflight,
        "counters": {name_shown(name): _count(value) for name, value in sorted(counters.items())},
        "workers": [worker for worker in parse_workers(workers) if worker.age_s < GONE_S],
        "trainers": _present(trainers, "trainer"),
        "verifiers": _present(verifiers, "verifier"),
        "parts": present_parts(parts),
        "paused": sorted(map(name_shown, paused)),
        "pauses": [asdict(one) for one in parse_pauses(paused, paused_by, time.time())],
        "suspects": [name_shown(fields.get(b"id", b"")) for _, fields in suspects],
        "checks": checks,
        "leader": {"epoch": _count(leader.get(b"epoch", b"0"))} if leader else None,
        "waits": [
            *_storage(client),
            *(
                {"who": wait.who, "what": wait.what, "since_s": max(0.0, time.time() - wait.since_s)}
                for wait in read_waits(client, keys)
            ),
        ],
        "subs": definitions,
    }


def _storage(client: Client) -> list[dict[str, Any]]:
    """Where Redis takes no writes nothing can be written of what they wait for: all wait for the same."""
    trouble = disk_trouble(client)
    return [{"who": "redis", "what": f"{trouble}; no part can write before", "since_s": 0.0}] if trouble else []


def _lanes(client: Client, keys: Keys, lengths: list[int]) -> dict[str, dict[str, int]]:
    lanes = {}
    for lane, length in zip(LANES, lengths, strict=True):
        # Lag is unknown once an undelivered entry was deleted: the backlog is what is not pending.
        leased = int(client.xpending(keys.jobs(lane), GROUP)["pending"]) if length else 0
        lanes[lane.value] = {"queued": length - leased, "leased": leased}
    return lanes


def _subs(client: Client, keys: Keys, subs: dict[bytes, bytes]) -> list[dict[str, Any]]:
    names = {field: value for field, value in subs.items() if field.startswith(b"sub:")}
    return readable(names, lambda field, _: _sub(client, keys, name_in(field[4:], "A subscription")))


def _sub(client: Client, keys: Keys, name: str) -> dict[str, Any]:
    """Its fields; where they are not what penstock writes, ``unreadable`` says why in their place."""
    raw = client.hgetall(keys.sub(name))
    owned = bool(client.exists(keys.owner(name)))
    try:
        Definition.read(raw, name), Position.read(raw, name)
    except ProtocolError as exc:
        return {"name": name, "unreadable": str(exc), "owned": owned}
    known = {name_shown(key): _plain(value) for key, value in raw.items() if key != b"owner"}
    return {**known, "name": name, "owned": owned}


def _plain(value: bytes) -> int | str:
    """A number where it is one; what was not written by penstock must not keep the rest from being shown."""
    count = count_shown(value)
    return name_shown(value) if count is None else count


def _count(value: bytes) -> int:
    """A number; 0 where it is none."""
    return count_shown(value) or 0


def present_parts(records: dict[bytes, bytes]) -> list[dict[str, Any]]:
    """Records of the hash ``parts``, silent ones too; one that cannot be read is left out, and logged once."""
    return _present(records, "part")


def _present(records: dict[bytes, bytes], what: str) -> list[dict[str, Any]]:
    now = time.time()
    found = readable(records, lambda name, raw: _presence(name, raw, what, now))
    return [one for one in found if one["age_s"] < GONE_S or what in ("trainer", "part")]


def _presence(name: bytes, raw: bytes, what: str, now: float) -> dict[str, Any]:
    who = f"The presence of {what} {shown(name_shown(name))}"
    value = unpack_map(raw, who)
    for field in _TEXTS[what]:
        if not isinstance(value.get(field, ""), str):
            raise ProtocolError(f"{who} has a field {field} that it cannot have: {shown(value[field])}.")
    for field in _NUMBERS[what]:
        # Figures of a trainer may be no number: a mean of nothing.
        if type(value.get(field, 0)) not in (int, float):
            raise ProtocolError(f"{who} has a field {field} that it cannot have: {shown(value[field])}.")
    if missing := [field for field in _NEEDED.get(what, ()) if field not in value]:
        raise ProtocolError(f"{who} lacks {', '.join(missing)}.")
    value["age_s"] = max(0.0, now - number_in(value, "at", who, 0.0))
    return value
