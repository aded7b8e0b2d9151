"""What was acknowledged and is in no account at the end, by kind and name; and what of it was reported."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.checks.reports import find_overstated, find_silent
from tests.chaos.recording.account import Reported
from tests.chaos.recording.doubts import begun_in
from tests.chaos.recording.history import Operation

#: As commits call the control Redis, where payloads go back with all the rest.
CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Loss:
    """One thing that was acknowledged and is not there."""

    name: str
    what: str
    by: tuple[str, ...]
    #: Something else stands in its place.
    replaced: bool = False


def find_lost(evidence: Evidence) -> Iterator[Violation]:
    """Acknowledged, in no account, and nobody reported it."""
    for kind, losses in find_losses(evidence).items():
        yield from (Violation(loss.what, loss.by) for loss in unreported(evidence, kind, losses) if not loss.replaced)
    yield from find_silent(evidence)


def find_misreported(evidence: Evidence) -> Iterator[Violation]:
    """Reported as lost, and not lost."""
    losses = find_losses(evidence)
    yield from find_overstated(evidence)
    for kind, said in evidence.account.reported.items():
        names = {loss.name for loss in losses.get(kind, ())}
        if kind == "samples":
            names |= _payloads_gone(evidence)
        wrong = sorted(set(map(str, said.named)) - names)
        yield from (Violation(f"{kind}: {name} was reported lost, and is not") for name in wrong)
        if said.count > len(names) and not wrong:
            yield Violation(f"{kind}: {said.count} were reported lost, and {len(names)} are")


def _payloads_gone(evidence: Evidence) -> set[str]:
    """Samples whose payload is gone by the nature of a fault: who looks for one finds nothing, and reports it.

    It lay on a server that was lost; or not on the control Redis, which forgot that its group was done with.
    """
    lost, freed = set(evidence.account.lost_servers), _freed_in_vain(evidence)
    return {
        f"{one.facts['job']}/{k}"
        for one in evidence.history.of("commit")
        # Samples that are committed together may lie on several.
        for (k, _), server in zip(one.facts["samples"], one.facts["servers"], strict=True)
        if server in lost or (server != CONTROL and one.facts["job"] in freed)
    }


def _freed_in_vain(evidence: Evidence) -> set[str]:
    """Jobs whose payloads may have been freed while a fault was at work that made Redis forget it."""
    ways = begun_in(evidence.history.of("seal", "dispose"), evidence.account.forgotten)
    return {job for one in ways for job in one.answer.get("jobs", one.facts["jobs"])}


def unreported(evidence: Evidence, kind: str, losses: list[Loss]) -> list[Loss]:
    """Those that no report covers: a report names some, and counts all."""
    said = evidence.account.reported.get(kind, Reported())
    if len({loss.name for loss in losses}) <= said.count:
        return []
    named = set(map(str, said.named))
    return [loss for loss in losses if loss.name not in named]


@lru_cache(maxsize=1)  # several checks ask
def find_losses(evidence: Evidence) -> dict[str, list[Loss]]:
    """Losses by kind, each named once."""
    found = {
        "jobs": _jobs(evidence),
        "samples": _samples(evidence),
        "batches": _batches(evidence),
        "checkpoints": _checkpoints(evidence),
        "versions": _versions(evidence),
    }
    return {kind: list({loss.name: loss for loss in losses}.values()) for kind, losses in found.items()}


def _jobs(evidence: Evidence) -> Iterator[Loss]:
    for job, admit in evidence.admitted.items():
        if job not in evidence.account.jobs and job not in evidence.done:
            yield Loss(job, f"job {job} was admitted, and is neither live nor done", proof(admit))


def _samples(evidence: Evidence) -> Iterator[Loss]:
    for (job, k), tokens in evidence.committed.items():
        if job in evidence.account.jobs:
            there = {evidence.account.jobs[job]["samples"].get(str(k))} - {None}
        elif job in evidence.done and job not in evidence.given_up:
            there = set(evidence.cut_samples.get((job, k), ()))
        else:  # given up, or lost with its job
            continue
        for token, commit in tokens.items():
            if token not in there:
                instead = "another commit of it is there" if there else "it is in no batch and was not given up"
                what = f"sample {job}/{k} was committed under {token}, and {instead}"
                yield Loss(f"{job}/{k}", what, proof(commit), replaced=bool(there))


def _batches(evidence: Evidence) -> Iterator[Loss]:
    told = {sub: dict(cuts) for sub, cuts in _cut_of_subs(evidence).items()}
    for sub, cuts in told.items():
        last = evidence.account.subscriptions.get(sub, {}).get("cut", 0)
        yield from (Loss(f"{sub}/{n}", f"batch {n} of {sub} was cut, and {last} is the last", proof(one))
                    for n, one in cuts.items() if n > last)  # fmt: skip
    said = [one for one in evidence.history.of("commit_batch") if one.answer.get("said") == "committed"]
    for sub, (reached, by) in _reached(evidence, said).items():
        cursor = evidence.account.subscriptions.get(sub, {}).get("cursor", 0)
        for n in range(cursor + 1, reached + 1):
            yield Loss(f"{sub}/{n}", f"batch {n} of {sub} was committed, and the cursor is at {cursor}", proof(by))


def _cut_of_subs(evidence: Evidence) -> dict[str, dict[int, Operation]]:
    found: dict[str, dict[int, Operation]] = defaultdict(dict)
    for one in evidence.history.of("cut"):
        if one.happened and one.facts["sub"] not in evidence.parked:
            found[one.facts["sub"]][one.facts["n"]] = one
    return found


def _checkpoints(evidence: Evidence) -> Iterator[Loss]:
    # With roles the checkpoint of a subscription is that of the last role.
    said = [one for one in evidence.history.of("checkpoint") if one.happened and not one.facts["role"]]
    for sub, (reached, by) in _reached(evidence, said).items():
        there = evidence.account.subscriptions.get(sub, {}).get("checkpoint", 0)
        if there < reached:
            what = f"{sub} has a checkpoint of batch {reached}, and Redis knows of {there}"
            yield Loss(f"{sub}/{reached}", what, proof(by))


def _reached(evidence: Evidence, said: list[Operation]) -> dict[str, tuple[int, Operation]]:
    """How far each subscription is that was not taken back: its last generation counts, and what rewinds left."""
    moves = said + [one for one in evidence.history.of("rewind") if one.may_have_happened]
    reached: dict[str, tuple[int, Operation]] = {}
    # A rewind is the last act of its generation.
    for one in sorted(moves, key=lambda one: (one.facts["gen"], one.op == "rewind")):
        sub, n = one.facts["sub"], one.facts["n"]
        before = reached.get(sub)
        if one.op == "rewind":
            if before is not None and before[0] > n:
                reached[sub] = n, one
        elif before is None or before[0] < n:
            reached[sub] = n, one
    dropped = {one.facts["sub"] for one in evidence.history.of("unsubscribe") if one.may_have_happened}
    return {sub: found for sub, found in reached.items() if sub not in dropped}


def _versions(evidence: Evidence) -> Iterator[Loss]:
    for one in evidence.history.of("publish"):
        model, version = one.facts["model"], one.facts["version"]
        clock = evidence.account.clock.get(model, 0)
        if one.happened and version > clock:
            what = f"version {version} of {model} was published, and the clock is at {clock}"
            yield Loss(f"{model}/{version}", what, proof(one))
