"""Names of every Redis key of a run. All share one hash slot: ``{RUN}`` is a Redis Cluster hash tag."""

from dataclasses import dataclass

from penstock.names import check_name

#: Name of the control Redis among the payload servers, if it holds payloads too.
CONTROL = "control"

#: The one consumer group on every job stream.
GROUP = "workers"


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

    @property
    def schema(self) -> str:
        return self.of("schema")

    def jobs(self, lane: str) -> str:
        return self.of(f"jobs:{lane}")

    def queued(self, lane: str) -> str:
        """Queued jobs of a lane, in the order in which they are leased."""
        return self.of(f"queued:{lane}")

    def group(self, job: str) -> str:
        return self.of(f"group:{job}")

    def meta(self, job: str) -> str:
        return self.of(f"meta:{job}")

    def payload(self, sample: str, token: str) -> str:
        return self.of(f"payload:{sample}:{token}")

    def partial(self, sample: str) -> str:
        return self.of(f"partial:{sample}")

    def batches(self, sub: str) -> str:
        return self.of(f"batches:{sub}")

    def sub(self, name: str) -> str:
        return self.of(f"sub:{name}")

    def owner(self, sub: str) -> str:
        return self.of(f"owner:{sub}")

    def columns(self, sub: str) -> str:
        return self.of(f"columns:{sub}")

    def column(self, sub: str, n: int, digest: str, gen: int, name: str) -> str:
        return self.of(f"column:{sub}:{n}:{digest}:{gen}:{name}")

    def columns_lost(self, sub: str) -> str:
        return self.of(f"columns_lost:{sub}")

    def agree(self, sub: str) -> str:
        return self.of(f"agree:{sub}")

    def orders(self, sub: str) -> str:
        """Orders of rank 0 to its other ranks during a publication."""
        return self.of(f"orders:{sub}")

    def weights(self, model: str) -> str:
        return self.of(f"weights:{model}")

    def whole(self, model: str) -> str:
        """Checkpoint folders completed after their version was announced."""
        return self.of(f"whole:{model}")

    def transfer(self, model: str) -> str:
        return self.of(f"transfer:{model}")

    def transfers(self, model: str) -> str:
        return self.of(f"transfers:{model}")

    def offer(self, model: str, version: int, index: str) -> str:
        """Return the key of a version's offer over HTTP."""
        return self.of(f"offer:{model}:v{version}-{index}")

    def pins(self, model: str) -> str:
        return self.of(f"pins:{model}")

    def loading(self, model: str) -> str:
        return self.of(f"loading:{model}")

    def memory(self, model: str) -> str:
        return self.of(f"memory:{model}")

    def trials(self, model: str) -> str:
        return self.of(f"trials:{model}")

    def aside(self, model: str) -> str:
        return self.of(f"aside:{model}")

    def steps(self, model: str) -> str:
        return self.of(f"steps:{model}")

    def done(self, dataset: str, epoch: int) -> str:
        return self.of(f"done:{dataset}/{epoch}")

    def rates(self, dataset: str, chunk: int) -> str:
        """Latest results of 4,096 prompts."""
        return self.of(f"rates:{dataset}/{chunk}")

    @property
    def delayed(self) -> str:
        return self.of("delayed")

    @property
    def dead(self) -> str:
        return self.of("dead")

    @property
    def ready(self) -> str:
        return self.of("ready")

    @property
    def inflight(self) -> str:
        return self.of("inflight")

    @property
    def samples(self) -> str:
        return self.of("samples")

    @property
    def tokens(self) -> str:
        """The ledger of tokens, by home lane and account."""
        return self.of("tokens")

    @property
    def subs(self) -> str:
        return self.of("subs")

    @property
    def clock(self) -> str:
        return self.of("clock")

    @property
    def source(self) -> str:
        return self.of("source")

    @property
    def leader(self) -> str:
        return self.of("leader")

    @property
    def epoch(self) -> str:
        return self.of("epoch")

    @property
    def cohorts(self) -> str:
        return self.of("cohorts")

    def unfinished(self, lane: str) -> str:
        return self.of(f"unfinished:{lane}")

    @property
    def retiring(self) -> str:
        return self.of("retiring")

    @property
    def unrecorded(self) -> str:
        """Retiring groups that the recorder has not recorded yet."""
        return self.of("unrecorded")

    @property
    def recorder(self) -> str:
        return self.of("recorder")

    @property
    def history(self) -> str:
        return self.of("history")

    def trained(self, sub: str) -> str:
        return self.of(f"trained:{sub}")

    @property
    def bodies(self) -> str:
        return self.of("bodies")

    @property
    def gate(self) -> str:
        return self.of("gate")

    @property
    def paused(self) -> str:
        return self.of("paused")

    @property
    def paused_by(self) -> str:
        return self.of("paused_by")

    @property
    def workers(self) -> str:
        return self.of("workers")

    @property
    def looks(self) -> str:
        """Checks that workers are asked to run, and their results."""
        return self.of("looks")

    @property
    def verifiers(self) -> str:
        return self.of("verifiers")

    @property
    def checks(self) -> str:
        """Name of the rq queue of checks; rq adds its own prefix."""
        return self.of("checks")

    def asker(self, worker: str) -> str:
        return self.of(f"asker:{worker}")

    def verdicts(self, worker: str) -> str:
        return self.of(f"verdicts:{worker}")

    @property
    def fleet(self) -> str:
        return self.of("fleet")

    @property
    def trainers(self) -> str:
        return self.of("trainers")

    @property
    def parts(self) -> str:
        """Presence of producers and buffers."""
        return self.of("parts")

    @property
    def waits(self) -> str:
        return self.of("waits")

    @property
    def held(self) -> str:
        return self.of("held")

    @property
    def counters(self) -> str:
        return self.of("counters")

    @property
    def ends(self) -> str:
        return self.of("ends")

    @property
    def servers(self) -> str:
        return self.of("servers")

    def side(self, sample: str, token: str, name: str) -> str:
        return self.of(f"side:{sample}:{token}:{name}")

    @property
    def wake(self) -> str:
        return self.of("wake")

    @property
    def reclaimer(self) -> str:
        return self.of("reclaimer")
