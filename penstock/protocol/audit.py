"""Recount invariants I1 and I10 from the keys, and compare commits with what Redis holds.

(a) in one instant: admitted = in lanes + delayed + dead + kept + retired + evicted + dropped + cancelled
(b) every group against the container its state names, by one small verb each; safe during a run
(c) every id below the source's position is done or live, by the bitmaps
(d) in one instant, for each home lane: reported tokens = sum of the accounts + tokens of live groups
(e) the tokens that a group accounts for its committed samples against the records of these samples
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from redis.exceptions import ResponseError

from penstock.errors import ProtocolError
from penstock.names import LANES
from penstock.protocol import scripts
from penstock.protocol.scripts import Recount, run
from penstock.protocol.tokens import LaneTokens, lanes_of
from penstock.records.codec import count_of, name_shown
from penstock.records.keys import Keys
from penstock.records.sample import Drawn
from penstock.records.sample_meta import iter_metas
from penstock.redis.call import Loss, loss
from penstock.redis.commands import Client, scan_keys
from penstock.text import safe_repr

#: Index of a job in its dataset, the last part of an id.
_INDEX = re.compile(r"[0-9]{1,18}")
#: Entries of a stream read at once.
CHUNK = 1000


def missing_jobs(
    client: Client, keys: Keys, scan: Callable[[str], Iterator[str]], known: Mapping[str, set[int]], count: int
) -> list[str]:
    """Return the ids of up to ``count`` jobs that are neither done nor live, sorted. Blocks for a scan over the keys.

    A lost job leaves its id in a lane, among the delayed, dead, ready or retiring jobs, or in its metadata. If nothing
    refers to it, it is a gap in an epoch that was admitted completely: a later epoch of its dataset has begun, and
    another epoch has the index. Else the gaps below the highest index name the jobs, if there are as many gaps as
    missing jobs; if prompts are shuffled during an epoch there are more gaps, and the jobs cannot be named.

    Args:
        scan: yields the names of all keys that begin with a prefix.
        known: indices that are done or live, by DATASET/EPOCH.
        count: how many are missing.
    """
    seen = {job for job in _referred(client, keys, scan) if not _is_known(job, known)}
    found = _really(client, keys, sorted(seen, key=order_of))
    for gaps in (_gaps_of_whole_epochs(known), _gaps(known, count)):
        more = _really(client, keys, sorted(gaps - set(found), key=order_of))
        if len(found) + len(more) <= count:
            found += more
    return sorted(found[:count], key=order_of)


def _referred(client: Client, keys: Keys, scan: Callable[[str], Iterator[str]]) -> Iterator[str]:
    """Yield the ids of jobs that something still refers to."""
    for stream in (*(keys.jobs(lane) for lane in LANES), keys.dead):
        after = "-"
        while entries := client.xrange(stream, after, "+", count=CHUNK):
            yield from (name_shown(fields[b"id"]) for _, fields in entries if b"id" in fields)
            after = f"({entries[-1][0].decode()}"
    for members in map(client.zscan_iter, (keys.delayed, keys.ready, keys.unrecorded)):
        yield from (name_shown(job) for job, _ in members)
    yield from (name_shown(job) for job in client.sscan_iter(keys.retiring))
    prefix = keys.meta("")
    yield from (key.removeprefix(prefix) for key in scan(prefix))


def place_of(job: str) -> tuple[str, int] | None:
    """Return (DATASET/EPOCH, index) of a job's id; None if penstock gives no such id."""
    dataset, _, index = job.rpartition("/")
    return (dataset, int(index)) if dataset and _INDEX.fullmatch(index) else None


def _is_known(job: str, known: Mapping[str, set[int]]) -> bool:
    place = place_of(job)
    return place is None or place[1] in known.get(place[0], ())


def _really(client: Client, keys: Keys, jobs: list[str]) -> list[str]:
    """Return the jobs that are neither done nor live now: jobs move during the scan."""
    pipe = client.pipeline(transaction=False)
    for job in jobs:
        dataset, index = order_of(job)
        pipe.exists(keys.group(job))
        pipe.getbit(keys.of(f"done:{dataset}"), index)
    answers = pipe.execute() if jobs else []
    return [job for i, job in enumerate(jobs) if not any(answers[2 * i : 2 * i + 2])]


