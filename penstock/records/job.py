"""A job: admitted by a producer, answered by a worker."""

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from penstock.errors import ProtocolError
from penstock.names import MAX_ANSWERS, Lane
from penstock.records.codec import copy_plain
from penstock.records.record import Record
from penstock.text import safe_repr

#: Most characters of the attempts of one job.
MAX_TRIES_BYTES = 16 * 1024

#: Milliseconds; up to the year 5138.
_TIME = r"[0-9]{1,14}"
_ONE = re.compile(rf"([a-z_]{{1,32}}):([^:;]{{0,255}}):({_TIME})(?::({_TIME}):([^:;]{{1,100}}))?")
_EARLIER = re.compile(r"\+([0-9]{1,18});")


class TryEnd(StrEnum):
    """Say how an attempt ended. ``failed`` and ``crashed`` may be followed by the reason, after a blank.

    The field ``tr`` of the hash ``group:JOB`` lists attempts, ``LANE:WORKER:LEASED_MS`` each, separated by ``;``, and
    followed by ``:ENDED_MS:HOW`` if it ended; an attempt that committed the last sample has no end of its own, as the
    group records when it was ready. ``+N;`` at the beginning stands for N earlier attempts that are omitted.
    """

    #: It is still running.
    OPEN = ""
    #: With the last sample committed.
    COMMITTED = "committed"
    #: The worker handed it back: it was stopped, or its engine was restarted.
    RELEASED = "released"
    #: Its worker ended by an error, and handed it back.
    DIED = "died"
    #: The reply to its lease was lost, and the worker handed it back.
    UNHEARD = "unheard"
    #: Its lease was not renewed.
    RECLAIMED = "reclaimed"
    #: The engine crashed under it.
    CRASHED = "crashed"
    #: Reward, environment, engine or arrays failed; the ``JobFailure`` follows.
    FAILED = "failed"
    #: The group took too long, and was closed with the committed samples, or dropped.
    SHORTENED = "shortened"
    TIMED_OUT = "timed_out"
    #: An operator cancelled it.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Try:
    """One lease of a job."""

    #: Number of the attempt, from 1.
    number: int
    lane: str
    worker: str
    #: Unix seconds.
    leased_s: float
    #: Unix seconds; 0: it is still running, or not known.
    ended_s: float
    #: A ``TryEnd``, with what follows it.
    end: str


def tries_of(text: str, what: str, *, ready_s: float = 0.0) -> list[Try]:
    """Parse the attempts in a field ``tr``, the earliest first; [] for ''.

    Args:
        ready_s: when the group was ready (Unix seconds); 0: it is not.

    Raises:
        ProtocolError: the field is invalid; begins with ``what``.
    """
    if not text:
        return []
    earlier = _EARLIER.match(text)
    found = [_ONE.fullmatch(one) for one in text[earlier.end() if earlier else 0 :].split(";")]
    if len(text) > MAX_TRIES_BYTES or not all(found):
        raise ProtocolError(f"{what} holds tries that no lease wrote: {safe_repr(text[:200])}.")
    first = 1 + (int(earlier[1]) if earlier else 0)
    return [_try(number, one, ready_s) for number, one in enumerate(found, first) if one]


def _try(number: int, found: re.Match[str], ready_s: float) -> Try:
    lane, worker, leased, ended, how = found.groups()
    ended_s, end = (int(ended) / 1000, how) if ended else (ready_s, TryEnd.COMMITTED if ready_s else TryEnd.OPEN)
    return Try(number, lane, worker, int(leased) / 1000, ended_s, end)


class JobState(StrEnum):
    """State of a job and its group: the field ``st`` of the hash ``group:JOB``."""

    QUEUED = "queued"
    LEASED = "leased"
    #: It failed and will be retried.
    DELAYED = "delayed"
    #: It is a dead letter.
    DEAD = "dead"
    #: Its samples are committed, and subscriptions may use them.
    READY = "ready"
    #: It is being deleted.
    RETIRING = "retiring"


class JobFailure(StrEnum):
    """Why an attempt of a job failed; the reason of a dead letter."""

    REWARD_RAISED = "reward_raised"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_NOT_A_NUMBER = "reward_not_a_number"
    #: More bytes than the verifier pool, or a sample's record, may have.
    REWARD_TOO_LARGE = "reward_too_large"
    ENVIRONMENT_RAISED = "environment_raised"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    #: A function that section ``hooks`` names raised.
    HOOK_RAISED = "hook_raised"
    HOOK_TIMEOUT = "hook_timeout"
    #: It set logprobs or versions of tokens that were not generated.
    HOOK_UNPROVEN = "hook_unproven"
    #: A frozen model that scores samples gave no log-probabilities.
    MODEL_FAILED = "model_failed"
    ENGINE_ERROR = "engine_error"
    #: Arrays of a sample that contradict each other.
    PAYLOAD_ERROR = "payload_error"
    #: No worker can answer it.
    REFUSED = "refused"
    #: Any other error of a worker.
    RAISED = "raised"
    #: Engines or workers crashed on it.
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Job(Record):
    """One prompt to be answered ``n`` times."""

    #: ``DATASET/EPOCH/INDEX``; deterministic, so that a second admission is detected.
    id: str
    #: Requested answers; sample ids are ``ID/k`` with 0 <= k < n.
    n: int = field(metadata={"check": lambda n: type(n) is int and 1 <= n <= MAX_ANSWERS})
    #: The prompt as text, template applied; or None if ``prompt_ids`` is given.
    prompt: str | None = None
    #: The prompt as token ids.
    prompt_ids: list[int] | None = None
    #: Label that the reward compares with, as text; a label of another type as JSON.
    label: str = ""
    #: Passed to rewards and environments.
    metadata: dict[str, Any] = field(default_factory=dict)
    #: SGLang names: max_new_tokens, temperature, stop, stop_token_ids, ignore_eos, ...
    sampling: dict[str, Any] = field(default_factory=dict)
    #: Home lane: train, eval or score.
    lane: str = Lane.TRAIN
    #: Version at admission; no engine with an older one may start it (T12).
    not_before: int = 0
    #: A built-in name, or an import path ``module:callable`` that the worker's configuration names too; None: the
    #: run's reward.
    reward: str | None = None
    #: Import path of an environment that the worker's configuration names too; None: a single turn.
    environment: str | None = None
    #: Given answers, as text or token ids, of samples 0, 1, ... The others of the ``n`` are generated.
    answers: list[Any] = field(default_factory=list)
    #: The label if it is not text: a number, list or map as the dataset has it; None: ``label`` is all.
    label_value: Any = None
    #: Image files of the prompt in the order of their placeholders, as bytes.
    images: list[bytes] = field(default_factory=list)

    def copy_for_user(self) -> "Job":
        """Return a copy that user code may change: it shares no list or map with this job."""
        return replace(self, **{name: copy_plain(getattr(self, name)) for name in _LISTS_AND_MAPS})

    @property
    def raw_label(self) -> Any:
        """The label with the type that it has in the dataset."""
        return self.label if self.label_value is None else self.label_value

    @property
    def dataset(self) -> str:
        return self.id.rsplit("/", 2)[0]

    @property
    def epoch(self) -> int:
        return int(self.id.rsplit("/", 2)[1])

    @property
    def index(self) -> int:
        return int(self.id.rsplit("/", 2)[2])


#: Fields of a job that hold lists or maps.
_LISTS_AND_MAPS = ("prompt_ids", "metadata", "sampling", "answers", "label_value", "images")
