"""Causes of waits of workers and their engines; of Redis and disks; and those that `penstock why` adds."""

from typing import Literal, get_args

from penstock.names import AGENT
from penstock.records.cause import EDGE, END, WORK, About, Cause

# Workers and their engines.


class NoJobs(Cause, kind=EDGE, part="producer", subject="version"):
    text = "the producer to admit jobs that an engine of version {version} may start"
    version: int


#: Phase of the start of an engine -> its text.
_PHASES = {
    "imports": "importing its packages",
    "processes": "starting its processes",
    "weights": "loading weights",
    "kv_cache": "allocating the KV cache",
    "cuda_graphs": "capturing CUDA graphs",
    "setup": "preparing to serve",
    "port": "opening its port",
}


class EngineStarting(Cause, kind=WORK, part="worker", about=About.ENGINE_DOWN):
    text = "its engine to start[: {progress}]"
    #: By its log; '': not known.
    phase: Literal["imports", "processes", "weights", "kv_cache", "cuda_graphs", "setup", "port", ""] = ""
    #: Progress of the phase; 100: not known, or done.
    percent: int = 100

    @property
    def progress(self) -> str:
        """Return the text of its phase and percentage; '' if no phase is known."""
        text = _PHASES.get(self.phase, "")
        return f"{text} ({self.percent} %)" if text and self.percent < 100 else text


class EngineRestarting(Cause, kind=WORK, part="worker", about=About.ENGINE_DOWN):
    text = "its engine to be restarted[; last error: {error}]"
    error: str = ""


class EngineCrashLoop(Cause, kind=END, part="worker", about=About.ENGINE_DOWN):
    text = (
        "its engine, which is in a crash loop: it failed {failures} times in {window_s:g} s and is retried every "
        "{retry_s:g} s[; last error: {error}]"
    )
    action = "see the engine's log"
    error: str
    failures: int
    window_s: float
    retry_s: float


class EngineAway(Cause, kind=END, part="worker", subject="url"):
    text = "the engine at {url} to answer again[; last error: {error}]"
    action = "start it again, or correct engine.url"
    url: str
    error: str


class EngineSilent(Cause, kind=END, part="worker", subject="sample", about=About.HANG):
    text = "the engine, which has sent nothing for sample {sample}[, and {more} more,] for {seconds:.0f} s"
    action = "see the engine's log; after engine.request_timeout_s the request is given up"
    sample: str
    seconds: float
    #: Other requests that hang.
    more: int = 0


class EventLoopStuck(Cause, kind=END, part="worker", about=About.HANG):
    text = "its event loop, which has been stuck for {seconds:g} s in {place}; other workers take over its jobs"
    action = "correct that code, or move it to a process of its own"
    seconds: float
    #: FILE:LINE (FUNCTION).
    place: str


class VersionRefused(Cause, kind=END, part="worker", subject="model version", about=About.REFUSAL):
    text = "a version of {model} that can be loaded; {version} cannot: {error}"
    action = "publish a version that fits"
    model: str
    version: int
    error: str


class VersionSetAside(Cause, kind=END, part="worker", subject="model version", about=About.REFUSAL):
    text = "a new publication of {model}: engines crashed on version {version} before it gave output: {error}"
    action = "publish again"
    model: str
    version: int
    error: str


class VersionNotServed(Cause, kind=END, part="trainer", subject="version", about=About.REFUSAL):
    text = "version {version}, which this machine can neither fetch over HTTP nor read"
    action = "set serving.enabled for its trainer too, or publish to a folder or store that this machine sees"
    version: int


class WeightsOverLimit(Cause, kind=END, part="worker", subject="limit folder", about=About.REFUSAL):
    text = "room for {num_bytes:,} bytes of weights in {folder}, beside {used:,} bytes that engines use"
    action = "raise {limit}"
    #: The key that bounds the folder.
    limit: Literal["serving.max_bytes", "worker.copies_bytes"]
    folder: str
    num_bytes: int
    used: int


