"""Causes of waits (I8): one record per cause, with typed fields and the text that shows it.

    edge    another part has to act first: ``part`` names it, and `penstock why` follows it
    end     a person has to act; ``action`` says how
    work    something runs, or passes by itself

In Redis a cause is its name and a map of its fields. Free text is for quoted errors alone (``error``). A text continues
"has waited 9 s for ..."; it is rendered where it is read.

Over 500 lines because it is one list of records.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from string import Formatter
from typing import Any, ClassVar, Literal, dataclass_transform, get_args

from penstock.errors import ProtocolError
from penstock.names import AGENT
from penstock.records.codec import LEAST, MOST, checks_of
from penstock.records.disposal import Disposal
from penstock.text import redact, safe_repr, utf8_safe

#: Most characters of a text of a cause, of its name, and most entries of its lists and maps.
MAX_TEXT, MAX_NAME, MAX_ENTRIES = 4000, 100, 64


class Kind(StrEnum):
    """How `penstock why` continues at a cause."""

    EDGE = "edge"
    END = "end"
    WORK = "work"


EDGE, END, WORK = Kind


class About(StrEnum):
    """Causes of a worker that `penstock why` looks for among its others."""

    #: The engine does not serve: a job that engines died of may be the reason.
    ENGINE_DOWN = "engine_down"
    #: An engine refuses a version of the weights.
    REFUSAL = "refusal"
    #: Samples that run do not advance.
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run: trainer, buffer, producer, worker, queue or redis. Name '' is any of the kind."""

    kind: str
    name: str = ""


#: Name -> cause.
REGISTRY: dict[str, type["Cause"]] = {}


@dataclass_transform(frozen_default=True)
class Cause:
    """Base of all causes. Subclasses are frozen dataclasses, registered by their name in snake case.

    Arguments of a subclass:
        part: the kind of part that it is about; for an edge the one that is waited for.
        named_by: the field with the name of that part; or with its kind, where ``part`` is ''.
        subject: fields that tell two causes of one name apart; the clock of a wait restarts when they change.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    subject: ClassVar[tuple[str, ...]]
    about: ClassVar[About | None]
    #: Formatted with the fields and properties; a part in brackets is left out if a value in it is empty. A cause that
    #: needs more overrides ``words``.
    text: ClassVar[str] = ""
    #: The action that a person takes.
    action: ClassVar[str] = ""
    _part: ClassVar[str]
    _named_by: ClassVar[str]

    def __init_subclass__(
        cls, *, kind: Kind, part: str = "", named_by: str = "", subject: str = "", about: About | None = None
    ) -> None:
        dataclass(frozen=True)(cls)
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if "name" not in vars(cls):
            cls.name = name
        cls.kind, cls.subject, cls.about, cls._part, cls._named_by = kind, tuple(subject.split()), about, part, named_by
        REGISTRY[name] = cls

    @property
    def part(self) -> Part | None:
        """Return the part that it is about; None: none is named."""
        named = getattr(self, self._named_by) if self._named_by else ""
        return Part(self._part, named) if self._part else Part(named) if named else None

    @property
    def key(self) -> tuple[Any, ...]:
        """Return its name and subject: the clock of a wait belongs to them."""
        return self.name, *(getattr(self, name) for name in self.subject)

    def fields(self) -> dict[str, Any]:
        """Return its fields as plain values, bounded, with secrets masked."""
        return {name: _plain(getattr(self, name)) for name in field_names(type(self))}

    def words(self) -> str:
        """Render the cause without its action."""
        return self._format(self.text)

    def __str__(self) -> str:
        action = self._format(self.action)
        return f"{self.words()}{action and f'; {action}'}"

    def _format(self, template: str) -> str:
        def has_all(part: re.Match[str]) -> str:
            return "" if any(_is_empty(getattr(self, name)) for name in _names_in(part[1])) else part[1]

        template = _OPTIONAL.sub(has_all, template)
        return template.format(**{name: _shown(name, getattr(self, name)) for name in _names_in(template)})


_OPTIONAL = re.compile(r"\[([^]]*)\]")


def _names_in(template: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(template) if name]


def _is_empty(value: Any) -> bool:
    return value is None or (not value and not isinstance(value, float))


def _shown(name: str, value: Any) -> Any:
    if name == "error":
        return value.rstrip(".")
    if isinstance(value, Mapping):
        return ledger(value)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value


def field_names(cause: type[Cause]) -> list[str]:
    """Return the names of a cause's fields, in order."""
    return [one.name for one in dataclasses.fields(cause)]  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return utf8_safe(redact(value), MAX_TEXT)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in list(value.items())[:MAX_ENTRIES]}
    return [_plain(one) for one in value[:MAX_ENTRIES]] if isinstance(value, list | tuple) else value


