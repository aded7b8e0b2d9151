"""Jobs: all of a run as rows, and one of them in detail."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from penstock.errors import ProtocolError
from penstock.protocol import burials
from penstock.protocol.audit import scan_groups
from penstock.records.codec import count_shown, name_shown, value_shown
from penstock.records.disposal import Disposal
from penstock.records.job import Job, JobState
from penstock.records.keys import Keys
from penstock.records.sample_meta import iter_metas
from penstock.redis.commands import Client, Entry

#: Letters read per round trip.
DEAD_CHUNK = 1000


def list_dead(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return every dead-lettered job with its lengths, oldest first. Blocks for two round trips per ``CHUNK``."""
    rows: list[dict[str, Any]] = []
    begin = "-"
    while entries := client.xrange(keys.dead, begin, "+", DEAD_CHUNK):
        found = burials.lengths(client, keys, [fields for _, fields in entries])
        rows += [_letter(entry) | one for entry, one in zip(entries, found, strict=True)]
        begin = f"({name_shown(entries[-1][0])}"
    return rows


def read_dead(client: Client, keys: Keys, job: str) -> dict[str, Any] | None:
    """Return a dead-lettered job with its record and its traceback; None if it is not dead. Blocks for round trips."""
    state, entry = client.hmget(keys.group(job), "st", "eid")
    # If the job is not dead this is the entry of another stream, whose id may be that of another job's letter.
    found = client.xrange(keys.dead, entry, entry) if state == b"dead" and entry else []
    return _letter(found[0]) | {"record": show_record(found[0][1].get(b"body", b""), job)} if found else None


def _letter(entry: Entry) -> dict[str, Any]:
    """Return a dead letter; missing fields are '' or None, so that incomplete letters are listed too."""
    texts = {name: name_shown(entry[1].get(name.encode(), b"")) for name in ("id", "reason", "worker", "detail")}
    return {
        "job": texts["id"],
        "reason": texts["reason"],
        **{name: count_shown(entry[1].get(name.encode())) for name in ("attempts", "crashes")},
        "worker": texts["worker"],
        "buried_ms": int(entry[0].split(b"-")[0]),
        "detail": texts["detail"],
    }


#: Field of the hash ``group:JOB`` -> field of a row.
_NAMES = {
    "st": "state",
    "ln": "home_lane",
    "cl": "lane",
    "c": "committed",
    "n": "n",
    "nb": "min_version",
    "v0": "version",
    "att": "attempts",
    "cr": "crashes",
    "own": "worker",
    "seq": "seq",
}
_TEXTS = frozenset(("state", "home_lane", "lane", "worker"))
#: Counters, absent while 0.
_COUNTS = frozenset(("committed", "attempts", "crashes"))
#: Groups read per round trip.
CHUNK = 500
_REASONS = {one.code: one.value for one in Disposal}


def list_jobs(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return every job that has a group, in SCAN order. Blocks for about 20 us a job."""
    found = list(dict.fromkeys(scan_groups(client, keys)))
    chunks = (found[start : start + CHUNK] for start in range(0, len(found), CHUNK))
    return list(chain.from_iterable(_read(client, keys, chunk) for chunk in chunks))


def _read(client: Client, keys: Keys, jobs: Sequence[str]) -> Iterator[dict[str, Any]]:
    pipe = client.pipeline(transaction=False)
    for job in jobs:
        pipe.hmget(keys.group(job), list(_NAMES))
    for job, values in zip(jobs, pipe.execute(raise_on_error=False), strict=True):
        if isinstance(values, list) and values[0] is not None:
            yield _row(job, values)


def _row(job: str, values: Iterable[bytes | None]) -> dict[str, Any]:
    named = zip(_NAMES.values(), values, strict=True)
    return {"job": job, **{name: _value(name, value) for name, value in named}}


def _value(name: str, raw: bytes | None) -> Any:
    value = raw if raw is not None else b"0" if name in _COUNTS else b""
    return name_shown(value) if name in _TEXTS else _set(value)


def _set(raw: bytes) -> int | str | None:
    """Decode a value; None if it is empty."""
    return value_shown(raw) if raw else None


def read_job(client: Client, keys: Keys, job: str) -> dict[str, Any] | None:
    """Return all that Redis has of a job; None if it has no group. Blocks for a few round trips.

    Returns:
        the fields of its row; ``record``: what was admitted, or a sentence if it cannot be read, or is gone;
        ``samples``: what was committed of each; ``subscriptions``: its state there, by name or pool.
    """
    raw = client.hgetall(keys.group(job))
    if not raw:
        return None
    row = _row(job, [raw.get(field.encode()) for field in _NAMES])
    return {
        **row,
        "first_lease_ms": _set(raw.get(b"t0", b"")),
        "retired_as": name_shown(raw.get(b"r", b"")),
        "record": _record(client, keys, job, raw),
        "samples": _samples(client, keys, job),
        "subscriptions": _uses(raw),
    }


def _record(client: Client, keys: Keys, job: str, raw: Mapping[bytes, bytes]) -> dict[str, Any] | str:
    body = _body(client, keys, job, raw)
    if body is None:
        return "its record went when it was finished"
    return show_record(body, job)


def show_record(body: bytes, job: str) -> dict[str, Any] | str:
    """Return the fields of the job record; or a sentence that says why it cannot be read."""
    try:
        return asdict(Job.from_bytes(body, f"record of job {job}"))
    except ProtocolError as exc:
        return str(exc)


def _body(client: Client, keys: Keys, job: str, raw: Mapping[bytes, bytes]) -> bytes | None:
    state, entry = raw.get(b"st", b"").decode(errors="replace"), raw.get(b"eid", b"")
    if state == JobState.DELAYED:
        return client.hget(keys.bodies, job)
    streams = {JobState.DEAD.value: keys.dead} | dict.fromkeys(
        (JobState.QUEUED.value, JobState.LEASED.value), keys.jobs(name_shown(raw.get(b"cl", b"")))
    )
    if state not in streams or not re.fullmatch(rb"[0-9]{1,20}-[0-9]{1,20}", entry):
        return None
    found = client.xrange(streams[state], entry, entry)
    return found[0][1].get(b"body", b"") if found else None


def _samples(client: Client, keys: Keys, job: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        for meta in iter_metas(client.get(keys.meta(job)) or b"", f"metadata of job {job}"):
            rows.append(asdict(meta))
    except ProtocolError as exc:
        rows.append({"unreadable": str(exc)})
    return sorted(rows, key=lambda row: row.get("k", -1))


def _uses(raw: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Return by subscription, or ``share:POOL``: number of uses, or the reason of its disposal; the last batch."""
    found: dict[str, dict[str, Any]] = {}
    for field, value in raw.items():
        kind, _, name = name_shown(field).partition(":")
        count = _set(value)
        if kind == "u":
            given_up = reason_of(count)
            found.setdefault(name, {}).update(uses=0 if given_up else count, given_up=given_up)
        elif kind == "b":
            found.setdefault(name, {})["batch"] = count
    return found


def reason_of(uses: Any) -> str:
    """Return why a group was disposed of, by its field ``u:ACCOUNT``; '' if that counts uses."""
    return _REASONS.get(uses, "for a reason that is not known") if isinstance(uses, int) and uses < 0 else ""
