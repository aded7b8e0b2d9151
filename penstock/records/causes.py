"""Causes of waits of trainers, the buffer and the producer."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from penstock.errors import ProtocolError
from penstock.records import worker_causes  # noqa: F401 (defines further causes)
from penstock.records.cause import (
    EDGE,
    END,
    MAX_ENTRIES,
    MAX_NAME,
    WORK,
    Cause,
    Part,
    Unknown,
    field_names,
    ledger,
    plain,
    snake_case,
)
from penstock.records.codec import LEAST, MOST, checks_of
from penstock.text import safe_repr, utf8_safe

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
    "end": "to reach the checkpoint or the end",
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


#: Name -> cause.
REGISTRY: Mapping[str, type[Cause]] = {snake_case(one.__name__): one for one in Cause.__subclasses__()}


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
    found = {key: plain(one) for key, one in fields.items()}
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