def decode(name: Any, fields: Any, what: str) -> Cause:
    """Make a cause of its name and fields, as any version of penstock may have written them.

    One that this version does not know, or with other fields, is an ``Unknown``, shown by name with its fields.

    Raises:
        ProtocolError: they are none, or exceed the bounds; begins with ``what``.
    """
    if not _is_name(name) or not isinstance(fields, dict) or len(fields) > MAX_ENTRIES:
        raise ProtocolError(f"{what} has no cause that penstock wrote: {safe_repr(name)}.")
    if not all(_is_name(key) and _is_plain(one) for key, one in fields.items()):
        raise ProtocolError(f"{what} has fields that a cause cannot have: {safe_repr(fields)}.")
    found = {key: _plain(one) for key, one in fields.items()}
    known = REGISTRY.get(name, Unknown)
    checks = checks_of(known)  # type: ignore[arg-type]
    values = {key: tuple(one) if isinstance(one, list) else one for key, one in found.items()}
    if known is Unknown or not all(checks[key](one) for key, one in values.items() if key in checks):
        return Unknown(name, found)
    try:
        return known(**{key: values[key] for key in field_names(known) if key in values})
    except TypeError:  # a field is missing
        return Unknown(name, found)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME and value.isidentifier()


def _is_plain(value: Any, *, is_inner: bool = False) -> bool:
    if isinstance(value, dict | list | tuple):
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        return not is_inner and len(value) <= MAX_ENTRIES and all(_is_plain(one, is_inner=True) for one in entries)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | str) or (isinstance(value, int) and LEAST <= value <= MOST)


#: Explanations of reasons in the ledger of drops.
_MEANINGS: dict[str, str] = {
    Disposal.NO_LOSS: "no_loss (none of their tokens bears loss)",
    "filter/no_loss": "filter/no_loss (none of their tokens bears loss)",
    Disposal.PAYLOAD_LOST: "payload_lost (their payloads are gone)",
}


def ledger(dropped: Mapping[str, int], most: int = 4) -> str:
    """Render the ledger of drops, largest first: ``filter/zero_std_0.0 12, stale 3``; '' where nothing was dropped."""
    largest = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{_MEANINGS.get(reason, reason)} {count}" for reason, count in largest[:most]]
    if more := sum(count for _, count in largest[most:]):
        words.append(f"others {more}")
    return ", ".join(words)


class Unknown(Cause, kind=WORK, subject="cause"):
    """A cause of another version of penstock."""

    cause: str
    values: Mapping[str, Any]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.cause

    def fields(self) -> dict[str, Any]:
        return dict(self.values)

    def words(self) -> str:
        text = ", ".join(f"{key} {value}" for key, value in self.values.items())
        return utf8_safe(" ".join(f"{self.cause} ({text})".split()), MAX_TEXT)


# Trainers and their adapters.


class BatchNotCut(Cause, kind=EDGE, part="buffer", named_by="subscription", subject="subscription batch"):
    text = "batch {batch} of buffer:{subscription}"
    subscription: str
    batch: int


class RankNotJoined(Cause, kind=EDGE, part="trainer", named_by="subscription", subject="subscription"):
    text = "rank 0 of subscription {subscription} to join"
    subscription: str


class RoleNotStarted(Cause, kind=EDGE, part="trainer", named_by="subscription", subject="subscription role"):
    text = "role {role} of subscription {subscription} to ask for its first batch"
    subscription: str
    role: str