def _gaps_of_whole_epochs(known: Mapping[str, set[int]]) -> set[str]:
    epochs: dict[str, dict[int, set[int]]] = {}
    for name, indices in known.items():
        dataset, _, epoch = name.rpartition("/")
        if epoch.isdigit():
            epochs.setdefault(dataset, {})[int(epoch)] = indices
    gaps = set()
    for dataset, of in epochs.items():
        every = set().union(*of.values())
        whole = [epoch for epoch in of if epoch < max(of)]
        gaps |= {f"{dataset}/{epoch}/{index}" for epoch in whole for index in every - of[epoch]}
    return gaps


def _gaps(known: Mapping[str, set[int]], count: int) -> set[str]:
    """Return the unknown indices below the highest; none if there are more than ``count``."""
    if sum(max(indices, default=-1) + 1 - len(indices) for indices in known.values()) > count:
        return set()
    return {
        f"{name}/{index}" for name, indices in known.items() for index in set(range(max(indices, default=0))) - indices
    }


def order_of(job: str) -> tuple[str, int]:
    """Return the sort key of a job: (DATASET/EPOCH, index)."""
    return place_of(job) or (job, 0)


#: Differences reported in full.
SHOWN = 20


@dataclass(slots=True)
class AuditReport:
    """Result of an audit; ``ok`` if nothing differs."""

    recount: Recount
    #: The first of them, in words.
    differences: list[str] = field(default_factory=list)
    num_differences: int = 0
    #: Jobs that are neither done nor live, and samples whose payload is gone.
    lost: int = 0
    #: Samples or groups that were counted twice.
    duplicated: int = 0
    groups: int = 0
    #: Ids of the first jobs that are neither done nor live, or in no container, as far as they are known.
    missing: list[str] = field(default_factory=list)
    #: The ledger of tokens by home lane.
    tokens: dict[str, LaneTokens] = field(default_factory=dict)

    def tell(self, what: str, wrong: str, *, first: bool = False) -> None:
        """Add a difference, first or last; '' is none. Differences beyond ``SHOWN`` are only counted."""
        if wrong:
            self.num_differences += 1
            self.differences.insert(0 if first else len(self.differences), f"{what}: {wrong}")
            del self.differences[SHOWN:]

    @property
    def ok(self) -> bool:
        return not self.num_differences and not self.lost and not self.duplicated


def audit(client: Client, keys: Keys, at: Callable[[int, int], None] = lambda _done, _total: None) -> AuditReport:
    """Recount a run; read-only. Blocks for a scan over its groups (about 0.1 ms each).

    Args:
        at: called with the number of groups checked and the number of groups.
    """
    report = AuditReport(run(client, scripts.recount(keys)))
    if found := run(client, loss(keys)).keys:
        report.tell("redis", f"it lost {Loss(found)}")
    live = _check_groups(client, keys, report, at)
    if report.recount.difference:
        many, which = abs(report.recount.difference), "missing" if report.recount.difference > 0 else "too many"
        named = f": {_names(report.missing, many)}" if report.missing else ""
        report.tell(
            "queue",
            f"of {report.recount.admitted} jobs admitted, {many} are {which} in the containers{named}",
            first=True,
        )
    _check_source(client, keys, report, live)
    _check_tokens(client, keys, report)
    counters = client.hgetall(keys.counters)
    finished_twice = count_of(counters.get(b"duplicated"), "The counter duplicated")
    if finished_twice:
        report.duplicated += finished_twice
        report.tell("queue", f"{finished_twice} jobs were finished twice")
    lost = count_of(counters.get(b"payload_lost"), "The counter payload_lost")
    if lost:
        report.lost += lost
        report.tell("payloads", f"{lost} committed samples lost theirs; they were trained with mask 0")
    return report


def scan_groups(client: Client, keys: Keys) -> Iterator[str]:
    """Yield the ids of all jobs that have a group, each at least once, in any order."""
    prefix = keys.group("")
    return (key.removeprefix(prefix) for key in scan_keys(client, prefix))


def _check_groups(
    client: Client, keys: Keys, report: AuditReport, at: Callable[[int, int], None]
) -> dict[str, set[int]]:
    """Recount (b). Return the indices of live jobs by DATASET/EPOCH."""
    live: dict[str, set[int]] = {}
    jobs = sorted(set(scan_groups(client, keys)), key=order_of)
    for job in jobs:
        at(report.groups, len(jobs))
        report.groups += 1
        try:
            wrong = run(client, scripts.check_group(keys, job))
            report.tell(f"group {job}", wrong)
            if wrong and len(report.missing) < min(SHOWN, report.recount.difference):
                report.missing.append(job)
        except ResponseError as exc:
            report.tell(f"group {job}", f"it is not one that a verb wrote: {safe_repr(str(exc), 200)}")
        _check_records(client, keys, report, job)
        if place := place_of(job):
            live.setdefault(place[0], set()).add(place[1])
        else:
            report.tell(f"group {job}", "it has an id that no part gives")
    return live