class WeightsDiskFull(Cause, kind=END, part="worker", subject="folder", about=About.REFUSAL):
    text = "room for {num_bytes:,} bytes of weights on the disk of {folder}, which has {free:,}"
    action = "make room there, or set serving.folder or worker.copies_dir to another disk"
    folder: str
    num_bytes: int
    free: int


class LockHolderStalled(Cause, kind=END, part="worker", subject="process path", about=About.REFUSAL):
    action = "resume it (kill -CONT), or end it"
    #: Process id; 0: not known.
    process: int
    path: str

    def words(self) -> str:
        return f"{process_name(self.process)}, which is stalled and holds {self.path}"


class VersionRetried(Cause, kind=WORK, part="worker", subject="version", about=About.REFUSAL):
    text = "version {version} to be loaded in another attempt; last error: {error}"
    version: int
    error: str


class VersionDraining(Cause, kind=WORK, part="worker", subject="version"):
    text = "{running} running samples to end before version {version} is loaded"
    version: int
    running: int = 0


class VersionLoading(Cause, kind=WORK, part="worker", subject="version"):
    text = "version {version} to be loaded"
    version: int


class CohortRunning(Cause, kind=WORK, part="worker", subject="cohort version"):
    text = "the cohort admitted at version {cohort} to end before version {version} is loaded"
    cohort: int
    version: int


class EvaluationRunning(Cause, kind=WORK, part="worker", subject="evaluated version"):
    text = (
        "the evaluation of version {evaluated} ({prompts} prompts left) to end before version {version} is loaded "
        "(data.eval_pinned)"
    )
    evaluated: int
    prompts: int
    version: int


class TransferUndecided(Cause, kind=EDGE, part="trainer", subject="version"):
    text = "the trainer to decide which workers receive version {version}"
    #: VERSION-REV.
    version: str


class WeightsUnwritten(Cause, kind=WORK, part="trainer", subject="version"):
    text = "the folder of version {version} to be written"
    version: int


class WeightsFetched(Cause, kind=WORK, part="worker", subject="version"):
    version: int
    #: The next step: an offer, the index, or the files.
    step: Literal["offer", "index", "files"] = "files"
    #: Bytes that are missing, of all; 0 of 0 before they are known.
    missing: int = 0
    size: int = 0

    def words(self) -> str:
        left = f": {self.missing:,} of {self.size:,} bytes are missing" if self.size else ""
        left = {"offer": ": it is not offered yet", "index": ": its index is missing"}.get(self.step, left)
        return f"version {self.version} to be fetched over HTTP{left}"


class CopyMade(Cause, kind=WORK, part="worker", subject="version"):
    text = "a copy of version {version} on this machine"
    version: int


class FolderLocked(Cause, kind=WORK, part="worker", subject="folder process"):
    #: Process id; 0: not known.
    process: int
    folder: str

    def words(self) -> str:
        return f"{process_name(self.process)}, which fetches weights into {self.folder}"


def process_name(pid: int) -> str:
    """Name a process of this machine; 0: it is not known."""
    return f"process {pid} of this machine" if pid else "another process of this machine"


class MemoryWanted(Cause, kind=WORK, part="worker"):
    text = "{running} running samples to end before the engine gives its memory to the trainer"
    running: int = 0


class MemoryOffloaded(Cause, kind=END, part="trainer"):
    action = "onload it with the trainer, or with `penstock engines onload`"
    tags: tuple[str, ...] = ()
    #: trainer NAME or operator NAME.
    by: str = ""

    def words(self) -> str:
        return f"{', '.join(self.tags) or 'the engine memory'} to be onloaded{self.by and f' by {self.by}'}"


