"""Write a span of time as a file for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

Uses the trace event format in JSON: a process per part, a thread per line with complete events (``X``), and
asynchronous pairs (``b``, ``e``) for overlapping events. Times are whole microseconds since 1970.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from penstock.console.read.trace.tracks import Line, Wait

_MICRO = 1_000_000
Event = dict[str, Any]


def write_perfetto(path: Path, lines: Sequence[Line], waits: Sequence[Wait], about: dict[str, Any]) -> int:
    """Write the file, named when it is complete; return the number of events. Blocks; raises OSError.

    Args:
        about: metadata of the trace, such as the name of the run.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    count = 0
    try:
        with unfinished.open("xb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + orjson.dumps(about) + b',"traceEvents":[\n')
            for event in events_of(lines, waits):
                file.write((b",\n" if count else b"") + orjson.dumps(event))
                count += 1
            file.write(b"\n]}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
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
