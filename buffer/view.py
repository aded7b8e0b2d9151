"""Define the input of the decision on a cut: a subscription, its unused groups and its in-flight jobs."""

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
    """End of the data, after all prompts are admitted."""

    #: Position after the last train prompt.
    position: int
    #: Whether remaining groups are trained as a smaller batch.
    train: bool


@dataclass(frozen=True, slots=True)
class InFlight:
    """Jobs that were not complete yet when they were read, before completed groups were ingested."""

    #: Number of queued, running or delayed jobs in the subscription's lanes and in shared ones.
    jobs: int = 0
    #: Oldest version -> number of started train jobs, for versions from the floor to the train version.
    running: Mapping[int, int] = field(default_factory=dict)
    #: Number of jobs ever admitted to its first lane: the last place in the order of admission.
    admitted: int = 0
    #: Number of unfinished jobs up to the last place of the next cohort, and the first unfinished place.
    unfinished: int = 0
    first_unfinished: int | None = None
    #: Number of completed groups of the run.
    completed: int = 0
    #: End of the data, if all prompts before it are admitted.
    end: End | None = None
    #: Whether every gate admits a job. Only read while rejects are held; otherwise true.
    is_gate_open: bool = True


@dataclass(frozen=True, slots=True)
class View:
    """Snapshot of a subscription that requests its next batch."""

    name: str
    definition: Definition
    position: Position
    #: Its unused groups.
    pool: Pool
    #: Newest published version of its model; 0 if there is none, or no model.
    clock: int = 0
    #: Newest version of any model.
    newest: int = 0
    #: Groups of the pool that contain a token of an abandoned version.
    abandoned: Sequence[Group] = ()
    #: Its groups that cannot be cut because one of their payload servers does not answer.
    away: Sequence[Group] = ()
    #: Held rejects (``keep_when_few``), longest held first.
    rejects: Sequence[Group] = ()
    #: Name of a filter that the buffer may not run; '' if it may run all.
    unfilterable: str = ""
    #: Job -> error of its filter, with ``on_filter_error: stop``.
    stuck: Mapping[str, str] = field(default_factory=dict)
    #: None: not read yet.
    in_flight: InFlight | None = None

    @property
    def policy(self) -> Policy:
        """Return the staleness policy of the batch; unbounded without a model."""
        one = self.definition
        return Policy(one.mode, one.bound if one.model else UNBOUNDED, one.on_expiry, one.sampler)

    @property
    def n(self) -> int:
        """Return the number of the batch."""
        return self.position.cut + 1

    @property
    def train_version(self) -> int:
        """Return the trainer's version at the first optimizer step of the batch (T2)."""
        if self.definition.driving:
            return train_version(self.clock, self.n, self.position.through, self.definition.per_version)
        return self.clock if self.definition.model else self.newest

    @property
    def floor(self) -> int:
        """Return the oldest version that may bear loss in the batch."""
        return self.policy.floor(self.position.lineage, self.train_version)

    @property
    def first_place(self) -> int:
        """Return the first place of the next cohort in the order of admission."""
        return self.position.cum + self.position.skipped + 1

    @property
    def lanes(self) -> tuple[str, ...]:
        """Return the lanes that may contain jobs of this subscription."""
        return (*self.definition.lanes, Lane.RESUME, Lane.SUSPECT)

    @property
    def end(self) -> End | None:
        """Return the end of the data if it is reached and no job of this subscription is in flight, else None."""
        seen = self.in_flight
        if seen is None or seen.jobs or Lane.TRAIN not in self.definition.lanes:
            return None
        return seen.end
