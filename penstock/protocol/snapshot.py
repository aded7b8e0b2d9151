"""What a run looks like in one instant: a few round trips, read-only, for status, live view, page and metrics."""

import re
import time
from typing import Any

from penstock.names import LANES
from penstock.protocol.keys import GROUP, Keys
from penstock.protocol.presence import GONE_S, parse_workers
from penstock.protocol.records.small_maps import name_in, name_shown, number_in, unpack_map
from penstock.protocol.waits import read_waits
from penstock.redis.commands import Client
from penstock.redis.refusals import disk_trouble


def snapshot(client: Client, keys: Keys) -> dict[str, Any]:
    """State of a run as plain values, but for its workers (``WorkerPresence``).

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
    pipe.llen(f"rq:queue:{keys.checks}")
    answers = pipe.execute()
    lengths, answers = answers[: len(LANES)], answers[len(LANES) :]
    delayed, dead, ready, inflight, *answers = answers
    counters, clock, subs, workers, trainers, leader, verifiers, parts, paused, checks = answers
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
        "parts": _present(parts, "part"),
        "paused": sorted(map(name_shown, paused)),
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
    found = []
    for field in sorted(subs):
        if not field.startswith(b"sub:"):
            continue
        name = name_in(field[4:], "A subscription")
        raw = client.hgetall(keys.sub(name))
        known = {name_shown(key): _plain(value) for key, value in raw.items() if key != b"owner"}
        found.append({"name": name, **known, "owned": bool(client.exists(keys.owner(name)))})
    return found


def _plain(value: bytes) -> int | str:
    """A number where it is one; what was not written by penstock must not keep the rest from being shown."""
    return int(value) if re.fullmatch(rb"-?\d{1,18}", value) else name_shown(value)


def _count(value: bytes) -> int:
    """A number; 0 where it is none."""
    plain = _plain(value)
    return plain if isinstance(plain, int) else 0


def _present(records: dict[bytes, bytes], what: str) -> list[dict[str, Any]]:
    now = time.time()
    present = []
    for name, raw in sorted(records.items()):
        who = f"The presence of {what} {name_shown(name)}"
        value = unpack_map(raw, who)
        value["age_s"] = max(0.0, now - number_in(value, "at", who, 0.0))
        if value["age_s"] < GONE_S or what in ("trainer", "part"):
            present.append(value)
    return present
