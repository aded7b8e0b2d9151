"""The gate lets in as many groups as the bound allows (T3), counted anew from what was cut, published and given up.

Everything is counted in favour of the gate: what frees a place counts as soon as it began, whether or not it was
acknowledged. Only subscriptions that drive a clock, count in groups and stand alone are looked at; in pools the places
of several are added up.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation


@dataclass(slots=True)
class Gate:
    """What one subscription makes of the gate, so far."""

    sub: str
    #: Admitted groups that were neither given up nor consumed.
    stock: set[str]
    #: Of these, those that were there before it; None: not known yet.
    start: int | None = None
    defined: dict[str, str] = field(default_factory=dict)
    #: Most places that any of its definitions had; 0: they cannot be told.
    places: int = 0
    owed: int = 0
    #: Batch -> jobs of any cut of it; those up to ``through`` were consumed by a publication.
    batches: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    through: int = 0
    #: Jobs that have no place any more; some may be told of as admitted only afterwards.
    gone: set[str] = field(default_factory=set)
    told: bool = False

    @property
    def over(self) -> int:
        """Groups that are more than there are places."""
        if self.start is None or not self.places:
            return 0
        return len(self.stock) - self.start - self.places - self.owed

    def admit(self, jobs: list[str]) -> None:
        self.stock.update(job for job in jobs if job not in self.gone)

    def free(self, jobs: set[str]) -> None:
        self.gone |= jobs
        self.stock -= jobs

    def define(self, fields: dict[str, str]) -> None:
        """What is changed alone leaves the rest as it was."""
        self.defined |= fields
        self.places = max(self.places, _places(self.defined))

    def cut(self, n: int, jobs: set[str]) -> None:
        self.batches[n] |= jobs
        if n <= self.through:
            self.free(jobs)

    def publish(self, through: int) -> None:
        for n in range(self.through + 1, through + 1):
            self.free(self.batches[n])
        self.through = max(self.through, through)


def find_over_admitted(evidence: Evidence) -> Iterator[Violation]:
    """Admissions to lane train beyond the places of a subscription; the first of each."""
    # What ended without a verb that is recorded is counted at once: buried by whoever looks after leases, say.
    gone = {job for job, about in evidence.account.jobs.items() if about["state"] == "dead"}
    stock: set[str] = set()
    gates: dict[str, Gate] = {}
    for _, one in sorted(_moments(evidence), key=lambda pair: pair[0]):
        if one.op == "admit":
            stock.update(job for job in one.answer["jobs"] if job not in gone)
            for gate in gates.values():
                gate.admit(one.answer["jobs"])
                if gate.over > 0 and not gate.told:
                    gate.told = True
                    held, room = len(gate.stock) - (gate.start or 0), gate.places + gate.owed
                    yield Violation(f"{held} groups were in stock for {gate.sub}, which has {room} places", proof(one))
        elif one.op in ("dispose", "fail", "crash"):
            freed = set(one.facts.get("jobs") or [one.facts["job"]])
            gone |= freed
            stock -= freed
            for gate in gates.values():
                gate.free(freed)
        elif one.op == "subscribe" and one.facts["sub"] not in gates:
            gates[one.facts["sub"]] = Gate(one.facts["sub"], set(stock), gone=set(gone))
        if (own := gates.get(one.facts.get("sub", ""))) is not None:
            _take(own, one)


def _take(gate: Gate, one: Operation) -> None:
    facts = one.facts
    match one.op:
        case "subscribe":
            gate.define({name: value for name, value in facts.items() if name != "sub"})
        case "subscribed":
            gate.start = len(gate.stock) if gate.start is None else gate.start
        case "grant":
            gate.owed += facts["groups"]
        case "cut":
            gate.cut(facts["n"], set(facts["jobs"]))
        case "publish":
            gate.publish(facts["through"])


def _moments(evidence: Evidence) -> Iterator[tuple[int, Operation]]:
    """When each counts: what fills the stock when it was told, and only then; all else when it began."""
    for one in evidence.history.of("admit"):
        if one.happened and one.facts["lane"] == "train" and one.ended is not None:
            yield one.ended, one
    for one in evidence.history.of("subscribe", "grant", "cut", "publish", "dispose", "fail", "crash"):
        if one.may_have_happened:
            yield one.began, one
        if one.op == "subscribe" and one.happened and one.ended is not None:
            yield one.ended, replace(one, op="subscribed")


def _places(said: dict[str, str]) -> int:
    """Places that a definition asks for; 0 where they cannot be told."""
    if said.get("driving") != "1" or said.get("unit") != "groups" or said.get("share") or not said.get("bound"):
        return 0
    return (1 + int(said["bound"])) * int(said["gb"]) + int(said.get("over") or 0)
