"""A row of a history: one sample and all that is known of it, or a job that ended without one."""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.errors import ConfigError
from penstock.names import Lane
from penstock.payloads.format import Array

#: Most characters of a word, and most characters of a text that are indexed.
MAX_WORD, MAX_INDEXED = 64, 1024 * 1024

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_ASKED = re.compile(r'"([^"]*)"|(\S+)')


def indexed(text: str) -> str:
    """Return the words of a text for the index, separated by spaces; '' if it has none."""
    text = text[:MAX_INDEXED]
    if text.isascii() and "\0" not in text and max(map(len, text.split()), default=0) <= MAX_WORD:
        # The index tokenizes such a text as ``words_of`` does, in a tenth of the time.
        return text
    return " ".join(words_of(text))


def words_of(text: str) -> list[str]:
    """Return the distinct words of a text, folded, as a part indexes and searches them.

    A word is a run of letters and digits; in scripts without spaces between words (Chinese, Japanese) each character is
    a word.
    """
    return list(dict.fromkeys(word[:MAX_WORD] for word in _WORD.findall(folded(text[:MAX_INDEXED]))))


def folded(text: str) -> str:
    """Normalize a text for comparisons: case, Unicode form, and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def phrases_of(asked: str) -> list[str]:
    """Return the phrases between quotation marks, folded."""
    return [folded(phrase) for phrase, _ in _ASKED.findall(asked) if folded(phrase)]


def match_of(asked: str) -> str:
    """Return the FTS5 query for texts with every word; a last ``*`` matches any ending. '' without words."""
    terms = []
    for phrase, word in _ASKED.findall(asked):
        found = words_of(phrase or word)
        terms += [f'"{one}"' for one in found]
        if word.endswith("*") and found:
            terms[-1] += "*"
    return " AND ".join(dict.fromkeys(terms))


#: Fields of a row that are columns of a file, so that rows are found and sorted by them.
COLUMNS = ("job", "k", "part", "lane", "status", "fate", "reward", "oldest", "newest", "num_generated")
#: Arrays of a row, one value per token, and their types.
ARRAYS: Mapping[str, str] = {
    "tokens": "<i4",
    "logprobs": "<f4",
    "versions": "<i4",
    "generated": "u1",
    "loss_mask": "u1",
}

#: The times of a row, in chronological order.
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
    """Fate of a sample; the reason of a row has details (which filter, why it was dropped or dead)."""

    #: Some of its tokens bore loss in a batch.
    TRAINED = "trained"
    #: It was in a batch, and none of its tokens bore loss.
    MASKED = "masked"
    #: It was only scored: an answer to a held-out prompt (lane ``eval``), or a given one (``score``).
    EVALUATED = "evaluated"
    SCORED = "scored"
    #: A filter rejected its group.
    FILTERED = "filtered"
    #: Its group was disposed of: stale, rewound, timed out, ...
    DROPPED = "dropped"
    #: Its group was removed before a batch with it was durable: it expired, or its subscription was dropped.
    EVICTED = "evicted"
    #: Its payload is lost, so that a subscription could not read it.
    PAYLOAD_LOST = "payload_lost"
    #: Its job is dead.
    BURIED = "buried"
    #: Its job was cancelled by an operator.
    CANCELLED = "cancelled"


#: Lanes that are not trained, and the fate of their samples.
SCORES: Mapping[str, Fate] = {Lane.EVAL: Fate.EVALUATED, Lane.SCORE: Fate.SCORED}


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """One sample. Arrays have one entry per token of the whole sequence, prompt included (L), or are None: not kept."""

    #: ``DATASET/EPOCH/LINE``
    job: str
    #: ``WHOLE_JOB`` where the job ended without a sample.
    k: int
    #: Index within an episode that became several samples.
    part: int = 0
    lane: str = ""
    #: '' if it is not kept, or if the prompt was token ids and no tokenizer was available.
    prompt: str = ""
    #: Generated text; '' if it is not kept, or no tokenizer was available.
    answer: str = ""
    label: str = ""
    #: True if ``prompt`` and ``answer`` are exactly the pieces of ``tokens``, so that a file need not store them.
    is_spelled: bool = False
    #: [L] int32
    tokens: Array | None = None
    #: [L] float32, log-probability with which the token was generated; 0 for tokens not generated (T6).
    logprobs: Array | None = None
    #: [L] int32, version that generated the token; -1 for tokens not generated.
    versions: Array | None = None
    #: [L] uint8, 1 on tokens that the policy generated.
    generated: Array | None = None
    #: [L] uint8, 1 on tokens to train.
    loss_mask: Array | None = None
    #: Token id -> its bytes, for the known ones in ``tokens``; read with the arrays.
    pieces: Mapping[int, bytes] = field(default_factory=dict)
    prompt_length: int = 0
    num_generated: int = 0
    #: None: none was computed.
    reward: float | None = None
    #: Fields that the reward returned beside the number: plain values.
    reward_info: dict[str, Any] = field(default_factory=dict)
    #: A ``SampleStatus``, and a ``FinishReason``.
    status: str = ""
    finish_reason: str = ""
    #: Oldest and newest version of the generated tokens; -1 without any.
    oldest: int = -1
    newest: int = -1
    worker: str = ""
    #: Failed attempts and crashes of its job.
    attempts: int = 0
    crashes: int = 0
    #: The leases of its job, and how each ended (``penstock.records.job``); '': not known.
    tries: str = ""
    num_turns: int = 1
    num_aborts: int = 0
    cached_tokens: int = 0
    #: Unix seconds; 0 if not known.
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
    #: When generation was paused during it: (begin, end) of each pause, in Unix seconds.
    pauses: list[list[float]] = field(default_factory=list)
    #: Seconds that its engine requests, and the reward, took.
    generate_s: float = 0.0
    reward_s: float = 0.0
    #: A ``Fate``; '' if its fate is open.
    fate: str = ""
    #: Details of the fate: the filter's name, ``stale``, ``timed_out``, ...
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
    #: Versions between that one and the sample's oldest token that bears loss; -1 if none does.
    staleness: int = -1
    #: Tokens that bore loss in the batch.
    loss_tokens: int = 0
    part: int = 0


def id_of(job: str, k: int, part: int = 0) -> str:
    """Return ``JOB/k``, or ``JOB/k.part`` for an episode that became several samples."""
    return f"{job}/{k}.{part}" if part else f"{job}/{k}"


def key_of(sample: str) -> tuple[str, int, int]:
    """Parse the id of a sample into (job, k, part); raise ConfigError if it is invalid."""
    found = _ID.fullmatch(sample)
    if found is None:
        raise ConfigError(f"{sample!r} is no id of a sample: write DATASET/EPOCH/LINE/K as `penstock samples ls` does.")
    return found[1], int(found[2]), int(found[3] or 0)


def place_of(job: str) -> tuple[str, int, int]:
    """Split a job's id into (dataset, epoch, line); invalid numbers are -1."""
    dataset, epoch, line = (["", "", *job.rsplit("/", 2)])[-3:]
    return dataset, _number(epoch), _number(line)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1
