"""Lanes and their next jobs, in the order in which an engine would get them; and the ledger of tokens (I10)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.console.read.jobs import show_record
from penstock.names import LANES, Lane
from penstock.protocol.presence import live_workers
from penstock.protocol.snapshot import snapshot
from penstock.protocol.tokens import TRAINED, ledgers_of
from penstock.records.codec import name_shown, value_shown
from penstock.records.job import JobState
from penstock.records.keys import Keys
from penstock.redis.commands import Client, Entry

#: Position in the queue: the numbers of an entry's id, padded with zeros.
_PLACE = re.compile(rb"0{0,19}([0-9]{1,20})-0{0,19}([0-9]{1,20})")


def list_lanes(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return a row per lane. Blocks for a few round trips.

    ``ready``: groups that a batch may still take; ``oldest_s``: how long its next job has been queued, or None.
    """
    return lane_rows(snapshot(client, keys))


def lane_rows(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of ``list_lanes`` from a snapshot."""
    return [
        {
            "lane": lane,
            **counts,
            "ready": state["ready_lanes"][lane],
            "paused": lane in state["paused"],
            "oldest_s": state["oldest_s"][lane],
        }
        for lane, counts in state["lanes"].items()
    ]


def ready_line(state: Mapping[str, Any]) -> str:
    """Return how many groups are ready in lane train and in others, and how many are kept, of a snapshot.

    A group is ready while a batch may take it, and kept until a checkpoint is past it.
    """
    others = {lane: count for lane, count in state.get("ready_lanes", {}).items() if lane != Lane.TRAIN and count}
    words = "".join(f", of lane {lane} {count}" for lane, count in others.items())
    kept = f", kept {state['kept']}" if "kept" in state else ""
    return f"groups ready {state['ready']}{words}{kept}"


def upcoming(
    client: Client, keys: Keys, lanes: Sequence[Lane] = LANES, *, most: int, version: int | None = None
) -> list[dict[str, Any]]:
    """Return the next jobs that an engine would get, lane by lane; changes nothing. Blocks for a few round trips.

    Args:
        most: jobs of each lane.
        version: of that engine's weights, to return only jobs that it may start; None: the newest version of any
            worker, with ``blocked_by`` set on jobs that it may not start.
    """
    newest = max((one.version for one in live_workers(client, keys)), default=None)
    limit = "+inf" if version is None else version
    paused = set(_paused(client, keys))
    rows = []
    for lane in lanes:
        for place, row in enumerate(_line(client, keys, lane, most, limit), 1):
            why = "the lane is paused" if lane in paused else _blocked_by(row["min_version"], version, newest)
            rows.append({"lane": lane.value, "place": place, **row, "blocked_by": why})
    return rows


def _paused(client: Client, keys: Keys) -> Iterator[str]:
    pipe = client.pipeline(transaction=False)
    pipe.smembers(keys.paused)
    return map(name_shown, pipe.execute()[0])


def _blocked_by(min_version: Any, version: int | None, newest: int | None) -> str:
    if newest is None:
        return "there is no worker"
    has = newest if version is None else version
    if isinstance(min_version, int) and min_version > has:
        return f"no engine has version {min_version} yet"
    return ""


def _line(client: Client, keys: Keys, lane: Lane, most: int, limit: int | str) -> Iterator[dict[str, Any]]:
    """Yield the first jobs of a lane that are still queued; skip entries of cancelled jobs."""
    start = 0
    while most > 0 and (places := client.zrangebyscore(keys.queued(lane), "-inf", limit, start, most)):
        start += len(places)
        entries = _entries(client, keys, lane, places)
        groups = _groups(client, keys, entries)
        for entry, group in zip(entries, groups, strict=True):
            if group[:2] == [JobState.QUEUED.encode(), entry[0]]:
                most -= 1
                yield _row(entry, group)


def _entries(client: Client, keys: Keys, lane: Lane, places: Sequence[bytes]) -> list[Entry]:
    pipe = client.pipeline(transaction=False)
    for place in places:
        if found := _PLACE.fullmatch(place):
            entry = b"-".join(found.groups())
            pipe.xrange(keys.jobs(lane), entry, entry)
    return [entries[0] for entries in pipe.execute() if entries]


def _groups(client: Client, keys: Keys, entries: Sequence[Entry]) -> list[list[bytes | None]]:
    pipe = client.pipeline(transaction=False)
    for _, fields in entries:
        pipe.hmget(keys.group(name_shown(fields.get(b"id", b""))), "st", "eid", "nb", "att", "cr", "c")
    return pipe.execute()


def _row(entry: Entry, group: Sequence[bytes | None]) -> dict[str, Any]:
    job = name_shown(entry[1].get(b"id", b""))
    counts = [value_shown(value or b"0") for value in group[2:]]
    record = show_record(entry[1].get(b"body", b""), job)
    known = record if isinstance(record, dict) else {"n": None, "prompt": record}
    return {
        "job": job,
        **dict(zip(("min_version", "attempts", "crashes", "committed"), counts, strict=True)),
        "n": known["n"],
        "prompt": known["prompt"] if known["prompt"] is not None else known["prompt_ids"],
    }


#: Pseudo-account of tokens in live groups, whose outcome is open.
UNDECIDED = "undecided"


def list_tokens(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per account of a snapshot's ledger, by lane, largest first.

    Including ``undecided`` they add up to all reported tokens. ``share``: of these, from 0 to 1.
    """
    rows = []
    for lane, ledger in ledgers_of(state).items():
        accounts = {**ledger.accounts, UNDECIDED: ledger.held}
        for account, tokens in sorted(accounts.items(), key=lambda one: (-one[1], one[0])):
            share = tokens / ledger.heard if ledger.heard else 0.0
            rows.append({"lane": lane, "account": account, "tokens": tokens, "share": round(share, 4)})
    return [row for row in rows if row["tokens"]]


def goodput_line(state: Mapping[str, Any]) -> str:
    """Return the share of the tokens generated for training that was trained on, and the rest by account; or ''."""
    ledger = ledgers_of(state).get(Lane.TRAIN)
    if ledger is None or ledger.goodput is None:
        return ""
    rest = [
        f"{row['account']} {row['share']:.1%}"
        for row in list_tokens(state)
        if row["lane"] == Lane.TRAIN and row["account"] != TRAINED
    ]
    words = f"; {', '.join(rest)}" if rest else ""
    said = f"goodput {ledger.goodput:.1%}: {ledger.trained} of {ledger.heard} tokens were trained on{words}"
    if ledger.unheard:
        said += f"; tokens of {ledger.unheard} lost requests are unknown"
    return said
