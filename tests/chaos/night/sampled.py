"""The history of a run in one small file: the faults, and what all processes recorded, in the order of time.

A file is JSON lines, packed by xz. The first line says what is kept: of how many records, and which share of the jobs.
Lines behind it are the nemesis's and the histories' own, with the file that each stood in and without the wall clock;
lists of jobs hold the kept ones alone. What is kept of a job is all of it, and what is of no job is kept in any case.
An end stands behind its call.
"""

import lzma
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

Record = dict[str, Any]
Keeps = Callable[[str], bool]

#: Most bytes of a packed history; of one in which something was found.
KEPT_BYTES, FOUND_BYTES = 20 * 1024, 200 * 1024
#: Smallest share of the jobs that is tried: one in so many.
FEWEST = 4096
#: Calls that say nothing without a job.
OF_JOBS = frozenset(("admit", "lease", "dispose"))


def sampled(folder: Path, *, most: int = KEPT_BYTES) -> bytes:
    """The history of the run in ``folder``, of as many jobs as go into ``most`` bytes; the faults alone if none do."""
    faults, records = list(_lines(folder / "nemesis.jsonl")), merged(folder / "history")
    one_in = 1
    while one_in <= FEWEST:
        kept = list(of_jobs(records, partial(_is_one_in, one_in)))
        packed = _pack(faults, kept, {"records": len(records), "kept": len(kept), "jobs": f"1 in {one_in}"})
        if len(packed) <= most:
            return packed
        one_in *= 2 if len(packed) < 4 * most else 4
    return _pack(faults, [], {"records": len(records), "kept": 0, "jobs": "none"})


def _pack(faults: list[Record], records: list[Record], head: Record) -> bytes:
    lines = b"".join(orjson.dumps(one) + b"\n" for one in [head, *faults, *records])
    return lzma.compress(lines, preset=6)


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
    lists = (key for key in ("jobs", "rows") if isinstance(facts.get(key), list))
    return facts | {key: [one for one in facts[key] if keeps(_job_of(one))] for key in lists}


def _job_of(one: Any) -> str:
    return str(one[0] if isinstance(one, list) else one)


def _is_one_in(many: int, job: str) -> bool:
    return int.from_bytes(blake2b(job.encode(), digest_size=4).digest()) % many == 0
