"""Invariant I1 recounted from the keys in three ways, and what was committed against what is there.

(a) one instant: admitted = in lanes + delayed + dead + ready + retired + evicted + dropped + cancelled
(b) every group against the container its state names, by a small verb each; safe while the run goes on
(c) every id below the source's position is done or live, by the bitmaps
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock import scripts
from penstock.control import Client
from penstock.keys import Keys
from penstock.messages import iter_maps
from penstock.scripts import Recount, run

#: Differences told in full.
SHOWN = 20


@dataclass(slots=True)
class AuditReport:
    """What an audit found; ``ok`` when nothing differs."""

    recount: Recount
    differences: list[str] = field(default_factory=list)
    #: Jobs that are neither done nor live, and samples whose payload is gone.
    lost: int = 0
    #: Samples or groups that were counted twice.
    duplicated: int = 0
    groups: int = 0

    @property
    def ok(self) -> bool:
        return not self.differences and not self.lost and not self.duplicated


def audit(client: Client, keys: Keys) -> AuditReport:
    """Recount a run; read-only. Blocks for a scan over its groups (about 0.1 ms each)."""
    report = AuditReport(run(client, scripts.recount(keys)))
    if report.recount.difference:
        report.differences.append(
            f"{report.recount.admitted} jobs were admitted, but {abs(report.recount.difference)} "
            f"{'are missing from' if report.recount.difference > 0 else 'too many are in'} the containers."
        )
    live = _check_groups(client, keys, report)
    _check_source(client, keys, report, live)
    counters = client.hgetall(keys.counters)
    report.duplicated += int(counters.get(b"duplicated", 0))
    lost = int(counters.get(b"payload_lost", 0))
    if lost:
        report.lost += lost
        report.differences.append(f"{lost} committed samples lost their payload; they were trained with mask 0.")
    return report


def scan_groups(client: Client, keys: Keys) -> Iterator[str]:
    """Ids of all jobs that have a group, each at least once, in no order."""
    prefix = keys.group("")
    pattern = prefix.replace("{", r"\{").replace("}", r"\}") + "*"
    for key in client.scan_iter(match=pattern, count=1000):
        yield key.decode().removeprefix(prefix)


def _check_groups(client: Client, keys: Keys, report: AuditReport) -> dict[str, set[int]]:
    live: dict[str, set[int]] = {}
    for job in set(scan_groups(client, keys)):
        report.groups += 1
        wrong = run(client, scripts.check_group(keys, job))
        if wrong and len(report.differences) < SHOWN:
            report.differences.append(f"group {job}: {wrong}")
        seen: set[int] = set()
        for record in iter_maps(client.get(keys.meta(job)) or b"", f"metadata of group {job}"):
            if record["k"] in seen:
                report.duplicated += 1
                report.differences.append(f"sample {job}/{record['k']} was committed twice")
            seen.add(record["k"])
        dataset, index = job.rsplit("/", 1)
        live.setdefault(dataset, set()).add(int(index))
    return live


def _check_source(client: Client, keys: Keys, report: AuditReport, live: dict[str, set[int]]) -> None:
    """Recount (c): admitted jobs = done bits + live groups without one."""
    prefix = keys.of("done:")
    done: dict[str, int] = {}
    pattern = prefix.replace("{", r"\{").replace("}", r"\}") + "*"
    for key in client.scan_iter(match=pattern, count=1000):
        done[key.decode().removeprefix(prefix)] = int(client.bitcount(key))
    finished = sum(done.values())
    unfinished = 0
    for dataset, indices in live.items():
        pipe = client.pipeline(transaction=False)
        for index in indices:
            pipe.getbit(prefix + dataset, index)
        unfinished += sum(1 for bit in pipe.execute() if not bit)
    admitted = run(client, scripts.recount(keys)).admitted
    # Jobs move while we look: only what is missing for good counts, so look again at a difference.
    missing = report.recount.admitted - finished - unfinished
    if missing > 0 and admitted == report.recount.admitted:
        report.lost += missing
        report.differences.append(f"{missing} admitted jobs are neither done nor live.")
