"""Names of every Redis key of a run. All share one hash slot: ``{RUN}`` is a Redis Cluster hash tag."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.names import check_name

#: Name of the control Redis among the payload servers, if it holds payloads too.
CONTROL = "control"

#: The one consumer group on every job stream.
GROUP = "workers"


class _Key:
    """One key; it has the name of the attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, keys: "Keys", owner: type) -> str:
        return keys.of(self._name)


class _KeyOf:
    """A function that returns the key of one subscription, model, job, ...: ``ATTRIBUTE:NAME``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, keys: "Keys", owner: type) -> Callable[[str], str]:
        return lambda name: keys.of(f"{self._name}:{name}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one run."""

    run: str

    def __post_init__(self) -> None:
        check_name("run", self.run)

    @property
    def prefix(self) -> str:
        return f"penstock:{{{self.run}}}:"

    def of(self, name: str) -> str:
        return self.prefix + name

    schema = _Key()

    # These take a lane.
    jobs = _KeyOf()
    #: Queued jobs, in the order in which they are leased.
    queued = _KeyOf()
    unfinished = _KeyOf()

    # These take a job, or a sample.
    group = _KeyOf()
    meta = _KeyOf()
    partial = _KeyOf()

    # These take a subscription.
    batches = _KeyOf()
    sub = _KeyOf()
    owner = _KeyOf()
    columns = _KeyOf()
    columns_lost = _KeyOf()
    agree = _KeyOf()
    #: Orders of rank 0 to its other ranks during a publication.
    orders = _KeyOf()
    trained = _KeyOf()

    # These take a model.
    weights = _KeyOf()
    #: Checkpoint folders completed after their version was announced.
    whole = _KeyOf()
    transfer = _KeyOf()
    transfers = _KeyOf()
    pins = _KeyOf()
    loading = _KeyOf()
    memory = _KeyOf()
    trials = _KeyOf()
    aside = _KeyOf()
    steps = _KeyOf()

    # These take a worker.
    asker = _KeyOf()
    verdicts = _KeyOf()

    delayed = _Key()
    dead = _Key()
    ready = _Key()
    inflight = _Key()
    samples = _Key()
    #: The ledger of tokens, by home lane and account.
    tokens = _Key()
    subs = _Key()
    clock = _Key()
    source = _Key()
    leader = _Key()
    epoch = _Key()
    cohorts = _Key()
    retiring = _Key()
    #: Retiring groups that the recorder has not recorded yet.
    unrecorded = _Key()
    recorder = _Key()
    history = _Key()
    bodies = _Key()
    gate = _Key()
    paused = _Key()
    paused_by = _Key()
    workers = _Key()
    #: Checks that workers are asked to run, and their results.
    looks = _Key()
    verifiers = _Key()
    #: Name of the rq queue of checks; rq adds its own prefix.
    checks = _Key()
    fleet = _Key()
    trainers = _Key()
    #: Presence of producers and buffers.
    parts = _Key()
    waits = _Key()
    held = _Key()
    counters = _Key()
    ends = _Key()
    servers = _Key()
    wake = _Key()
    reclaimer = _Key()

    def payload(self, sample: str, token: str) -> str:
        return self.of(f"payload:{sample}:{token}")

    def side(self, sample: str, token: str, name: str) -> str:
        return self.of(f"side:{sample}:{token}:{name}")

    def column(self, sub: str, n: int, digest: str, gen: int, name: str) -> str:
        return self.of(f"column:{sub}:{n}:{digest}:{gen}:{name}")

    def offer(self, model: str, version: int, index: str) -> str:
        """Return the key of a version's offer over HTTP."""
        return self.of(f"offer:{model}:v{version}-{index}")

    def done(self, dataset: str, epoch: int) -> str:
        return self.of(f"done:{dataset}/{epoch}")

    def rates(self, dataset: str, chunk: int) -> str:
        """Latest results of 4,096 prompts."""
        return self.of(f"rates:{dataset}/{chunk}")
