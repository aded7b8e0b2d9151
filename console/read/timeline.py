"""Everything in a span of time on tracks: workers by slot, the queue, the trainer's steps and publications.

Written as a file for Perfetto (https://ui.perfetto.dev) and chrome://tracing, in the trace event format in JSON: a
process per part, a thread per line with complete events (``X``), and asynchronous pairs (``b``, ``e``) for overlapping
events. Times are whole microseconds since 1970.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from penstock.console.read.export import named_when_complete
from penstock.console.read.stages import MEANING, Sources, Stage, known_tries, stages_of
from penstock.history.reader import HistoryReader
from penstock.history.row import TIMES, WHOLE_JOB, SampleRow
from penstock.records.job import Try

#: Most samples of a span, the latest ones; rows read per page.
MOST_SAMPLES, PAGE = 50_000, 256
#: Rows are ordered by retirement of their groups, which is nearly time order: after this many rows in sequence that
#: ended before the span, stop reading.
SLACK = 4096
#: Stages of a sample at a worker, and idle stages of its group.
_AT_WORK = frozenset(("prefill", "decode", "generate", "reward", "commit"))
_WAITS = {"cut": "waits to be cut", "train": "waits to be trained"}


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval (Unix seconds); slices of one line are disjoint, or nested."""

    name: str
    begin_s: float
    end_s: float
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of slices, in the section of a part."""

    part: str
    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True, slots=True)
class Wait:
    """An interval that overlaps others of its kind: a job in the queue, a lease. (Unix seconds)"""

    part: str
    kind: str
    name: str
    #: Unique among overlapping waits of one kind.
    id: str
    begin_s: float
    end_s: float
    about: dict[str, Any] = field(default_factory=dict)


def latest_s(sources: Sources) -> float:
    """Return the time of the last recorded event (Unix seconds); 0 without any."""
    rows = sources.samples.rows(limit=1).rows
    return max([_span(row)[1] for row in rows] + [step.ended_s for step in sources.steps[-1:]], default=0.0)


def tracks(
    sources: Sources, from_s: float, to_s: float, problems: list[str] | None = None
) -> tuple[list[Line], list[Wait]]:
    """Return all that is known of a span of time (Unix seconds). Blocks for the disk.

    Args:
        problems: gets a sentence about samples that are omitted.
    """
    rows = rows_within(sources, from_s, to_s, problems)
    lines, waits = _of_workers(rows), list(_of_jobs(rows))
    return [*lines, *_of_trainer(sources, from_s, to_s)], waits


def rows_within(sources: Sources, from_s: float, to_s: float, problems: list[str] | None = None) -> list[SampleRow]:
    """Return the samples of a span of time, the latest ``MOST_SAMPLES``; arguments as ``tracks``. Blocks."""
    rows = list(islice(_rows(sources.samples, from_s, to_s), MOST_SAMPLES + 1))
    if len(rows) > MOST_SAMPLES:
        del rows[MOST_SAMPLES:]
        if problems is not None:
            problems.append(
                f"The span has more than {MOST_SAMPLES} samples: the latest {MOST_SAMPLES} are shown; name a shorter "
                "span to see the others."
            )
    return rows


def _rows(samples: HistoryReader, from_s: float, to_s: float) -> Iterator[SampleRow]:
    after, before = "", 0
    while True:
        page = samples.rows(limit=PAGE, after=after)
        for row in page.rows:
            begin, end = _span(row)
            before = before + 1 if end < from_s else 0
            if begin <= to_s and end >= from_s:
                yield row
        after = page.next
        if not after or before > SLACK:
            return


def _span(row: SampleRow) -> tuple[float, float]:
    known = [time for name in TIMES if (time := getattr(row, name)) > 0]
    return min(known, default=0.0), max(known, default=0.0)


def _of_workers(rows: Sequence[SampleRow]) -> list[Line]:
    """Lay out samples on the slots of their workers; a slot is free once its sample is committed."""
    made = [(row, _at_work(row)) for row in rows if row.k != WHOLE_JOB and not row.part and row.worker]
    slots: dict[str, list[list[Slice]]] = {}
    for row, slices in sorted((one for one in made if one[1]), key=lambda one: one[1][0].begin_s):
        of_worker = slots.setdefault(row.worker, [])
        free = next((slot for slot in of_worker if slot[0].end_s <= slices[0].begin_s), None)
        if free is None:
            of_worker.append(free := [slices[0]])
        # The first of a slot is a copy of its last sample, until the line is made.
        free[0] = slices[0]
        free += slices
    return [
        Line(f"worker {worker}", f"slot {number}", slot[1:])
        for worker, found in sorted(slots.items())
        for number, slot in enumerate(found, 1)
    ]


def _at_work(row: SampleRow) -> list[Slice]:
    """Return the slices of a sample at a worker: itself, and its stages within it."""
    stages = stages_of(row, known_tries(row))
    work = [stage for stage in stages if stage.name in _AT_WORK]
    if not work:
        return []
    about = {
        "job": row.job, "tokens": row.num_generated, "versions": f"{row.oldest}..{row.newest}", "reward": row.reward,
        "fate": row.fate or row.reason, "aborts": row.num_aborts, "cached tokens": row.cached_tokens,
    }  # fmt: skip
    whole = Slice(row.id, work[0].begin_s, work[-1].end_s, about)
    inner = [Slice(stage.name, stage.begin_s, stage.end_s, {"is": MEANING[stage.name]}) for stage in work]
    return [whole, *inner, *_paused(stages, work)]


def _paused(stages: Sequence[Stage], work: Sequence[Stage]) -> Iterator[Slice]:
    """Split pauses at the boundaries of the stages of work."""
    for stage in work:
        at = stage.begin_s
        for pause in (one for one in stages if one.name == "paused"):
            begin, end = max(pause.begin_s, at), min(pause.end_s, stage.end_s)
            if begin < end:
                yield Slice("paused", begin, end, {"is": MEANING["paused"]})
                at = end


def _of_jobs(rows: Sequence[SampleRow]) -> Iterator[Wait]:
    for row in {row.job: row for row in rows}.values():
        tries = known_tries(row)
        yield from _queued(row, tries)
        for one in tries:
            if one.ended_s > one.leased_s:
                name, about = f"{row.job}, try {one.number}", {"end": one.end, "lane": one.lane}
                yield Wait(
                    f"worker {one.worker}", "lease", name, f"{row.job}#{one.number}", one.leased_s, one.ended_s, about
                )
        for stage in stages_of(row, tries):
            if stage.name in _WAITS:
                yield Wait("queue", _WAITS[stage.name], row.job, row.job, stage.begin_s, stage.end_s)


def _queued(row: SampleRow, tries: Sequence[Try]) -> Iterator[Wait]:
    """Yield the times in the queue before the first lease, and between two leases."""
    from_s = row.admitted_s
    for number, leased_s in [(one.number, one.leased_s) for one in tries] or [(1, row.leased_s)]:
        if 0 < from_s < leased_s:
            yield Wait("queue", "queued", row.job, f"{row.job}#{number}", from_s, leased_s)
        from_s = next((one.ended_s for one in tries if one.number == number), 0.0)


def _of_trainer(sources: Sources, from_s: float, to_s: float) -> Iterator[Line]:
    steps: list[Slice] = []
    published: list[Slice] = []
    last = 0.0
    for step in sources.steps:
        if step.ended_s < from_s or step.waited_from_s > to_s or step.ended_s <= last:
            continue
        about = {"step": step.step, "batch": step.batch, "version": step.version}
        waited, trained = max(step.waited_from_s, last), max(step.trained_from_s, last)
        publish, last = max(step.published_from_s, last), step.ended_s
        steps += [
            Slice(f"waits for batch {step.batch}", waited, trained, about),
            Slice(f"step {step.step}", trained, publish, about),
        ]
        published.append(Slice(f"publishes after step {step.step}", publish, last, about))
    part = f"trainer {sources.subscription}"
    for name, slices in (("steps", steps), ("publications", published)):
        if found := [one for one in slices if one.begin_s < one.end_s]:
            yield Line(part, name, found)


_MICRO = 1_000_000
Event = dict[str, Any]


def write_perfetto(path: Path, lines: Sequence[Line], waits: Sequence[Wait], about: dict[str, Any]) -> int:
    """Write the file, named when it is complete; return the number of events. Blocks; raises OSError.

    Args:
        about: metadata of the trace, such as the name of the run.
    """
    count = 0
    with named_when_complete(path) as unfinished, unfinished.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + orjson.dumps(about) + b',"traceEvents":[\n')
        for event in events_of(lines, waits):
            file.write((b",\n" if count else b"") + orjson.dumps(event))
            count += 1
        file.write(b"\n]}\n")
    return count


def events_of(lines: Sequence[Line], waits: Sequence[Wait]) -> Iterator[Event]:
    """Yield the events of the format, names of processes and threads first."""
    parts = sorted({line.part for line in lines} | {wait.part for wait in waits}, key=_rank)
    pids = {part: number for number, part in enumerate(parts, 1)}
    for part, pid in pids.items():
        yield _meta("process_name", pid, 0, {"name": part})
        yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
    tids: dict[str, int] = {}
    for line in lines:
        pid, tid = pids[line.part], tids.get(line.part, 0) + 1
        tids[line.part] = tid
        yield _meta("thread_name", pid, tid, {"name": line.name})
        yield _meta("thread_sort_index", pid, tid, {"sort_index": tid})
        for one in line.slices:
            begin, end = _micro(one.begin_s), _micro(one.end_s)
            yield {
                "ph": "X", "name": one.name, "cat": line.name, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin,
                "args": one.about,
            }  # fmt: skip
    for wait in waits:
        yield from _pair(wait, pids[wait.part])


def _pair(wait: Wait, pid: int) -> Iterator[Event]:
    shared = {"cat": wait.kind, "name": wait.name, "id": wait.id, "pid": pid, "tid": 0}
    yield {"ph": "b", **shared, "ts": _micro(wait.begin_s), "args": wait.about}
    yield {"ph": "e", **shared, "ts": _micro(wait.end_s)}


def _rank(part: str) -> tuple[int, str]:
    """Order parts: the queue, workers, trainers."""
    return ("queue", "worker", "trainer").index(part.partition(" ")[0]), part


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _micro(seconds: float) -> int:
    return round(seconds * _MICRO)