#: Purpose of a meeting of ranks -> its text.
_PURPOSES = {
    "train": "to reach batch {batch}, step {step}",
    "end": "to reach the end",
    "payloads": "to read the payloads of batch {batch}",
    "commit": "to commit batch {batch}",
    "publish": "to join the publication",
    "ask": "to send its requests",
    "gather": "to gather the requests",
    "answer": "to send the answers",
}


class RanksAbsent(Cause, kind=END, part="trainer", subject="purpose batch step"):
    action = "if they do not come, stop all ranks and start them again"
    ranks: tuple[str, ...]
    purpose: Literal["train", "end", "payloads", "commit", "publish", "ask", "gather", "answer"]
    batch: int = 0
    step: int = 0
    #: Name of the cause that an absent rank waits for, by rank.
    blocked: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def words(self) -> str:
        names = [f"{one} (blocked by {self.blocked[one]})" if one in self.blocked else one for one in self.ranks]
        return f"{', '.join(names)} {self._format(_PURPOSES[self.purpose])}"


class RankPublishing(Cause, kind=WORK, part="trainer"):
    #: It does not renew its lease.
    is_silent: bool = False

    def words(self) -> str:
        return f"rank 0{' (its lease is not renewed)' if self.is_silent else ''} to continue its publication"


class ColumnPending(Cause, kind=WORK, part="trainer", subject="column batch"):
    text = "column {column} of batch {batch}, {missing} of {rows} rows"
    column: str
    batch: int
    missing: int
    rows: int


class EvaluationSizeUnknown(Cause, kind=EDGE, part="producer"):
    text = "the producer to report how many prompts an evaluation has"


class EvaluationPending(Cause, kind=WORK, subject="version"):
    text = "the evaluation of version {version} on {datasets}"
    version: int
    datasets: tuple[str, ...]


class ScoresPending(Cause, kind=EDGE, part="worker"):
    text = "workers to score {sequences} sequences in {jobs} jobs[, {unadmitted} more jobs to be admitted]"
    sequences: int
    jobs: int
    #: Jobs that are still to be admitted.
    unadmitted: int = 0


class WorkerNotReady(Cause, kind=EDGE, part="worker", named_by="worker", subject="worker version step"):
    text = "worker {worker} to {step} for version {version}"
    worker: str
    version: int
    step: Literal["enroll", "hold", "receive"]


class WorkerNotFollowing(Cause, kind=EDGE, part="worker", named_by="worker", subject="worker change"):
    text = "worker {worker} to follow the request to change {change}[; it reports: {error}]"
    worker: str
    change: Literal["memory", "health checks", "restart"]
    #: Its state, or why it is in it.
    error: str = ""


class EngineNotBack(Cause, kind=EDGE, part="worker", named_by="worker", subject="worker"):
    text = "the engine of worker {worker}[; it reports: {error}]"
    worker: str
    error: str = ""


class ObjectStoreFailing(Cause, kind=WORK, subject="written"):
    text = "the delta store to {request}; the request is retried[; last error: {error}]"
    #: The object that is written; '' for a listing.
    written: str
    error: str

    @property
    def request(self) -> str:
        return f"write {self.written}" if self.written else "list its objects"


#: Most characters of a user's text.
MAX_USER_TEXT = 200


class UserWait(Cause, kind=WORK, part="trainer", subject="quote"):
    """``Trainer.tell_wait``: a text of the user's code, quoted and cut."""

    quote: str

    def words(self) -> str:
        return f'"{utf8_safe(self.quote, MAX_USER_TEXT)}" (reported by the trainer\'s own code)'


def user_wait(what: str | Cause | None) -> Cause | None:
    """Return what a trainer's own code waits for as a cause; '' and None: nothing."""
    return (UserWait(utf8_safe(what, MAX_USER_TEXT)) if what else None) if isinstance(what, str) else what


# The buffer.


