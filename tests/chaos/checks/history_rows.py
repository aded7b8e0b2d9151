"""The history of a run: each sample that is done with has one row there, or its group is counted as given up.

Whoever is killed, a row may be written twice; it must be read once. What retired before a recorder was first there is
in no history, and is not looked for.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation

#: Fates of what was in a batch.
IN_A_BATCH = frozenset(("trained", "masked"))


def find_unrecorded(evidence: Evidence) -> Iterator[Violation]:
    """More groups without all their rows than were given up, rows that are there twice, rows of what was not so."""
    rows = evidence.account.rows
    if rows is None:
        return
    times = Counter((job, k) for job, k, _ in rows)
    yield from (Violation(f"sample {job}/{k} has {n} rows in the history") for (job, k), n in times.items() if n > 1)
    yield from _of_nobody(evidence, times)
    for job, k, fate in rows:
        if fate in IN_A_BATCH and (job, k) not in evidence.cut_samples:
            yield Violation(f"sample {job}/{k} is {fate} by its row, and was in no batch", _of(evidence, job))
    missing = _missing(evidence, times)
    given_up = evidence.account.unrecorded
    for job, samples in list(missing.items())[given_up:]:
        what = (
            f"there is no row of {', '.join(samples) or job}: {len(missing)} groups lack rows, {given_up} were given up"
        )
        yield Violation(what, _of(evidence, job))


def _of_nobody(evidence: Evidence, times: Counter[tuple[str, int]]) -> Iterator[Violation]:
    """Rows of what nobody has ever admitted or committed."""
    for job, k in times:
        if job not in evidence.asked:
            yield Violation(f"job {job} has a row in the history, and was never admitted")
        elif k >= 0 and (job, k) not in evidence.commits:
            yield Violation(f"sample {job}/{k} has a row in the history, and was never committed", _of(evidence, job))


def _missing(evidence: Evidence, times: Counter[tuple[str, int]]) -> dict[str, list[str]]:
    """Job that is over -> samples of it without a row; none where the job itself has none."""
    committed: dict[str, set[int]] = defaultdict(set)
    for job, k in evidence.committed:
        committed[job].add(k)
    rows: dict[str, set[int]] = defaultdict(set)
    for job, k in times:
        rows[job].add(k)
    early = _before_any(evidence)
    there = early | evidence.account.jobs.keys()
    over = sorted((evidence.done & evidence.asked.keys()) - there)
    lacking = {job: sorted(committed[job] - rows[job]) for job in over if not rows[job] or committed[job] - rows[job]}
    return {job: [f"{job}/{k}" for k in ks] for job, ks in lacking.items()}


def _before_any(evidence: Evidence) -> set[str]:
    """Jobs that may have been over before the run kept a history."""
    told = [one.ended for one in evidence.history.of("record") if one.happened and one.ended is not None]
    first = min(told, default=None)
    ways = evidence.history.of("seal", "dispose")
    early = [one for one in ways if first is None or one.began <= first]
    return {job for one in early for job in one.answer.get("jobs", one.facts["jobs"])}


def _of(evidence: Evidence, job: str) -> tuple[str, ...]:
    said: list[Operation] = [one for one in evidence.history.of("recorded") if job in one.facts["jobs"]]
    return proof(evidence.asked.get(job), *said)
