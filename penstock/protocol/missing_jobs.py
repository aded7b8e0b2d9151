"""Name the admitted jobs that are missing: by what still refers to them, else by gaps among the indices.

A lost job leaves its id in a lane, among the delayed, dead, ready or retiring jobs, or in its metadata. If nothing
refers to it, it is a gap in an epoch that was admitted completely: a later epoch of its dataset has begun, and another
epoch has the index. Else the gaps below the highest index name the jobs, if there are as many gaps as missing jobs; if
prompts are shuffled during an epoch there are more gaps, and the jobs cannot be named.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from penstock.names import LANES
from penstock.protocol.keys import Keys
from penstock.protocol.records.small_maps import name_shown
from penstock.redis.commands import Client

#: Index of a job in its dataset, the last part of an id.
_INDEX = re.compile(r"[0-9]{1,18}")
#: Entries of a stream read at once.
CHUNK = 1000


def missing_jobs(
    client: Client, keys: Keys, scan: Callable[[str], Iterator[str]], known: Mapping[str, set[int]], count: int
) -> list[str]:
    """Return the ids of up to ``count`` jobs that are neither done nor live, sorted. Blocks for a scan over the keys.

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
