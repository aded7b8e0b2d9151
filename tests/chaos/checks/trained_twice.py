"""A group enters a subscription's batches as often as its reuse limit says, in the lineage of the weights (I5).

What a process trains stands behind what its weights had seen: checkpoints and restores make a tree, whose every path
from the root is one lineage. What a restore undid is on another branch, and counts for nothing here.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.checks.losses import find_losses
from tests.chaos.recording.history import Operation

#: Subscription, role, rank.
Seat = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Node:
    """Weights that have seen a batch; the root has seen none."""

    train: Operation | None = None
    parent: "Node | None" = None
    children: list["Node"] = field(default_factory=list)

    @property
    def n(self) -> int:
        return 0 if self.train is None else int(self.train.facts["n"])


def find_trained_twice(evidence: Evidence) -> Iterator[Violation]:
    """A batch twice in one lineage, a group more often than its limit, a sample by two ranks of one step.

    A group that was cut too often is told before anybody trains it.
    """
    roots, heads = lineages(evidence)
    for (sub, _, _), root in roots.items():
        yield from _walk(root, _reuse(evidence, sub))
    yield from _across_pool(evidence, heads)
    yield from _across_ranks(evidence)
    yield from _cut_too_often(evidence)


def lineages(evidence: Evidence) -> tuple[dict[Seat, Node], dict[Seat, Node]]:
    """The root of each seat's tree, and what the process that had the seat last has seen."""
    roots: dict[Seat, Node] = {}
    heads: dict[tuple[str, Seat], Node] = {}
    newest: dict[tuple[Seat, int], Node] = {}
    last: dict[Seat, Node] = {}
    for one in evidence.history.of("train", "restore"):
        seat = _seat(one)
        root = roots.setdefault(seat, Node())
        head = heads.get((one.process, seat), root)
        if one.op == "restore":
            head = _restored(one, newest, root)
        elif not _is_said_again(one, head):
            head = Node(one, head)
            assert head.parent is not None
            head.parent.children.append(head)
            newest[seat, head.n] = head
        heads[one.process, seat] = last[seat] = head
    return roots, last


def _seat(one: Operation) -> Seat:
    return one.facts["sub"], one.facts["role"], one.facts["rank"]


def _restored(one: Operation, newest: dict[tuple[Seat, int], Node], root: Node) -> Node:
    """The newest weights of this seat that had seen batch n, or those of rank 0 where the ranks were fewer.

    ``seen``: the last batch that the restored weights have in them, where the trainer says that itself.
    """
    sub, role, rank = _seat(one)
    n = one.facts.get("seen", one.facts["n"])
    return newest.get(((sub, role, rank), n)) or newest.get(((sub, role, 0), n)) or root


def _is_said_again(one: Operation, head: Node) -> bool:
    """The same process tells of the same batch once more, since its commit was not acknowledged the first time."""
    before = head.train
    return (
        before is not None
        and before.outcome != "yes"
        and before.process == one.process
        and (before.facts["n"], before.facts["digest"]) == (one.facts["n"], one.facts["digest"])
    )


def _walk(root: Node, reuse: int) -> Iterator[Violation]:
    """All paths in one go: a group or batch is put down when a path goes past it, and taken up on the way back."""
    batches: dict[int, Operation] = {}
    uses: dict[str, list[Operation]] = defaultdict(list)
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, left = stack.pop()
        if not left:
            stack.append((node, True))
            stack += [(child, False) for child in node.children]
        if node.train is None:
            continue
        n, train = node.n, node.train
        if left:
            if batches.get(n) is train:
                del batches[n]
            for job in train.facts["jobs"]:
                uses[job].pop()
            continue
        for job in train.facts["jobs"]:
            uses[job].append(train)
        sub = train.facts["sub"]
        if n in batches:
            yield Violation(f"batch {n} of {sub} was trained twice in one lineage", proof(batches[n], train))
            continue
        batches[n] = train
        for job in train.facts["jobs"]:
            if len(uses[job]) > reuse:
                what = f"group {job} was trained {len(uses[job])} times in one lineage of {sub}, allowed are {reuse}"
                yield Violation(what, proof(*uses[job]))


def _reuse(evidence: Evidence, sub: str) -> int:
    return int(evidence.account.subscriptions.get(sub, {}).get("reuse", 1))


def _across_pool(evidence: Evidence, heads: dict[Seat, Node]) -> Iterator[Violation]:
    """Members of a pool share the uses of a group."""
    uses: dict[str, dict[str, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    seen = set()
    for (sub, _, _), head in sorted(heads.items(), key=lambda item: item[0]):
        pool = evidence.account.subscriptions.get(sub, {}).get("pool", "")
        if not pool or sub in seen:  # one seat of each stands for all
            continue
        seen.add(sub)
        for train in _path(head):
            for job in train.facts["jobs"]:
                uses[pool][job].append(train)
    for pool, jobs in uses.items():
        for job, trains in jobs.items():
            limit = _reuse(evidence, trains[0].facts["sub"])
            if len(trains) > limit and len({train.facts["sub"] for train in trains}) > 1:
                what = f"group {job} was trained {len(trains)} times by members of pool {pool}"
                yield Violation(what, proof(*trains))


def _path(head: Node) -> Iterator[Operation]:
    node: Node | None = head
    while node is not None and node.train is not None:
        yield node.train
        node = node.parent


def _across_ranks(evidence: Evidence) -> Iterator[Violation]:
    """In one step of one role no two shares hold one sample."""
    held: dict[tuple[object, ...], tuple[int, Operation]] = {}
    for one in evidence.history.of("train"):
        facts = one.facts
        step = facts["sub"], facts["role"], facts["n"], facts["digest"], facts["gen"], facts["owner"]
        for job, k in facts["rows"]:
            share, by = held.setdefault((*step, job, k), (facts["share"], one))
            if share != facts["share"]:
                yield Violation(f"sample {job}/{k} was trained by shares {share} and {facts['share']}", proof(by, one))


def _cut_too_often(evidence: Evidence) -> Iterator[Violation]:
    """More acknowledged batches of a subscription or pool than its limit hold a group.

    Not where batches were taken back or lost: their groups are used anew, and lineages tell what came of it.
    """
    lost = find_losses(evidence)["batches"] or evidence.account.reported.get("batches")
    uses: dict[tuple[str, str], dict[tuple[str, int], Operation]] = defaultdict(dict)
    for (sub, n), digests in evidence.cuts.items() if not lost else ():
        user = evidence.account.subscriptions.get(sub, {}).get("pool") or sub
        for cut in digests.values():
            for job in cut.facts["jobs"] if cut.happened else ():
                uses[user, job][sub, n] = cut
    parked = {evidence.account.subscriptions.get(sub, {}).get("pool") or sub for sub in evidence.parked}
    for (user, job), cuts in uses.items():
        limit = _reuse(evidence, next(iter(cuts))[0])
        if len(cuts) > limit and user not in parked:
            yield Violation(
                f"group {job} was cut {len(cuts)} times for {user}, allowed are {limit}", proof(*cuts.values())
            )