class GroupsMissing(Cause, kind=EDGE):
    have: int
    size: int
    unit: str
    #: Jobs that are queued or running.
    running: int
    #: Rejected groups that are held back.
    rejects: int = 0
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: Samples come in whole multiples of this.
    multiple: int = 1
    #: keep_groups is reached.
    is_full: bool = False

    @property
    def part(self) -> Part:
        return Part("worker" if self.running else "producer")

    def words(self) -> str:
        missing = f"{self.size - self.have} more {self.unit}"
        if self.have >= self.size:
            missing = f"more groups, for samples in a whole multiple of {self.multiple}"
        about = [f"{self.have} of {self.size} ready", f"{self.running} jobs queued or running"]
        about += [f"{self.rejects} rejects held back"] if self.rejects else []
        about += [f"dropped so far: {ledger(self.dropped)}"] if self.dropped else []
        if self.is_full:
            about.append("the batch can never be cut, since no more may be held: raise keep_groups")
        return f"{missing} ({', '.join(about)})"


class FirstBatchTooSmall(Cause, kind=EDGE):
    text = "{missing} more groups before the first batch ({ready} ready, {running} jobs queued or running)"
    missing: int
    ready: int
    running: int

    @property
    def part(self) -> Part:
        return Part("worker" if self.running else "producer")


class CohortNotAdmitted(Cause, kind=EDGE, part="producer"):
    text = "the producer to admit {missing} of {size} jobs of the next cohort[ (dropped so far: {dropped})]"
    missing: int
    size: int
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)


class CohortUnfinished(Cause, kind=EDGE, part="worker"):
    text = "workers to finish {unfinished} of {size} jobs of the cohort[ (dropped so far: {dropped})]"
    unfinished: int
    size: int
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)


class GroupsDue(Cause, kind=EDGE, part="worker", subject="version batch"):
    text = "{running} running groups of version {version} or older, due before batch {batch} may be cut"
    running: int
    version: int
    batch: int


class NoPublication(Cause, kind=EDGE, part="trainer", named_by="subscription", subject="model"):
    text = "the trainer's first publication of model {model}"
    model: str
    subscription: str = ""


class RewindUnpublished(Cause, kind=EDGE, part="trainer", named_by="subscription", subject="subscription"):
    text = "trainer:{subscription} to publish model {model} after its rewind"
    model: str
    subscription: str


class VersionLost(Cause, kind=EDGE, part="trainer", named_by="subscription", subject="version"):
    text = (
        "the next publication of model {model}: groups were generated with version {version}, which Redis lost (the "
        "newest it knows is {known})"
    )
    model: str
    version: int
    known: int
    subscription: str


class BatchUncommitted(Cause, kind=EDGE, part="trainer", named_by="subscription", subject="subscription batch"):
    text = "trainer:{subscription} to commit batch {batch}: {ahead} batches are cut ahead of it"
    subscription: str
    batch: int
    ahead: int


class DataUsedUp(Cause, kind=END, part="producer"):
    text = "more data: data.epochs are over, nothing is in flight, and {have} of {size} {unit} are left"
    action = "raise data.epochs and start again"
    have: int
    size: int
    unit: str


class BatchTooLarge(Cause, kind=END, part="buffer"):
    action = "ask for smaller batches"
    #: The limit, where it is one on samples.
    max_samples: int = 0
    groups: int = 0
    num_bytes: int = 0

    def words(self) -> str:
        if self.max_samples:
            return f"a smaller batch, as this one needs more than {self.max_samples} samples and can never be cut"
        return f"a smaller batch, as the record of these {self.groups} groups has {self.num_bytes:,} bytes"


class FilterUnknown(Cause, kind=END, part="buffer", subject="filter"):
    text = "filter {filter!r}, which is neither built in nor listed in buffer.filters of the buffer"
    action = "add it there and start the buffer again, or define the subscription without it"
    filter: str


class FilterFailing(Cause, kind=END, part="buffer"):
    text = "a filter that does not fail: {error} ({groups} groups are blocked; on_filter_error is stop)"
    action = "correct it and start the buffer again"
    groups: int
    error: str


class CutRepeated(Cause, kind=WORK, part="buffer"):
    text = "the next attempt to cut, as something changed meanwhile"


