"""What a history and an account say, looked up once for all checks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tests.chaos.recording.account import Account
from tests.chaos.recording.doubts import doubted, known_at, within
from tests.chaos.recording.history import History, Operation

#: Log-probability with which a version draws a token of a sample: (version, all its tokens, position).
Law = Callable[[int, Sequence[int], int], float]


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must not be, and the operations that prove it."""

    what: str
    #: FILE:SEQ of each.
    proof: tuple[str, ...] = ()


def proof(*operations: Operation | None) -> tuple[str, ...]:
    """Where operations stand."""
    return tuple(one.where for one in operations if one is not None)


class Evidence:
    """A history and the account at its end. Each look-up is made in one pass, when it is first wanted."""

    def __init__(self, history: History, account: Account, law: Law | None = None) -> None:
        history = known_at(history, account.read_at)
        #: When (ns) what a fault may have lost was acknowledged, by where it stands.
        self.told_at: dict[str, int] = {}
        if account.forgotten:
            is_doubted = within(account.forgotten)
            self.told_at = {one.where: one.ended or 0 for one in history.all() if is_doubted(one)}
        self.history = doubted(history, account.forgotten)
        self.account = account
        self.law = law

    @cached_property
    def done(self) -> set[str]:
        return set(self.account.done)

    @cached_property
    def admitted(self) -> dict[str, Operation]:
        """Job -> the admission that was acknowledged."""
        found: dict[str, Operation] = {}
        for one in self.history.of("admit"):
            if one.happened:
                for job in one.answer["jobs"]:
                    found.setdefault(job, one)
        return found

    @cached_property
    def asked(self) -> dict[str, Operation]:
        """Job -> an admission that may have happened."""
        return {job: one for one in self.history.of("admit") if one.may_have_happened for job, _ in one.facts["jobs"]}

    @cached_property
    def commits(self) -> dict[tuple[str, int], dict[str, Operation]]:
        """(job, k) -> token -> a commit that may have happened."""
        found: dict[tuple[str, int], dict[str, Operation]] = defaultdict(dict)
        for one in self.history.of("commit"):
            if one.may_have_happened:
                job, token = one.facts["job"], one.facts["token"]
                for k, _ in one.facts["samples"]:
                    found[job, k].setdefault(token, one)
        return found

    @cached_property
    def committed(self) -> dict[tuple[str, int], dict[str, Operation]]:
        """(job, k) -> token -> the commit that was acknowledged; where another lease had some of its k, none of it."""
        found: dict[tuple[str, int], dict[str, Operation]] = defaultdict(dict)
        for one in self.history.of("commit"):
            if one.happened and not one.answer["taken"]:
                job, token = one.facts["job"], one.facts["token"]
                for k, _ in one.facts["samples"]:
                    found[job, k].setdefault(token, one)
        return found

    @cached_property
    def versions(self) -> dict[tuple[str, int, str], list[int]]:
        """(job, k, token) -> versions of the tokens that bear loss, as they were committed."""
        return {
            (one.facts["job"], k, one.facts["token"]): versions
            for one in self.history.of("commit")
            for k, versions in one.facts["samples"]
        }

    @cached_property
    def cuts(self) -> dict[tuple[str, int], dict[str, Operation]]:
        """(subscription, n) -> digest -> a cut that may have happened; an acknowledged one where there is one."""
        found: dict[tuple[str, int], dict[str, Operation]] = defaultdict(dict)
        for one in self.history.of("cut"):
            at = found[one.facts["sub"], one.facts["n"]] if one.may_have_happened else {}
            if one.facts["digest"] not in at or one.happened:
                at[one.facts["digest"]] = one
        return found

    @cached_property
    def cut_samples(self) -> dict[tuple[str, int], dict[str, Operation]]:
        """(job, k) -> token -> a cut that may have happened and has it."""
        found: dict[tuple[str, int], dict[str, Operation]] = defaultdict(dict)
        for digests in self.cuts.values():
            for one in digests.values():
                for job, k, token in one.facts["rows"]:
                    found[job, k].setdefault(token, one)
        return found

    @cached_property
    def given_up(self) -> set[str]:
        """Jobs that may have been given up, by anybody, for whatever reason."""
        ways = self.history.of("dispose") + [one for one in self.history.of("seal") if one.facts["evict"]]
        return {job for one in ways if one.may_have_happened for job in one.facts["jobs"]}

    @cached_property
    def parked(self) -> set[str]:
        """Subscriptions whose batches may have been taken back, or that may have been dropped."""
        return {one.facts["sub"] for one in self.history.of("park", "unsubscribe") if one.may_have_happened}

    @property
    def lost_any(self) -> bool:
        """Whether a fault made Redis lose what it had said: a right may be its former holder's again."""
        return bool(self.account.forgotten)

    def cut_of(self, batch: Operation) -> Operation | None:
        """The cut of a batch that was delivered or trained."""
        return self.cuts.get((batch.facts["sub"], batch.facts["n"]), {}).get(batch.facts["digest"])