class ServiceCalled(Cause, kind=WORK, part="worker", subject="service url"):
    """An answer of a service, such as a judge or a teacher."""

    text = "an answer of {service} at {url}[, and {more} more][; last error: {error}]"
    service: str
    url: str
    #: Other calls that are open.
    more: int = 0
    error: str = ""


class AgentAwaited(Cause, kind=END, part="worker", subject="sample"):
    """An agent that opens an episode."""

    text = "an agent, for sample {sample}[ and {more} more]"
    action = "start agents that open episodes at `penstock serve`, or see why they do not"
    sample: str
    #: Other episodes without an agent.
    more: int = 0
    error: str = ""


#: Methods of an environment.
EnvironmentCall = Literal["reset", "step", "snapshot", "restore", "close"]
#: Kind of user code -> the text of a call.
_CODE = {
    "reward": "reward {function}",
    "hook": "{function}",
    **{name: name + " of environment {function}" for name in get_args(EnvironmentCall)},
}


class CodeCalled(Cause, kind=WORK, part="worker", subject="code function scope item"):
    """The user's code, or a reward."""

    text = "{call} of {scope} {item}[, and {more} more][; last error: {error}]"
    code: Literal["reward", "hook", EnvironmentCall]
    #: Name of the reward, hook or environment.
    function: str
    scope: Literal["sample", "group"]
    #: Id of the sample or group.
    item: str
    #: Other calls that are open.
    more: int = 0
    error: str = ""

    @property
    def limit(self) -> str:
        """Return the key of an environment's time limit."""
        return "agents.idle_s" if self.function == AGENT else "rollout.environment_timeout_s"

    @property
    def label(self) -> str:
        """Return the sample or group and the code that is called, as errors begin with them."""
        return f"{self.scope} {self.item}: {self.call}"

    @property
    def call(self) -> str:
        return self._format(_CODE[self.code])


class NoVerifiers(Cause, kind=END, part="worker"):
    text = "a verifier, for {checks} checks: none is in the verifier pool"
    action = "start `penstock verifiers`"
    checks: int


class VerifiersBusy(Cause, kind=WORK, part="worker"):
    text = "a free verifier, for {checks} checks: all {verifiers} of the pool are busy"
    checks: int
    verifiers: int


class ChecksRunning(Cause, kind=WORK, part="worker", subject="verifiers"):
    text = "{checks} checks by {verifiers}"
    checks: int
    verifiers: tuple[str, ...]


class NoChecks(Cause, kind=EDGE, part="worker"):
    text = "checks, from the workers"


# Redis, disks and leases.


class RedisFull(Cause, kind=END, part="redis"):
    text = "room in Redis[ (for {verb!r})]"
    action = "raise its maxmemory, add payload servers or let trainers catch up"
    #: The command that had no room; '': any.
    verb: str = ""


class RedisDiskFull(Cause, kind=END, part="redis"):
    text = "room on the disk of Redis' append-only file, as no part can write before"
    action = "make room there"


class RedisKeysLost(Cause, kind=END, part="redis"):
    action = (
        "restore Redis from its append-only file or a backup: parts then continue, trainers from a checkpoint that "
        "fits; or stop all parts and begin anew with `penstock run --fresh`"
    )
    keys: tuple[str, ...] = ()
    jobs: int = 0
    admitted: int = 0
    error: str = ""

    @property
    def lost(self) -> str:
        """Name the keys and jobs."""
        jobs = (f"{self.jobs} of {self.admitted} admitted jobs",) if self.jobs else ()
        return ", ".join((*self.keys, *jobs))

    def words(self) -> str:
        return f"what Redis lost: {self.lost or self.error}"


class RedisEvicts(Cause, kind=END, part="redis"):
    text = "maxmemory-policy noeviction: it is {policy}, so Redis deletes keys of the run when it is full"
    action = "set it in Redis' configuration"
    policy: str


class RecordUnreadable(Cause, kind=END, part="redis"):
    text = "a repair of what Redis holds: {error}"
    action = "find out what else writes to this Redis"
    error: str


