"""A row of a history: one sample and all that is known of it, or a job that ended without one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.errors import ConfigError
from penstock.names import Lane
from penstock.payloads.format import Array

#: The times of a row, in the order in which they come.
TIMES = (
    "admitted_s",
    "leased_s",
    "started_s",
    "first_token_s",
    "drawn_s",
    "rewarded_s",
    "committed_s",
    "ready_s",
    "cut_s",
    "trained_s",
)

#: ``k`` of the row of a job that ended without a sample.
WHOLE_JOB = -1

_ID = re.compile(r"(.+)/(-1|[0-9]{1,9})(?:\.([0-9]{1,9}))?")


class Fate(StrEnum):
    """What became of a sample; the reason of a row says more (which filter, why it was dropped or buried)."""

    #: Tokens of it bore loss in a batch.
    TRAINED = "trained"
    #: It was in a batch, and no token of it bore loss.
    MASKED = "masked"
    #: It was to be scored alone: an answer to a held-out prompt (lane ``eval``), or one that was given (``score``).
    EVALUATED = "evaluated"
    SCORED = "scored"
    #: A filter rejected its group.
    FILTERED = "filtered"
    #: Its group was given up: stale, rewound, timed out, ...
    DROPPED = "dropped"
    #: Its group went before any batch that it was in was durable: its time was over, or who had it was dropped.
    EVICTED = "evicted"
    #: Its payload is gone, so that one of those who wanted it could not have it.
    PAYLOAD_LOST = "payload_lost"
    #: Its job is buried.
    BURIED = "buried"
    #: Its job was cancelled by an operator.
    CANCELLED = "cancelled"


#: Lanes that nothing is trained of, and what becomes of their samples.
SCORES: Mapping[str, Fate] = {Lane.EVAL: Fate.EVALUATED, Lane.SCORE: Fate.SCORED}


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """One sample. Arrays have one entry per token of the whole sequence, prompt included (L), or are None: not kept."""

    #: ``DATASET/EPOCH/LINE``
    job: str
    #: ``WHOLE_JOB`` where the job ended without a sample.
    k: int
    #: Of an episode that became several samples.
    part: int = 0
    lane: str = ""
    #: '' where it is not kept, or where the prompt was token ids and no tokenizer was at hand.
    prompt: str = ""
    #: Generated text; '' where it is not kept, or no tokenizer was at hand.
    answer: str = ""
    label: str = ""
    #: Whoever made the row knows that the pieces of ``tokens`` spell ``prompt`` and ``answer``.
    is_spelled: bool = False
    #: [L] int32
    tokens: Array | None = None
    #: [L] float32, log-probability the token was drawn with; 0 where nothing was drawn (T6).
    logprobs: Array | None = None
    #: [L] int32, version the token was drawn with; -1 where nothing was drawn.
    versions: Array | None = None
    #: [L] uint8, 1 on tokens that the policy drew.
    generated: Array | None = None
    #: [L] uint8, 1 on tokens to train.
    loss_mask: Array | None = None
    #: Token id -> the bytes that it stands for, of those in ``tokens`` that are known; read with the arrays.
    pieces: Mapping[int, bytes] = field(default_factory=dict)
    prompt_length: int = 0
    num_generated: int = 0
    #: None: none was computed.
    reward: float | None = None
    #: What the reward returned beside the number: plain values.
    reward_info: dict[str, Any] = field(default_factory=dict)
    #: A ``SampleStatus``, and a ``FinishReason``.
    status: str = ""
    finish_reason: str = ""
    #: Oldest and newest version of the generated tokens; -1 where there is none.
    oldest: int = -1
    newest: int = -1
    worker: str = ""
    #: Failed tries and crashes of its job.
    attempts: int = 0
    crashes: int = 0
    #: Who held its job when, and how each lease ended (``penstock.protocol.records.tries``); '': not known.
    tries: str = ""
    num_turns: int = 1
    num_aborts: int = 0
    cached_tokens: int = 0
    #: Unix seconds, kept to the microsecond; 0 where it is not known.
    admitted_s: float = 0.0
    leased_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    drawn_s: float = 0.0
    rewarded_s: float = 0.0
    committed_s: float = 0.0
    ready_s: float = 0.0
    cut_s: float = 0.0
    trained_s: float = 0.0
    #: When nothing was drawn for it, though it was under way: (begin, end) of each, in Unix seconds.
    pauses: list[list[float]] = field(default_factory=list)
    #: Seconds that its requests at the engine, and the reward, took.
    generate_s: float = 0.0
    reward_s: float = 0.0
    #: A ``Fate``; '' of a sample whose fate is open.
    fate: str = ""
    #: A word or two that says more than the fate: the filter's name, ``stale``, ``timed_out``, ...
    reason: str = ""

    @property
    def id(self) -> str:
        """``JOB/k``, or ``JOB/k.part``."""
        return id_of(self.job, self.k, self.part)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.job, self.k, self.part

    @property
    def dataset(self) -> str:
        return place_of(self.job)[0]

    @property
    def epoch(self) -> int:
        return place_of(self.job)[1]

    @property
    def line(self) -> int:
        return place_of(self.job)[2]


@dataclass(frozen=True, slots=True)
class Use:
    """A sample in one batch of one subscription."""

    job: str
    k: int
    subscription: str
    #: Number of the batch.
    batch: int
    #: Version that the trainer held at the batch's first optimizer step (T2).
    version: int
    #: Versions between that one and the sample's oldest token that bears loss; -1 where none does.
    staleness: int = -1
    #: Tokens that bore loss there.
    loss_tokens: int = 0
    part: int = 0


def id_of(job: str, k: int, part: int = 0) -> str:
    """``JOB/k``, or ``JOB/k.part`` of an episode that became several samples."""
    return f"{job}/{k}.{part}" if part else f"{job}/{k}"


def key_of(sample: str) -> tuple[str, int, int]:
    """(job, k, part) of a sample's id; ConfigError where it is none."""
    found = _ID.fullmatch(sample)
    if found is None:
        raise ConfigError(f"{sample!r} is no id of a sample: write DATASET/EPOCH/LINE/K as `penstock samples ls` does.")
    return found[1], int(found[2]), int(found[3] or 0)


def place_of(job: str) -> tuple[str, int, int]:
    """(dataset, epoch, line) of a job's id; numbers that are none are -1."""
    dataset, epoch, line = (["", "", *job.rsplit("/", 2)])[-3:]
    return dataset, _number(epoch), _number(line)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1
