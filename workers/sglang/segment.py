"""Parse an answer of an engine: generated tokens, or scores of given tokens."""

import logging
from array import array as array_of
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineError
from penstock.records.sample import FinishReason
from penstock.text import safe_repr, utf8_safe
from penstock.workers.engine import Drafts

#: Messages of discarded segments.
STALE_PREFIX = "its prefix came from older weights"
NO_ROUTING = "its engine did not return the expert routing of its tokens"
#: Value of "matched" if the logits were not numbers; the last token was not sampled.
_NAN = "NaN happened"
#: Upper bound of ids and token counts, which are stored as int32.
_MOST_TOKENS = 2**31
#: Logprobs are stored as float32; values above 0 come from rounding.
_LARGEST, HIGHEST = 3.4e38, 1.0
#: Longest stored abort message, in characters.
_MAX_MESSAGE = 500


#: Unknown finish reasons that were already logged.
_logged: set[str] = set()
_MOST_LOGGED = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """Hold the tokens of an answer before their versions are determined."""

    ids: list[int]
    logprobs: list[float]
    reason: str
    message: str
    #: ``meta_info`` as the server sent it.
    meta: dict[str, Any]


def meta_of(answer: Any, rid: str) -> dict[str, Any]:
    """Return ``meta_info`` of a /generate answer. Raises EngineError if it is missing."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"{rid}: the engine's answer lacks meta_info: {safe_repr(answer)}.")
    return meta


def count_of(meta: dict[str, Any], name: str, rid: str) -> int:
    """Return a token count in ``meta_info``, 0 if missing. Raises EngineError if it is invalid."""
    value = meta.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise EngineError(f"{rid}: the engine reports an invalid {name} = {safe_repr(value)}.")
    return value


#: Names of the counts of draft verifications, drafted tokens and accepted tokens in SGLang releases, newest first.
_DRAFTS = (
    ("spec_verify_ct",),
    ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
    ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
)


def drafts_of(meta: dict[str, Any]) -> Drafts | None:
    """Return the draft counts in ``meta_info``; None if missing or malformed, because only metrics use them."""
    found: list[Any] = [next((meta[name] for name in names if name in meta), None) for names in _DRAFTS]
    if not all(type(value) is int and 0 <= value < _MOST_TOKENS for value in found):
        return None
    drafts = Drafts(*found)
    return drafts if drafts.checks and drafts.right <= drafts.drafted else None


def spans_of(meta: dict[str, Any], count: int, rid: str) -> list[tuple[Any, int]]:
    """Return (reported version, number of tokens) of each span of an answer; [] without spans.

    Raises:
        EngineError: the spans have gaps, or do not cover exactly ``count`` tokens.
    """
    spans, covered, found = meta.get("weight_versions"), 0, []
    if spans is None:
        return []
    try:
        for span in spans:
            version, start, end = span["version"], span["start"], span["end"]
            if type(start) is not int or start != covered:
                raise EngineError(f"{rid}: the engine's version spans have a gap at token {covered}.")
            if type(end) is not int or not start <= end <= count:
                raise EngineError(f"{rid}: the engine's version spans exceed its {count} tokens.")
            found.append((version, end - start))
            covered = end
    except (TypeError, KeyError) as exc:
        raise EngineError(f"{rid}: the engine's version spans {safe_repr(spans)} cannot be read.") from exc
    if found and covered != count:
        raise EngineError(f"{rid}: the engine's version spans cover {covered} of {count} tokens.")
    return found


def read_generated(answer: Any, rid: str, vocab_size: int) -> RawAnswer:
    """Read tokens and logprobs of a /generate answer.

    Raises:
        EngineError: ids are missing, outside the vocabulary, or do not have exactly one finite logprob each.
    """
    meta = meta_of(answer, rid)
    try:
        ids, finish = answer["output_ids"], meta["finish_reason"]
        reason = finish["type"]
        entries = meta.get("output_token_logprobs") or []
        logprobs = [entry[0] for entry in entries]
        scored = [entry[1] for entry in entries]
        matched, message = finish.get("matched"), str(finish.get("message", ""))
    except (KeyError, TypeError, IndexError, AttributeError) as exc:
        raise EngineError(
            f"{rid}: the engine's answer lacks ids, logprobs or a finish reason ({safe_repr(exc)})."
        ) from exc
    if not are_ids(ids, vocab_size):
        raise EngineError(f"{rid}: the engine's output_ids are not token ids of the model: {safe_repr(ids)}.")
    if scored != ids:
        raise EngineError(f"{rid}: the engine returned {len(scored)} logprobs for {len(ids)} ids, not one for each.")
    values = finite_of(logprobs)
    if values is None or matched == _NAN:
        raise EngineError(f"{rid}: the engine returned a logprob that is not a finite number: its logits overflow.")
    if values.max(initial=0.0) > HIGHEST:
        raise EngineError(f"{rid}: the engine returned the logprob {values.max():g}, above 0.")
    if reason not in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
        if not ids:
            raise EngineError(f"{rid}: the engine returned no token, with unknown finish reason {safe_repr(reason)}.")
        # A later release may have more finish reasons: keep the tokens and count the answer as truncated.
        name = safe_repr(reason)
        if name not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add(name)
            log.warning("%s: unknown finish reason %s; treated as truncated", rid, name)
        reason = FinishReason.LENGTH
    return RawAnswer(ids, logprobs, reason, utf8_safe(message, _MAX_MESSAGE), meta)


def read_scored(answer: Any, input_ids: list[int], start: int, vocab_size: int, rid: str) -> list[float] | None:
    """Read the logprobs [L - start] of given tokens in a /generate answer; None if it was aborted.

    Raises:
        EngineError: a token does not have exactly one finite logprob.
    """
    meta = meta_of(answer, rid)
    try:
        if (meta.get("finish_reason") or {}).get("type") == FinishReason.ABORT:
            return None
        entries = meta["input_token_logprobs"][1:]
        logprobs = [entry[0] for entry in entries]
        scored = [entry[1] for entry in entries]
    except (KeyError, TypeError, IndexError, AttributeError) as exc:
        raise EngineError(f"{rid}: the engine's answer has no logprobs of the input ({safe_repr(exc)}).") from exc
    if not are_ids(scored):
        raise EngineError(f"{rid}: the engine's logprobs of the input have invalid token ids: {safe_repr(scored)}.")
    # SGLang scores the last id of the vocabulary correctly but reports it as 0 (seen in 0.5.20).
    names = {0, vocab_size - 1}
    same = [a == b or {a, b} == names for a, b in zip(input_ids[start:], scored, strict=False)]
    is_complete = len(scored) == len(input_ids) - start == len(same)
    if not is_complete or not all(same) or finite_of(logprobs) is None:
        raise EngineError(f"{rid}: the engine's logprobs are not one finite number for each token.")
    return logprobs


def finite_of(values: list[Any]) -> NDArray[np.float64] | None:
    """Return the values as an array [T]; None unless all are finite numbers in float32."""
    # JSON encodes NaN as null.
    if not set(map(type, values)) <= {float, int}:
        return None
    try:
        array = np.frombuffer(array_of("d", values))
    except OverflowError:
        return None
    return array if np.abs(array).max(initial=0) <= _LARGEST else None


def are_ids(values: Any, vocab_size: int = 0) -> bool:
    """Return whether ``values`` is a list of int32 token ids below ``vocab_size`` (0: unknown)."""
    if type(values) is not list or not set(map(type, values)) <= {int}:
        return False
    try:
        ids = np.frombuffer(array_of("i", values), np.int32)
    except OverflowError:
        return False
    return bool(ids.min(initial=0) >= 0 and (not vocab_size or ids.max(initial=0) < vocab_size))