def _check_records(client: Client, keys: Keys, report: AuditReport, job: str) -> None:
    seen: dict[int, int] = {}
    try:
        records, held = _records_of(client, keys, job)
        for meta in iter_metas(records, f"metadata of group {job}"):
            if meta.k in seen:
                report.duplicated += 1
                report.tell(f"sample {job}/{meta.k}", "was committed twice")
            seen[meta.k] = Drawn.recorded(meta).live
        if (drawn := {k: tokens for k, tokens in seen.items() if tokens}) != held:
            report.tell(
                f"group {job}", f"its samples have {sum(drawn.values())} tokens, its account {sum(held.values())}"
            )
    except (ProtocolError, TypeError, ValueError, ResponseError) as exc:
        report.tell(f"group {job}", f"its records cannot be read, so it is not trained on: {exc}")


def _records_of(client: Client, keys: Keys, job: str) -> tuple[bytes, dict[int, int]]:
    """Return, of one instant, the records of a group's samples, and the tokens that it holds of each, by k."""
    pipe = client.pipeline(transaction=True)
    pipe.get(keys.meta(job))
    pipe.hget(keys.group(job), "tk")
    records, held = pipe.execute()
    words = [word.partition(b":") for word in (held or b"").split(b",") if word]
    return records or b"", {int(k): int(tokens) for k, _, tokens in words}


def _check_tokens(client: Client, keys: Keys, report: AuditReport) -> None:
    """Recount (d)."""
    try:
        fields, held = run(client, scripts.recount_tokens(keys))
    except (ResponseError, ValueError) as exc:
        report.tell("tokens", f"the ledger is not one that verbs wrote: {safe_repr(str(exc), 200)}")
        return
    report.tokens = lanes_of(fields)
    for lane in sorted(report.tokens.keys() | held.keys()):
        ledger, there = report.tokens.get(lane, LaneTokens()), held.get(lane, 0)
        if ledger.held != there:
            report.tell(
                "tokens",
                f"of {ledger.heard} reported in lane {lane}, {ledger.heard - ledger.held} are in accounts, {there} in "
                f"groups: {abs(ledger.held - there)} are {'missing' if ledger.held > there else 'too many'}",
            )
        for account, tokens in ledger.accounts.items():
            if tokens < 0:
                report.tell("tokens", f"account {account} of lane {lane} is below zero: {tokens}")


def _check_source(client: Client, keys: Keys, report: AuditReport, live: dict[str, set[int]]) -> None:
    """Recount (c): admitted jobs = done bits + live groups without one.

    Exact while jobs move: the bitmaps are read after the scan, so a job that was live then and is done now counts
    once; jobs admitted meanwhile may count or not, so the sum lies between the admissions before and after.
    """
    prefix = keys.of("done:")
    found = live.keys() | {key.removeprefix(prefix) for key in scan_keys(client, prefix)}
    counted = 0
    known: dict[str, set[int]] = {}
    for dataset in found:
        bitmap = client.get(prefix + dataset) or b""
        known[dataset] = set(_bits(bitmap)) | live.get(dataset, set())
        counted += len(known[dataset])
    after = run(client, scripts.recount(keys)).admitted
    missing, extra = report.recount.admitted - counted, counted - after
    if missing > 0:
        report.lost += missing
        named = missing_jobs(client, keys, partial(scan_keys, client), known, missing)
        report.tell("source", f"{missing} admitted jobs are neither done nor live: {_names(named[:SHOWN], missing)}")
        report.missing = list(dict.fromkeys([*named, *report.missing]))[:SHOWN]
    if extra > 0:
        report.tell("source", f"{extra} jobs are done or live and were never admitted")


def _names(named: list[str], count: int) -> str:
    """Return the names as text, with the number of jobs that are not named."""
    if not named:
        return "nothing that is left shows which"
    more = count - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _bits(bitmap: bytes) -> Iterator[int]:
    """Yield the positions of the bits that are set, in Redis' order."""
    for place, byte in enumerate(bitmap):
        if byte:
            yield from (8 * place + bit for bit in range(8) if byte >> (7 - bit) & 1)
