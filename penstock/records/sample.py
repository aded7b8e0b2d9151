"""A sample: one answer, while a worker makes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, Literal

from penstock.errors import ProtocolError
from penstock.records.codec import copy_plain
from penstock.records.job import Job
from penstock.records.manifest import Manifest
from penstock.records.sample_meta import MAX_PARTS as MAX_PARTS
from penstock.records.sample_meta import Part, SampleMeta
from penstock.text import safe_repr

#: Most pauses of a sample that are recorded.
MAX_PAUSES = 16

#: Logprobs after temperature, or before it.
LogprobKind = Literal["scaled", "original"]


class SampleStatus(StrEnum):
    """State of a sample, and how it ended."""

    PENDING = "pending"
    #: The policy ended it.
    COMPLETED = "completed"
    #: It reached its token limit.
    TRUNCATED = "truncated"
    #: It was begun, and is to be continued.
    ABORTED = "aborted"
    #: Its answer was given, not generated.
    GIVEN = "given"


class FinishReason(StrEnum):
    """Why the engine generated no further token; SGLang's words, except the last."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    #: Nothing was generated: the answer was given.
    GIVEN = "given"


@dataclass(slots=True)
class Sample:
    """One answer, while a worker makes it; the argument of rewards and environments.

    All arrays have one entry per token of the whole sequence, prompt included (L).
    """

    job: Job
    k: int
    #: [L] prompt and everything after it, as the engine saw and returned it.
    tokens: list[int] = field(default_factory=list)
    #: [L] log-probability with which the engine generated the token; 0 for tokens not generated (T6).
    logprobs: list[float] = field(default_factory=list)
    #: [L] 1 on tokens that the policy generated.
    generated: list[int] = field(default_factory=list)
    #: [L] 1 on tokens to train.
    loss_mask: list[int] = field(default_factory=list)
    #: [L] weight version that generated the token; -1 for tokens not generated (T8).
    versions: list[int] = field(default_factory=list)
    prompt_length: int = 0
    #: Index of the first token of each part after the first: an episode whose history was rewritten or branched has
    #: several parts, each a sequence of its own that begins with its context, tokens that are not generated.
    parts: list[int] = field(default_factory=list)
    #: A ``SampleStatus``.
    status: str = SampleStatus.PENDING
    #: A ``FinishReason``; '' while its last turn is open.
    finish_reason: str = ""
    #: All generated text, without special tokens.
    text: str = ""
    #: Generated text of each turn; ``text`` is their concatenation.
    turns: list[str] = field(default_factory=list)
    reward: float | None = None
    #: Fields that the reward returned beside the number.
    reward_info: dict[str, Any] = field(default_factory=dict)
    #: Name -> numpy array beside the tokens (routed experts, images), stored in a key of its own; see sides.py.
    sides: dict[str, Any] = field(default_factory=dict)
    num_turns: int = 1
    #: Reward, its fields and the environment's snapshot, packed: after the last observation, or at the end.
    state: bytes | None = None
    #: Whether its environment has ended it.
    is_over: bool = False
    num_aborts: int = 0
    cached_tokens: int = 0
    #: Generated tokens with the oldest possible version; for the others the version is proven (T6).
    num_unproven: int = 0
    #: When generation was paused in its last lease because the engine's weights changed or it was restarted:
    #: (milliseconds after ``started_s``, milliseconds long), the last ``MAX_PAUSES``.
    pauses: list[list[int]] = field(default_factory=list)
    started_s: float = 0.0
    #: When the first generated token was received (Unix time, seconds); 0: unknown, answers are not streamed.
    first_token_s: float = 0.0
    #: When the last token had been received, and its turns were over (Unix time, seconds).
    drawn_s: float = 0.0
    #: Seconds of its engine requests, without the environment and pauses between them.
    generate_s: float = 0.0
    reward_s: float = 0.0
    #: Images of its prompt as sent to the engine; never sent to other processes.
    pictures: Any = field(default=None, compare=False, repr=False)
    #: The sample for functions of slime's signature (``penstock.hooks.slime``), once it is made; never sent either.
    seen: Any = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> str:
        return f"{self.job.id}/{self.k}"

    def has_valid_parts(self) -> bool:
        """Return whether ``parts`` ascend, are inside the tokens, behind the prompt, and each begins with a context."""
        starts = self.parts
        if starts == []:
            return True
        return (
            type(starts) is list
            and len(starts) < MAX_PARTS
            and set(map(type, starts)) == {int}
            and all(begin < end for begin, end in pairwise([0, *starts, len(self.tokens)]))
            and not any(self.generated[start] for start in starts)
            and starts[0] >= self.prompt_length
        )

    def copy_for_user(self) -> "Sample":
        """Return a copy that user code may change: it shares nothing with this sample but ``seen``, user code's own."""
        lists = {name: getattr(self, name).copy() for name in _LISTS}
        nested = {name: copy_plain(getattr(self, name)) for name in ("pauses", "reward_info")}
        sides = {name: side.copy() if hasattr(side, "copy") else side for name, side in self.sides.items()}
        return replace(self, job=self.job.copy_for_user(), pictures=None, state=None, sides=sides, **lists, **nested)

    def append(
        self,
        tokens: list[int],
        *,
        version: int | list[int] = -1,
        logprobs: list[float] | None = None,
        loss: bool = True,
    ) -> None:
        """Append generated tokens (``logprobs`` given) or given ones (prompt, observation: mask 0).

        Args:
            version: of all tokens, or [T] of each.
        """
        drawn = logprobs is not None
        if drawn and len(logprobs or []) != len(tokens):
            raise ProtocolError(f"sample {self.id}: {len(logprobs or [])} logprobs for {len(tokens)} tokens.")
        count = len(tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs if logprobs is not None else [0.0] * count)
        self.generated.extend([1 if drawn else 0] * count)
        self.loss_mask.extend([1 if drawn and loss else 0] * count)
        self.versions.extend(version if isinstance(version, list) else [version if drawn else -1] * count)

    def truncate(self, length: int) -> None:
        """Remove all tokens from index ``length`` on."""
        for values in (self.tokens, self.logprobs, self.generated, self.loss_mask, self.versions):
            del values[length:]

    @property
    def last_turn_start(self) -> int:
        """Return the index after the prompt or the last observation."""
        index = len(self.generated)
        while index and self.generated[index - 1]:
            index -= 1
        return index


