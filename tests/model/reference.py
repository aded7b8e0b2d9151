"""What the buffer must do, said a second time and simply: no Redis, no pools, plain dicts and lists.

It is told what happened and what the real buffer answered, and asserts what must be (I4, I5, I6, T1, T2).
"""

from collections import Counter
from dataclasses import dataclass, field

from penstock.records.manifest import Manifest


@dataclass
class Lineage:
    """Versions of the one policy: which live, and under which of them the weights changed."""

    alive: list[int] = field(default_factory=list)
    aging: list[int] = field(default_factory=list)
    through: dict[int, int] = field(default_factory=dict)
    newest: int = 0
    #: The next publication has the weights of the last living version.
    repeats: bool = False

    def publish(self, version: int, through: int) -> None:
        self.newest = version
        self.alive.append(version)
        self.through[version] = through
        if not self.repeats:
            self.aging.append(version)
        self.repeats = False

    def rewind(self, n: int) -> None:
        self.alive = [v for v in self.alive if self.through[v] <= n]
        self.aging = [v for v in self.aging if v in self.alive]
        self.repeats = bool(self.alive) and self.through[self.alive[-1]] == n

    def lag(self, version: int, at: int) -> int:
        """Steps from ``version`` to ``at``; versions that are still to come will change the weights."""
        return sum(version < v <= at for v in self.aging) + max(0, at - self.newest)


@dataclass
class Group:
    """One completed group: versions of its generated tokens -> tokens, the same in each of its samples."""

    n: int
    tokens: dict[int, int]
    place: int


@dataclass
class Sub:
    """One subscription as its trainer sees it."""

    name: str
    account: str
    driving: bool = False
    bounded: bool = False
    bound: int = 0
    on_expiry: str = "mask"
    reuse: int = 1
    per_version: int = 1
    since: int = 0
    #: n -> (digest, jobs, train version) of every batch that was cut; below 0 those of members of the pool that left.
    cut: dict[int, tuple[str, list[str], int]] = field(default_factory=dict)
    cursor: int = 0
    ckpt: int = 0
    #: Batches up to this one were cut before the last rewind.
    redelivered: int = 0

    @property
    def last(self) -> int:
        return max((n for n in self.cut if n > 0), default=0)


