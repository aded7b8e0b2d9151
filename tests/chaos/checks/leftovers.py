"""What a run leaves behind: leases of the dead, keys of what is gone, memory that grows with the work done."""

from collections.abc import Iterator

import numpy as np

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation

#: Keys of the run itself; those with a part behind a colon are told by their first word.
OF_THE_RUN = {
    "schema", "jobs", "queued", "delayed", "bodies", "dead", "ready", "inflight", "unfinished", "cohorts", "samples",
    "servers", "subs", "clock", "source", "leader", "epoch", "weights", "contact", "trials", "aside", "retiring",
    "done", "fleet", "ends", "workers", "trainers", "parts", "waits", "counters", "wake", "gate", "transfer",
    "transfers", "memory", "pins", "loading", "verifiers", "paused", "reclaimer", "steps", "checks", "held", "asker",
    "verdicts", "unrecorded", "recorder", "history", "paused_by", "looks", "tokens", "rates", "whole",
}  # fmt: skip
OF_A_SUBSCRIPTION = frozenset(("batches", "columns", "columns_lost", "agree", "sub", "owner", "trained"))
OF_A_JOB = frozenset(("group", "meta", "partial", "payload", "side"))
MUST_EXPIRE = frozenset(("column", "orders", "offer"))

#: Growth that is no leak: bytes for each job done (its bit, rounded up well), and in all.
BYTES_PER_JOB, BYTES_IN_ALL = 16, 256 * 1024
#: And no more than this many times by how much the looks scatter, which in a short run is as much.
SCATTERS = 4
#: Fewest looks at the memory that tell anything, in the last two thirds of the run.
FEWEST_LOOKS = 8


def find_dead_leases(evidence: Evidence) -> Iterator[Violation]:
    """Jobs that are leased at the end to a worker that is not there."""
    alive = set(evidence.account.workers)
    leases = _newest_leases(evidence)
    for job, about in evidence.account.jobs.items():
        worker = about.get("worker", "")
        if about["state"] == "leased" and worker not in alive:
            yield Violation(f"job {job} is leased to {worker or 'nobody'}, who is not alive", proof(leases.get(job)))


def _newest_leases(evidence: Evidence) -> dict[str, Operation]:
    return {job: one for one in evidence.history.of("lease") for job, *_ in one.answer.get("jobs", ())}


def find_orphans(evidence: Evidence) -> Iterator[Violation]:
    """Keys that stay for ever and belong to nothing that is there."""
    for key, ttl_s in evidence.account.keys.items():
        if ttl_s < 0 and (why := _orphaned(evidence, key)):
            yield Violation(f"key {key} {why}")


def _orphaned(evidence: Evidence, key: str) -> str:
    kind, _, name = key.partition(":")
    jobs, subs = evidence.account.jobs, evidence.account.subscriptions
    if kind in ("group", "meta"):
        return "" if name in jobs else "is of a job that is gone"
    if kind == "partial":
        return "" if name.rpartition("/")[0] in jobs else "is of a job that is gone"
    if kind == "payload":
        return _orphaned_payload(evidence, name)
    if kind == "side":
        return _orphaned_payload(evidence, name.rpartition(":")[0])
    if kind in OF_A_SUBSCRIPTION:
        return "" if name in subs else "is of a subscription that is gone"
    if kind in MUST_EXPIRE:
        return "never expires"
    return "" if kind in OF_THE_RUN else "is of no kind that a run has"


def _orphaned_payload(evidence: Evidence, name: str) -> str:
    sample, _, token = name.rpartition(":")
    job = sample.rpartition("/")[0]
    if job not in evidence.account.jobs:
        return "is of a job that is gone"
    # Samples that were committed together lie under the name of the first.
    there = token in evidence.account.jobs[job]["samples"].values()
    return "" if there else "is of a lease that committed nothing of its job"


def find_growth(evidence: Evidence) -> Iterator[Violation]:
    """Memory that grew with the jobs done, where the jobs live at the same time do not explain it.

    By least squares over the last two thirds of the looks: bytes = a + b * done + c * live. Where the jobs live rise
    with those done, as where all are dead letters, no look can tell the two apart: what of ``done`` ``live`` follows
    is left out.
    """
    looks = evidence.account.memory
    looks = looks[len(looks) // 3 :]
    if len(looks) < FEWEST_LOOKS:
        return
    done, live, used = (np.array([look[name] for look in looks], dtype=float) for name in ("done", "live", "bytes"))
    of_live = np.array([np.ones(len(looks)), live]).T
    apart = done - of_live @ np.linalg.lstsq(of_live, done)[0]
    terms = np.array([*of_live.T, done]).T
    fitted = np.linalg.lstsq(terms, used)[0]
    each = fitted[2]
    grown = each * (max(apart) - min(apart))
    scatter = float(np.std(used - terms @ fitted))
    if each > BYTES_PER_JOB and grown > max(BYTES_IN_ALL, SCATTERS * scatter):
        yield Violation(f"memory grew by {grown:,.0f} bytes while {max(done) - min(done):,.0f} jobs were done")