#: Fields of a sample that hold lists of numbers or texts.
_LISTS = ("tokens", "logprobs", "generated", "loss_mask", "versions", "parts", "turns")


#: Most characters of one group's uses by one subscription.
MAX_USES_BYTES = 1024 * 1024
#: MASKS is a sum of these.
_NEWEST_ONLY, _NO_TRUNCATED = 1, 2
#: Largest number: float64, as in Lua, is exact up to it.
MAX_NUMBER = 2**53


@dataclass(frozen=True, slots=True)
class BatchUse:
    """Record that a batch contained a group, for a run with a history: manifests may be deleted before the group.

    The field ``h:SUB`` of the hash ``group:JOB`` is ``N:CUT_MS:TRAIN:MASK_BELOW:MASKS:ABANDONED`` of each, separated by
    ``;``; the part behind CUT_MS comes from the leader (``note``), the rest from ``cut`` in ``lua/batch.lua``.
    """

    batch: int
    #: When it was cut (Unix time, seconds).
    cut_s: float
    #: Version that the trainer held at its first step; -1: no clock bounds the batch, and nothing ages.
    train_version: int
    #: Tokens of versions below this bore no loss; -1: any did.
    mask_below: int
    #: Tokens older than the newest of their sample bore no loss.
    newest_only: bool = False
    #: Ranges (first, last) of versions that age nothing.
    abandoned: tuple[tuple[int, int], ...] = ()
    #: Samples that ended at a limit bore no loss.
    no_truncated: bool = False

    def bearing(self, meta: SampleMeta, part: Part | None = None) -> list[list[int]]:
        """Return the pairs (version, tokens) that bore loss in this batch, unless the payload was lost.

        Args:
            part: the part of the sample; None: it is an ordinary one.
        """
        if self.no_truncated and meta.status == SampleStatus.TRUNCATED:
            return []
        tokens = meta if part is None else part
        floor = max(self.mask_below, tokens.newest) if self.newest_only else self.mask_below
        return [pair for pair in tokens.loss_by_version if pair[0] >= floor]

    def staleness(self, version: int) -> int:
        """Return the versions that changed the weights between ``version`` and the batch (T2); 0 if nothing ages."""
        if self.train_version < 0 or version < 0:
            return 0
        uncounted = sum(
            max(0, min(last, self.train_version) - max(first, version + 1) + 1) for first, last in self.abandoned
        )
        return max(0, self.train_version - version - uncounted)


