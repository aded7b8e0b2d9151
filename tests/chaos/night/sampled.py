"""The history of a run in one small file: the faults, and what all processes recorded, in the order of time.

A file is JSON lines, packed by xz. The first line says what is kept: of how many records, which share of the jobs, and
where only the first part of the run is kept, which.
Lines behind it are the nemesis's and the histories' own, with the file that each stood in and without the wall clock;
lists of jobs hold the kept ones alone. What is kept of a job is all of it, and what is of no job is kept in any case.
An end stands behind its call.
"""

import lzma
import math
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

Record = dict[str, Any]
Keeps = Callable[[str], bool]

#: Most bytes of a packed history; of one in which something was found.
KEPT_BYTES, FOUND_BYTES = 40 * 1024, 200 * 1024
#: Smallest share of the jobs that is tried: one in so many.
FEWEST = 4096
#: Presets of xz.
QUICKLY, WELL = 1, 6
#: Calls that say nothing without a job.
OF_JOBS = frozenset(("admit", "lease", "dispose"))


def sampled(folder: Path, *, most: int = KEPT_BYTES) -> bytes:
    """The history of the run in ``folder``, of as many jobs as go into ``most`` bytes.

    Where what is of no job is more than that alone, its first part, of all jobs.
    """
    faults, records = list(_lines(folder / "nemesis.jsonl")), merged(folder / "history")

    def of_share(one_in: int) -> tuple[Record, list[Record]]:
        return {"jobs": f"1 in {one_in}"}, list(of_jobs(records, partial(_is_one_in, one_in)))

    def of_time(one_in: int) -> tuple[Record, list[Record]]:
        return {"jobs": "1 in 1", "first": f"1 in {one_in}"}, records[: len(records) // one_in]

    for part in (of_share, of_time):
        if packed := _largest(part, faults, len(records), most):
            return packed
    return _pack(faults, [], {"records": len(records), "kept": 0, "jobs": "none"})


def _largest(part: Callable[[int], tuple[Record, list[Record]]], faults: list[Record], whole: int, most: int) -> bytes:
    """The largest part, one in so many, that goes into ``most`` bytes; none where not even the smallest does."""
    one_in = 1
    while one_in <= FEWEST:
        of_it, kept = part(one_in)
        head = {"records": whole, "kept": len(kept)} | of_it
        # To pack well takes ten times as long, and is not much smaller.
        if (size := len(_pack(faults, kept, head, QUICKLY))) <= most:
            return _pack(faults, kept, head)
        one_in *= max(2, 1 << int(math.log2(size / most)))
    return b""


def _pack(faults: list[Record], records: list[Record], head: Record, preset: int = WELL) -> bytes:
    lines = b"".join(orjson.dumps(one) + b"\n" for one in [head, *faults, *records])
    return lzma.compress(lines, preset=preset)


def merged(folder: Path) -> list[Record]:
    """All records of a folder of histories with the file of each, in the order of time."""
    found = [one | {"file": path.stem} for path in sorted(folder.glob("*.jsonl")) for one in _lines(path)]
    timed = sorted((one for one in found if "mono" in one), key=lambda one: one["mono"])
    return [{key: value for key, value in one.items() if key != "wall"} for one in timed]


def _lines(path: Path) -> Iterator[Record]:
    """A torn last line is what a kill leaves."""
    *lines, _torn = path.read_bytes().split(b"\n") if path.exists() else [b""]
    return map(orjson.loads, lines)


def of_jobs(records: list[Record], keeps: Keeps) -> Iterator[Record]:
    """Records of the kept jobs, and of none."""
    ends = {(one["file"], one["of"]): one for one in records if "of" in one}
    for call in records:
        if "op" not in call or (facts := trimmed(call["facts"], keeps)) is None:
            continue
        end = ends.get((call["file"], call["seq"]))
        answer = trimmed(end["facts"], keeps) if end else {}
        # Who asked for jobs, and none of those that are kept.
        if call["op"] in OF_JOBS and not any(of.get("jobs") for of in (facts, answer or {})):
            continue
        yield call | {"facts": facts}
        if end:
            yield end | {"facts": answer or {}}


def trimmed(facts: Record, keeps: Keeps) -> Record | None:
    """Facts with the kept jobs alone; None where they are of another one."""
    if "job" in facts and not keeps(facts["job"]):
        return None
    if "sample" in facts and not keeps(facts["sample"].rpartition("/")[0]):
        return None
    lists = (key for key in ("jobs", "rows", "scored") if isinstance(facts.get(key), list))
    return facts | {key: [one for one in facts[key] if keeps(_job_of(one))] for key in lists}


def _job_of(one: Any) -> str:
    return str(one[0] if isinstance(one, list) else one)


def _is_one_in(many: int, job: str) -> bool:
    return int.from_bytes(blake2b(job.encode(), digest_size=4).digest()) % many == 0