class Reference:
    """The model of a run."""

    def __init__(self) -> None:
        self.lineage = Lineage()
        self.clock = 0
        #: Version -> its folder, of those that were told of after their announcement.
        self.folders: dict[int, str] = {}
        self.ready: dict[str, Group] = {}
        self.subs: dict[str, Sub] = {}
        #: account -> job -> reason of a disposal.
        self.disposed: dict[str, dict[str, str]] = {}
        #: subscription -> batch -> sample -> tokens that bear loss; checkpoints of subscriptions that were dropped.
        self.bore: dict[str, dict[int, dict[tuple[str, int], int]]] = {}
        self.left: dict[str, int] = {}
        #: Tokens of groups that are gone, by what became of them (I10).
        self.tokens: Counter[str] = Counter()

    def uses(self, account: str, job: str) -> int:
        every = [sub for sub in self.subs.values() if sub.account == account]
        return sum(jobs.count(job) for sub in every for _, jobs, _ in sub.cut.values())

    def train_version(self, sub: Sub) -> int:
        """Version that the trainer will hold at the first step of the batch after the last cut."""
        if not sub.driving:
            return self.clock
        through = self.lineage.through.get(self.lineage.alive[-1], 0) if self.lineage.alive else 0
        return self.clock + sub.last // sub.per_version - through // sub.per_version

    def was_cut(self, sub: Sub, manifest: Manifest, digest: str) -> None:
        assert manifest.n == sub.last + 1, "batches are numbered one by one"
        jobs = list(dict.fromkeys(row.job for row in manifest.rows))
        assert len(manifest.rows) == sum(self.ready[job].n for job in jobs), "whole groups"
        for job in jobs:
            assert job in self.ready, f"{job} is not there to be cut"
            assert self.uses(sub.account, job) < sub.reuse, f"I5: {job} enters one batch too many of {sub.name}"
            assert job not in self.disposed.get(sub.account, {}), f"I5: {sub.name} had given {job} up"
            assert self.ready[job].place > sub.since, f"{job} was there before {sub.name} came"
        if sub.bounded:
            assert manifest.train_version == self.train_version(sub), "T2"
            self._check_age(sub, manifest)
        sub.cut[manifest.n] = (digest, jobs, manifest.train_version)
        bore = {(row.job, row.k): row.num_loss for row in manifest.rows}
        self.bore.setdefault(sub.name, {})[manifest.n] = bore

    def _check_age(self, sub: Sub, manifest: Manifest) -> None:
        at, total = manifest.train_version, 0
        for row in manifest.rows:
            tokens = self.ready[row.job].tokens
            assert set(tokens) <= set(self.lineage.alive), f"T1: {row.job} holds an abandoned version"
            young = {v: count for v, count in tokens.items() if self.lineage.lag(v, at) <= sub.bound}
            if sub.on_expiry != "mask":
                assert young == tokens, f"I6: {row.job} is older than the bound of {sub.name}"
            assert row.num_loss == sum(young.values()), f"I6: wrong tokens of {row.job} bear loss"
            assert row.num_loss, f"nothing of {row.job} bears loss"
            total += row.num_loss
        assert manifest.num_loss_tokens == total, "T10"
        worst = max(self.lineage.lag(row.oldest_loss, at) for row in manifest.rows)
        assert manifest.staleness_max == worst <= sub.bound, "I6"

    def was_disposed(self, sub: Sub, job: str, reason: str) -> None:
        """A subscription gave a group up: was it right to? Asked right after it happened."""
        group, at = self.ready[job], self.train_version(sub)
        lags = [self.lineage.lag(v, at) for v in group.tokens]
        right = {
            "stale": sub.bounded and (min(lags) if sub.on_expiry == "mask" else max(lags)) > sub.bound,
            "rewound": sub.bounded and not set(group.tokens) <= set(self.lineage.alive),
            "before": group.place <= sub.since,
        }
        assert right.get(reason, False), f"I4: {sub.name} gave {job} up as {reason}, and it is not"
        self.disposed.setdefault(sub.account, {})[job] = reason

    def is_done(self, sub: Sub, job: str) -> bool:
        return self.uses(sub.account, job) >= sub.reuse or job in self.disposed.get(sub.account, {})

    def was_retired(self, job: str) -> None:
        for sub in self.subs.values():
            assert self.is_done(sub, job), f"I4: {job} is gone, and {sub.name} had not had it"
            held = [n for n, (_, jobs, _) in sub.cut.items() if job in jobs]
            assert max(held, default=0) <= sub.ckpt, f"I4: {job} is gone, and {sub.name} may be restored before it"

    def settle(self, job: str) -> None:
        """The tokens of a group that is gone go to one account each."""
        group = self.ready[job]
        ckpts = self.left | {sub.name: sub.ckpt for sub in self.subs.values()}
        trained = used = 0
        for k in range(group.n):
            of_k = [(n <= ckpts[name], bore[job, k]) for name, batches in self.bore.items()
                    for n, bore in batches.items() if (job, k) in bore]  # fmt: skip
            used |= any(durable for durable, _ in of_k)
            trained += max((tokens for durable, tokens in of_k if durable), default=0)
        total = group.n * sum(group.tokens.values())
        self.tokens["trained"] += trained
        self.tokens["masked" if used else "other"] += total - trained

    def stock(self, sub: Sub, through: int) -> int:
        """Complete groups that a driving subscription has neither given up nor consumed by a published version."""
        first: dict[str, int] = {}
        for n, (_, jobs, _) in sorted(sub.cut.items()):
            for job in jobs:
                first.setdefault(job, n)
        given_up = self.disposed.get(sub.account, {})
        unused = sum(job not in first and job not in given_up for job in self.ready)
        return unused + sum(n > through for n in first.values())

    def gave_back(self, sub: Sub) -> int:
        """A member of a pool lost what it had not committed; how many groups that were."""
        lost = [n for n in sub.cut if n > sub.cursor]
        for n in lost:
            self.bore[sub.name].pop(n, None)
        return sum(len(sub.cut.pop(n)[1]) for n in lost)