def note(manifest: Manifest, *, clocked: bool) -> str:
    """Return the leader's part of the record when a batch is cut. ``clocked``: a model's clock bounds it."""
    train = manifest.train_version if clocked else -1
    abandoned = ",".join(f"{first}-{last}" for first, last in manifest.abandoned)
    masks = _NEWEST_ONLY * manifest.mask_offpolicy | _NO_TRUNCATED * manifest.mask_truncated
    return f"{train}:{manifest.mask_below}:{masks}:{abandoned}"


def uses_of(text: bytes, what: str) -> list[BatchUse]:
    """Parse the uses in a field ``h:SUB``. Raises ProtocolError, which begins with ``what``."""
    try:
        if len(text) > MAX_USES_BYTES:
            raise ValueError("too long")
        return [_use(one.split(":")) for one in text.decode("ascii").split(";")]
    except ValueError as exc:
        raise ProtocolError(f"{what} holds uses that no cut wrote: {safe_repr(text[:200])}.") from exc


def _use(parts: Sequence[str]) -> BatchUse:
    batch, cut_ms, train, mask_below, masks, abandoned = parts
    return BatchUse(
        _whole(batch),
        _whole(cut_ms) / 1000,
        _whole(train),
        _whole(mask_below),
        bool(_whole(masks) & _NEWEST_ONLY),
        tuple(_span(span) for span in abandoned.split(",") if span),
        no_truncated=bool(_whole(masks) & _NO_TRUNCATED),
    )


def _whole(text: str) -> int:
    number = int(text)
    if not -1 <= number <= MAX_NUMBER:
        raise ValueError("too large")
    return number


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last)


@dataclass(slots=True)
class Drawn:
    """Tokens of one sample under one lease: those that it has, and those that were generated and discarded.

    Totals, not differences, so a repeated report changes nothing. Sent as numbers with commas, in this order
    (``lua/ledger.lua``).
    """

    #: Generated tokens that the sample has, including those of earlier leases.
    live: int = 0
    #: Generated after a stop and cut off, or of an answer that is invalid: its prefix was of older weights, or its
    #: routing was missing.
    behind_stop: int = 0
    #: Of a version that a rewind abandoned: the sample was started over.
    rewound: int = 0
    #: Of turns of a lost environment, or of a prefix whose routing is lost: the sample was started over.
    lost_turn: int = 0
    #: Requests without an answer: the number of tokens they generated is unknown.
    unheard: int = 0

    def __str__(self) -> str:
        return f"{self.live},{self.behind_stop},{self.rewound},{self.lost_turn},{self.unheard}"

    @property
    def thrown(self) -> int:
        return self.behind_stop + self.rewound + self.lost_turn

    @classmethod
    def recorded(cls, meta: SampleMeta) -> "Drawn":
        """Make the report of a committed sample from its record; a given answer has no generated tokens."""
        return cls(0 if meta.status == SampleStatus.GIVEN else meta.num_generated)


#: A report without samples.
NOTHING: Final[Mapping[int, Drawn]] = MappingProxyType({})
