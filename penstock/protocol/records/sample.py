"""A sample: one answer, while a worker makes it."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from penstock.errors import ProtocolError
from penstock.protocol.records.codec import copy_plain
from penstock.protocol.records.job import Job

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
    #: Images of its prompt as sent to the engine (``workers/jobs/pictures.py``); never sent to other processes.
    pictures: Any = field(default=None, compare=False, repr=False)
    #: The sample for functions of slime's signature (``penstock.hooks.slime``), once it is made; never sent either.
    seen: Any = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> str:
        return f"{self.job.id}/{self.k}"

    def copy_for_user(self) -> "Sample":
        """Return a copy that user code may change: it shares nothing with this sample but ``seen``, user code's own."""
        lists = {name: getattr(self, name).copy() for name in _LISTS}
        nested = {name: copy_plain(getattr(self, name)) for name in ("pauses", "reward_info")}
        sides = {name: side.copy() if hasattr(side, "copy") else side for name, side in self.sides.items()}
        return replace(self, job=self.job.copy_for_user(), pictures=None, sides=sides, **lists, **nested)

    def append(
        self, tokens: list[int], *, version: int = -1, logprobs: list[float] | None = None, loss: bool = True
    ) -> None:
        """Append generated tokens (``logprobs`` given, one version) or given ones (prompt, observation: mask 0)."""
        drawn = logprobs is not None
        if drawn and len(logprobs or []) != len(tokens):
            raise ProtocolError(f"sample {self.id}: {len(logprobs or [])} logprobs for {len(tokens)} tokens.")
        count = len(tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs if logprobs is not None else [0.0] * count)
        self.generated.extend([1 if drawn else 0] * count)
        self.loss_mask.extend([1 if drawn and loss else 0] * count)
        self.versions.extend([version if drawn else -1] * count)


#: Fields of a sample that hold lists of numbers or texts.
_LISTS = ("tokens", "logprobs", "generated", "loss_mask", "versions", "turns")
