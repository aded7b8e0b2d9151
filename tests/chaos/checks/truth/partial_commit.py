"""A batch is committed once, after every rank of every role has trained it (T15)."""

from collections import defaultdict
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation

#: Subscription, owner, generation, batch and digest: another owner or generation starts the barrier anew.
Barrier = tuple[str, str, int, int, str]


def find_partial_commits(evidence: Evidence) -> Iterator[Violation]:
    """Yield commits that moved the cursor twice, or while a rank or a role had not committed the batch."""
    barriers: dict[Barrier, list[Operation]] = defaultdict(list)
    for one in evidence.history.of("commit_batch"):
        if one.may_have_happened:
            facts = one.facts
            barriers[facts["sub"], facts["owner"], facts["gen"], facts["n"], facts["digest"]].append(one)
    for (sub, _, _, n, _), calls in barriers.items():
        last = [one for one in calls if one.answer.get("said") == "committed"]
        # A trainer commits a batch again if Redis forgot that it had.
        if sum(one.happened for one in last) > 1 and not any(_was_resent(one) for one in last):
            yield Violation(f"batch {n} of {sub} was committed {len(last)} times", proof(*last))
        for commit in last[:1]:
            missing = _missing(_roles(evidence, sub), calls, commit)
            if missing:
                what = f"batch {n} of {sub} was committed before {' and '.join(missing)}"
                yield Violation(what, proof(commit, *(one for one in calls if one is not commit)))


def _missing(roles: list[str], calls: list[Operation], commit: Operation) -> list[str]:
    """Return the ranks that had not committed the batch when ``commit`` moved the cursor, in words.

    A call that was answered ``already`` was executed after the cursor had moved, unless it is the second try of one
    whose reply was lost.
    """
    before = [
        one
        for one in calls
        if one.began <= (commit.ended or commit.began) and (one.answer.get("said") != "already" or _was_resent(one))
    ]
    found = []
    for role in roles:
        of_role = [one for one in calls if one.facts["role"] == role]
        if not of_role:
            found.append(f"any rank of role {role}")
            continue
        ranks = of_role[-1].facts["ranks"] if role != commit.facts["role"] else commit.facts["ranks"]
        there = {one.facts["rank"] for one in before if one.facts["role"] == role}
        found += [f"rank {rank}{role and f' of role {role}'}" for rank in range(ranks) if rank not in there]
    return found


def _roles(evidence: Evidence, sub: str) -> list[str]:
    """Return the roles of a subscription, as any of its definitions names them; '' for one without roles."""
    for one in evidence.history.of("subscribe"):
        if one.facts["sub"] == sub and one.may_have_happened and one.facts.get("roles"):
            return str(one.facts["roles"]).split(",")
    return [""]


def _was_resent(one: Operation) -> bool:
    """Return whether the connection was lost during the call, so that it may have been executed twice."""
    return bool(one.answer.get("resent"))
