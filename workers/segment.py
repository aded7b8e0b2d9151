"""What one answer of an engine holds: drawn tokens, or the scores of given ones."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import EngineError
from workers.routing import Rows

#: Message of a segment that was thrown away.
STALE_PREFIX = "its prefix was of older weights"
#: Matched "stop" of an answer whose logits were not numbers; its last token was put there, not drawn.
_NAN = "NaN happened"


#: Unknown reasons that were told.
_told: set[str] = set()
_MOST_TOLD = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segment:
    """One answer of the engine: what it drew for one request."""

    #: [T] as returned; a drawn eos is the last one.
    output_ids: list[int]
    #: [T] log-probability with which each was drawn.
    logprobs: list[float]
    #: [T] weight version each was drawn with; where that cannot be proven, the older one (T6).
    versions: list[int]
    #: stop | length | abort
    finish_reason: str
    #: Prompt tokens whose KV was found in the prefix cache.
    cached_tokens: int
    #: 0 where the request was aborted before it ran.
    prompt_tokens: int
    #: What the engine said about an abort.
    message: str = ""
    #: [P + T - 1, layers, top_k] experts of every position but the last, where that was asked for; None: nothing told.
    experts: Rows | None = field(default=None, compare=False)
    #: [T] True on tokens that a newer version than theirs may have drawn; empty: none is such a token.
    unproven: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of given tokens."""

    #: [L - start] of each token given what stands before it, at temperature 1.
    logprobs: list[float]
    #: Version of the weights; -1: those the server started with. None: it was aborted, or weights changed meanwhile.
    version: int | None
    #: [L - 1, layers, top_k] experts of every position but the last, where that was asked for.
    experts: Rows | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What an answer says was drawn, before it is known under which weights."""

    ids: list[int]
    logprobs: list[float]
    reason: str
    message: str
    #: ``meta_info`` as the server sent it.
    meta: dict[str, Any]


def read_drawn(answer: Any, rid: str) -> Drawn:
    """Tokens and logprobs of an answer to /generate.

    Raises:
        EngineError: it lacks ids, or other than one finite logprob for each.
    """
    try:
        meta, ids = answer["meta_info"], answer["output_ids"]
        finish = meta["finish_reason"]
        reason = finish["type"]
        entries = meta.get("output_token_logprobs") or []
        logprobs = [entry[0] for entry in entries]
        drawn = [entry[1] for entry in entries]
    except (KeyError, TypeError, IndexError) as exc:
        raise EngineError(f"{rid}: the engine's answer lacks ids, logprobs or a finish reason ({exc!r}).") from exc
    if not isinstance(ids, list) or drawn != ids:
        raise EngineError(f"{rid}: the engine gave {len(drawn)} logprobs for {len(ids or [])} ids, not one for each.")
    if not all_finite(logprobs) or finish.get("matched") == _NAN:
        raise EngineError(f"{rid}: the engine gave a logprob that is not a finite number: its logits overflow.")
    if reason not in ("stop", "length", "abort"):
        if not ids:
            raise EngineError(f"{rid}: the engine ended without a token, for the unknown reason {reason!r:.80}.")
        # A later release may end answers for more reasons. What was drawn was drawn, and that it was cut short is true.
        if str(reason) not in _told and len(_told) < _MOST_TOLD:
            _told.add(str(reason))
            log.warning("%s: the engine ended for the reason %.80r, unknown here: taken as truncated", rid, reason)
        reason = "length"
    return Drawn(ids, logprobs, reason, str(finish.get("message", "")), meta)


def read_scored(answer: Any, input_ids: list[int], start: int, vocab_size: int, rid: str) -> list[float] | None:
    """[L - start] logprobs of given tokens in an answer to /generate; None where it was aborted.

    Raises:
        EngineError: they are not one finite number for each token.
    """
    try:
        meta = answer["meta_info"]
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            return None
        entries = meta["input_token_logprobs"][1:]
        logprobs = [entry[0] for entry in entries]
        scored = [entry[1] for entry in entries]
    except (KeyError, TypeError, IndexError) as exc:
        raise EngineError(f"{rid}: the engine's answer has no logprobs of the input ({exc!r}).") from exc
    # SGLang scores the last id of the vocabulary rightly, and names it 0 (seen in 0.5.20).
    names = {0, vocab_size - 1}
    same = [a == b or {a, b} == names for a, b in zip(input_ids[start:], scored, strict=False)]
    whole = len(scored) == len(input_ids) - start == len(same)
    if not whole or not all(same) or not all_finite(logprobs):
        raise EngineError(f"{rid}: the engine's logprobs are not one finite number for each token.")
    return logprobs


def all_finite(values: list[Any]) -> bool:
    """Whether all are finite numbers."""
    # A sum is infinite or not a number as soon as one of its terms is; JSON's null is a NaN that was sent.
    try:
        return math.isfinite(sum(values))
    except TypeError:
        return False
