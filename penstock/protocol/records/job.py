"""A job: what a producer admits, and a worker answers."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from penstock.names import MAX_ANSWERS, Lane
from penstock.protocol.records.codec import copy_plain
from penstock.protocol.records.field_checks import bounds
from penstock.protocol.records.record import Record


class JobState(StrEnum):
    """What becomes of a job and its group: the field ``st`` of the hash ``group:JOB``."""

    QUEUED = "queued"
    LEASED = "leased"
    #: It failed and is tried again later.
    DELAYED = "delayed"
    #: It is buried.
    DEAD = "dead"
    #: Its samples are committed, and subscriptions may use them.
    READY = "ready"
    #: It is being deleted.
    RETIRING = "retiring"


class JobFailure(StrEnum):
    """Why a try of a job failed; the reason of a dead letter."""

    REWARD_RAISED = "reward_raised"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_NOT_A_NUMBER = "reward_not_a_number"
    #: More bytes than the verifier pool takes, or than a sample's record has room for.
    REWARD_TOO_LARGE = "reward_too_large"
    ENVIRONMENT_RAISED = "environment_raised"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    #: Of a function that section ``hooks`` names.
    HOOK_RAISED = "hook_raised"
    HOOK_TIMEOUT = "hook_timeout"
    #: It made of a sample what was not drawn.
    HOOK_UNPROVEN = "hook_unproven"
    #: A frozen model that scores samples gave no log-probabilities.
    MODEL_FAILED = "model_failed"
    ENGINE_ERROR = "engine_error"
    #: Arrays of a sample that contradict each other.
    PAYLOAD_ERROR = "payload_error"
    #: Nothing can be drawn for it, whoever tries.
    REFUSED = "refused"
    #: Anything else that a worker met.
    RAISED = "raised"
    #: Engines or workers died of it.
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Job(Record):
    """One prompt to be answered ``n`` times."""

    #: ``DATASET/EPOCH/INDEX``; deterministic, so that admitting twice is seen.
    id: str
    #: Answers wanted; sample ids are ``ID/k`` with 0 <= k < n.
    n: int = field(metadata=bounds(1, MAX_ANSWERS))
    #: The prompt as text, template applied; or None where ``prompt_ids`` is given.
    prompt: str | None = None
    #: The prompt as token ids.
    prompt_ids: list[int] | None = None
    #: What the reward compares with, as text; a label of another type as JSON.
    label: str = ""
    #: Handed through to rewards and environments.
    metadata: dict[str, Any] = field(default_factory=dict)
    #: SGLang names: max_new_tokens, temperature, stop, stop_token_ids, ignore_eos, ...
    sampling: dict[str, Any] = field(default_factory=dict)
    #: Home lane: train, eval or score.
    lane: str = Lane.TRAIN
    #: Version at admission; no engine with an older one may start it (T12).
    not_before: int = 0
    #: A built-in name, or an import path ``module:callable`` that the worker's configuration names too; None takes the
    #: run's reward.
    reward: str | None = None
    #: Import path of an environment that the worker's configuration names too; None: a single turn.
    environment: str | None = None
    #: Answers that are given, as text or token ids: those of samples 0, 1, ... The rest of the ``n`` are drawn.
    answers: list[Any] = field(default_factory=list)
    #: The label where it is not text: a number, list or map as the dataset has it; None: ``label`` is all.
    label_value: Any = None
    #: Image files of the prompt in the order of their placeholders, as bytes (``records/images.py``).
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