class ServerAway(Cause, kind=END, part="redis"):
    text = "a server that does not answer: {error}"
    action = "start it again"
    error: str


class RoomOnDisk(Cause, kind=END):
    text = "room on a disk: {error}"
    action = "make room there"
    error: str


class LeaseHeld(Cause, kind=WORK, subject="of"):
    text = "the lease of the current {of} to end"
    of: Literal["buffer", "recorder", "trainer"]


# Added by `penstock why` for parts that report nothing.


class PartSilent(Cause, kind=END):
    text = "a restart: it has been silent since then, killed or frozen[ (pid {pid} on {host})]"
    action = "start it again"
    pid: int = 0
    host: str = ""


class NoPart(Cause, kind=END, named_by="component"):
    text = "no {component} is running"
    action = "start one with `penstock {component}`"
    component: str


class PartStarting(Cause, kind=WORK, named_by="component"):
    text = "no {component} is working: the one on {host} (pid {pid}) has just started, or was just killed"
    component: str
    host: str
    pid: int


class PartGone(Cause, kind=END, named_by="component"):
    text = "no {component} is running: the one on {host} (pid {pid}) has been silent for {silent_s:.0f} s"
    action = "start it again"
    component: str
    host: str
    pid: int
    silent_s: float


class NoTrainer(Cause, kind=END, part="trainer", named_by="subscription"):
    text = "no trainer[ of subscription {subscription}] has joined yet"
    action = "start one"
    subscription: str = ""


class TrainerGone(Cause, kind=END, part="trainer", named_by="subscription"):
    action = "start it again[, or drop subscription {droppable}]"
    subscription: str
    #: Seconds since its last step; None: it made none.
    idle_s: float | None = None
    only_evaluates: bool = False
    #: Whether it publishes the run's versions, so that nothing is trained without it.
    drives: bool = False

    @property
    def droppable(self) -> str:
        """Return its subscription if the run can continue without it, else ''."""
        return "" if self.drives else self.subscription

    def words(self) -> str:
        if self.only_evaluates:
            return "no trainer reads evaluations"
        return self._format("trainer {subscription} is gone[; its last step was {idle_s:.0f} s ago]")


class LanePaused(Cause, kind=END, part="queue"):
    action = "`penstock resume {lane}` continues it"
    lane: str
    jobs: int
    by: str = ""
    paused_s: float = 0.0

    def words(self) -> str:
        who = f"{self.by}, {self.paused_s:.0f} s ago" if self.by else "a person"
        return f"lane {self.lane} is paused by {who}, with {self.jobs} jobs in it"


class WorkerSick(Cause, kind=END, part="worker", named_by="worker"):
    text = "worker {worker} is in the state {state}[: {error}]"
    action = "see its log"
    worker: str
    state: str
    error: str = ""


class CrashSuspects(Cause, kind=END, part="worker"):
    text = "engines died of {jobs} before (lane suspect)"
    action = "see them with `penstock jobs show NAME`, and `penstock jobs cancel NAME` if it is the prompt"
    jobs: tuple[str, ...]


class JobsDelayed(Cause, kind=WORK, part="queue"):
    text = "{jobs} jobs are retried later"
    jobs: int


class Working(Cause, kind=WORK, named_by="component"):
    text = (
        "{component}[ {who}] is at work[: {samples} samples are being generated][; its last step was {idle_s:.0f} "
        "s ago]"
    )
    component: str
    who: str = ""
    #: Samples that are being generated.
    samples: int = 0
    #: Seconds since its last step.
    idle_s: float | None = None


class Circle(Cause, kind=END):
    text = "which leads back to {who}: these wait for one another"
    action = "restart one of them"
    who: str


class NotReported(Cause, kind=END, part="buffer"):
    text = "no buffer reports what it waits for"
    action = "see whether one runs (`penstock why`)"