class NoLossTokens(Cause, kind=WORK, part="worker"):
    text = "groups with a token that bears loss: {groups} of batch {batch} had none and were dropped ({dropped})"
    batch: int
    groups: int
    dropped: Mapping[str, int]


class CohortSkipped(Cause, kind=WORK, part="buffer"):
    text = "the cohort after {places} jobs of which none is left"
    places: int


class GroupsLate(Cause, kind=WORK, part="worker"):
    text = (
        "{groups} groups that run for longer than {limit_s:g} s (group {job} has {committed} of {wanted} samples; "
        "on_group_timeout is {policy})"
    )
    groups: int
    limit_s: float
    #: The oldest.
    job: str
    committed: int
    wanted: int
    policy: str


class PayloadServersAway(Cause, kind=END, subject="servers"):
    text = "payload servers to answer: {servers}[ ({error})][; {groups} groups are held back]"
    action = "start them again, or give one up with `penstock payloads lose NAME`"
    servers: tuple[str, ...]
    #: Groups that are held back for them.
    groups: int = 0
    error: str = ""

    def _format(self, template: str) -> str:
        return super()._format(template).replace("NAME", next(iter(self.servers), "NAME"))


class TrainerAbsent(Cause, kind=EDGE, part="trainer", named_by="subscription", subject="subscription"):
    subscription: str
    groups: int
    batches: int
    #: 0: without a limit.
    keep_s: float = 0.0

    def words(self) -> str:
        limit = f"for {self.keep_s:g} s" if self.keep_s else "without a limit (keep_s is not set)"
        held = f"{self.groups} groups and {self.batches} cut batches are held for it {limit}"
        return f"its trainer to join: {held}; `penstock subs drop {self.subscription}` releases them"


class RecorderAbsent(Cause, kind=END):
    text = "a recorder: {groups} groups are not recorded and are kept for history.patience_s"
    action = "start one with `penstock recorder`"
    groups: int


class EvaluationsUnread(Cause, kind=END, part="trainer"):
    text = (
        "a consumer of {evaluations} finished evaluations ({groups} groups): no subscription reads lane eval; after "
        "eval_ttl_s = {ttl_s:g} s each is written to eval.jsonl and released"
    )
    action = "read them with Trainer(...).evaluations"
    evaluations: int
    groups: int
    ttl_s: float


class FileUnwritable(Cause, kind=END, subject="path"):
    text = "{path} to be writable ({error})"
    action = "move what is in its place, or let this user write it"
    path: str
    error: str


# The producer.


class GateClosed(Cause, kind=EDGE, part="trainer", named_by="subscription", subject="subscription"):
    text = "trainer:{subscription} to publish (blocked by the staleness limit: {taken} of {places} groups in flight)"
    subscription: str
    taken: int
    places: int


class NoDrivingTrainer(Cause, kind=EDGE, part="trainer"):
    text = "a trainer that drives the clock to join"


class DataExhausted(Cause, kind=END, part="producer"):
    text = "more data: all {prompts} prompts of data.epochs are admitted"
    action = "raise data.epochs and start again"
    prompts: int


class JobsFailing(Cause, kind=END, part="producer", subject="code"):
    text = "a correction of the run's code or data: {why}"
    action = "correct the code of the run, or its data, and start the producer again"
    #: Dataset and reward.
    code: str
    jobs: int
    failed: int
    refused: int
    max_share: float
    error: str

    @property
    def why(self) -> str:
        """Return why admission stops, and the run ends."""
        last = f"of the last {self.jobs} jobs of {self.code}"
        why = f"all {last} were refused before generation"
        if self.failed:
            why = f"{self.failed} {last} failed because of it, and reward.max_died_share is {self.max_share:g}"
        return f"{why}{self._format('[; last error: {error}]')}"


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


class StepLong(Cause, kind=END, part="trainer", named_by="subscription"):
    text = "trainer {subscription} has been in one step for {idle_s:.0f} s; the one before took {step_s:.1f} s"
    action = "one of its ranks may hang: see their logs, and `py-spy dump --pid PID` of each (rank 0 has pid {pid})"
    subscription: str
    idle_s: float
    step_s: float
    pid: int


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
