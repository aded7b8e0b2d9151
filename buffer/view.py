"""Input of the decision of a cut: one subscription, its unused groups, and what is in flight. Plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.buffer.group import Group
from penstock.buffer.samplers import Pool
from penstock.config.subscription import Definition
from penstock.names import Lane
from penstock.protocol.position import Position
from penstock.protocol.staleness import UNBOUNDED, Policy, train_version


@dataclass(frozen=True, slots=True)
class End:
    """The end of the data, once all prompts before it are admitted."""

    #: Position after the last train prompt.
    position: int
    #: Whether remaining groups are trained as a smaller batch.
    train: bool


@dataclass(frozen=True, slots=True)
class InFlight:
    """Jobs that are not complete yet, read before completed groups were ingested."""

    #: Queued, running or delayed jobs in the subscription's lanes or in shared ones.
    jobs: int = 0
    #: Begun train jobs by their oldest version, for the versions from the floor to the train version.
    running: Mapping[int, int] = field(default_factory=dict)
    #: Jobs ever admitted to its first lane: the last place in the order of admission.
    admitted: int = 0
    #: Unfinished jobs at places up to the last one of the next cohort, and the first place of any.
    unfinished: int = 0
    first_unfinished: int | None = None
    #: Completed groups of the run.
    completed: int = 0
    #: End of the data, if all prompts before it are admitted.
    end: End | None = None
    #: False if no gate admits a job. Only read while rejects are held back; otherwise true.
    is_gate_open: bool = True


@dataclass(frozen=True, slots=True)
class View:
    """One subscription that requests its next batch, read at one time."""

    name: str
    definition: Definition
    position: Position
    #: Its unused groups.
    pool: Pool
    #: Version of the last publication of its model; 0: none, or no model.
    clock: int = 0
    #: The newest version of any model.
    newest: int = 0
    #: Groups of the pool with a token of an abandoned version.
    abandoned: Sequence[Group] = ()
    #: Its groups that are held back because one of their payload servers does not answer.
    away: Sequence[Group] = ()
    #: Rejects that are held back (``keep_when_few``), longest held first.
    rejects: Sequence[Group] = ()
    #: A filter that the buffer may not run; '' if it may run all.
    unfilterable: str = ""
    #: Groups whose filter raised, if that stops cutting: job -> the error.
    stuck: Mapping[str, str] = field(default_factory=dict)
    #: None: not read yet.
    in_flight: InFlight | None = None

    @property
    def policy(self) -> Policy:
        """Staleness policy of the batch; without a model's clock there is no bound."""
        one = self.definition
        return Policy(one.mode, one.bound if one.model else UNBOUNDED, one.on_expiry, one.sampler)

    @property
    def n(self) -> int:
        """Number of the batch."""
        return self.position.cut + 1

    @property
    def train_version(self) -> int:
        """Version that its trainer holds at the first optimizer step of the batch (T2)."""
        if self.definition.driving:
            return train_version(self.clock, self.n, self.position.through, self.definition.per_version)
        return self.clock if self.definition.model else self.newest

    @property
    def floor(self) -> int:
        """Oldest version that may bear loss in the batch."""
        return self.policy.floor(self.position.lineage, self.train_version)

    @property
    def first_place(self) -> int:
        """Place in the order of admission at which the next cohort begins."""
        return self.position.cum + self.position.skipped + 1

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes in which a job of this subscription may be."""
        return (*self.definition.lanes, Lane.RESUME, Lane.SUSPECT)

    @property
    def end(self) -> End | None:
        """The end of the data, if it is reached and nothing of this subscription is in flight."""
        seen = self.in_flight
        if seen is None or seen.jobs or Lane.TRAIN not in self.definition.lanes:
            return None
        return seen.end
