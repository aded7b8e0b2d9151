"""Parse one answer of an engine: generated tokens, or the scores of given ones."""

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
STALE_PREFIX = "its prefix was of older weights"
NO_ROUTING = "its engine did not return the expert routing of its tokens"
#: Matched "stop" of an answer whose logits were not numbers; its last token was not sampled.
_NAN = "NaN happened"
#: Upper bound of ids and token counts: they are stored as int32.
_MOST_TOKENS = 2**31
#: Logprobs are stored as float32; values above 0 come from rounding.
_LARGEST, _HIGHEST = 3.4e38, 1.0
#: Longest abort message kept, in characters.
_MAX_MESSAGE = 500


#: Unknown finish reasons that were logged.
_logged: set[str] = set()
_MOST_LOGGED = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of an answer, before their weights are known."""

    ids: list[int]
    logprobs: list[float]
    reason: str
    message: str
    #: ``meta_info`` as the server sent it.
    meta: dict[str, Any]


def meta_of(answer: Any, rid: str) -> dict[str, Any]:
    """Return ``meta_info`` of an answer to /generate. Raises EngineError if it is missing."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineError(f"{rid}: the engine's answer lacks meta_info: {safe_repr(answer)}.")
    return meta


def count_of(meta: dict[str, Any], name: str, rid: str) -> int:
    """Return a number of tokens in ``meta_info``; 0 if missing. Raises EngineError if it is not a number."""
    value = meta.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise EngineError(f"{rid}: the engine reports {name} = {safe_repr(value)}, which is not a number of tokens.")
    return value


#: Names of the counts of draft checks, drafted tokens and accepted ones in SGLang's releases; the newest first.
_DRAFTS = (
    ("spec_verify_ct",),
    ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
    ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
)


def drafts_of(meta: dict[str, Any]) -> Drafts | None:
    """Return the draft counts in ``meta_info``; None if missing or malformed, as only metrics use them."""
    found: list[Any] = [next((meta[name] for name in names if name in meta), None) for names in _DRAFTS]
    if not all(type(value) is int and 0 <= value < _MOST_TOKENS for value in found):
        return None
    drafts = Drafts(*found)
    return drafts if drafts.checks and drafts.right <= drafts.drafted else None


def spans_of(meta: dict[str, Any], count: int, rid: str) -> list[tuple[Any, int]]:
    """Return (version as reported, tokens) of each span of an answer of ``count`` tokens; [] if it reports none.

    Raises:
        EngineError: they have gaps, or do not cover exactly its tokens.
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
                raise EngineError(f"{rid}: the engine's version spans cover other than its {count} tokens.")
            found.append((version, end - start))
            covered = end
    except (TypeError, KeyError) as exc:
        raise EngineError(f"{rid}: the engine's version spans {safe_repr(spans)} cannot be read.") from exc
    if found and covered != count:
        raise EngineError(f"{rid}: the engine's version spans cover {covered} of {count} tokens.")
    return found


def read_drawn(answer: Any, rid: str) -> Drawn:
    """Read tokens and logprobs of an answer to /generate.

    Raises:
        EngineError: it lacks ids, or does not have exactly one finite logprob for each.
    """
    meta = meta_of(answer, rid)
    try:
        ids, finish = answer["output_ids"], meta["finish_reason"]
        reason = finish["type"]
        entries = meta.get("output_token_logprobs") or []
        logprobs = [entry[0] for entry in entries]
        drawn = [entry[1] for entry in entries]
        matched, message = finish.get("matched"), str(finish.get("message", ""))
    except (KeyError, TypeError, IndexError, AttributeError) as exc:
        raise EngineError(
            f"{rid}: the engine's answer lacks ids, logprobs or a finish reason ({safe_repr(exc)})."
        ) from exc
    if not are_ids(ids):
        raise EngineError(f"{rid}: the engine's output_ids are not token ids: {safe_repr(ids)}.")
    if drawn != ids:
        raise EngineError(f"{rid}: the engine gave {len(drawn)} logprobs for {len(ids)} ids, not one for each.")
    values = finite_of(logprobs)
    if values is None or matched == _NAN:
        raise EngineError(f"{rid}: the engine gave a logprob that is not a finite number: its logits overflow.")
    if values.max(initial=0.0) > _HIGHEST:
        raise EngineError(f"{rid}: the engine gave the logprob {values.max():g}, and none is above 0.")
    if reason not in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
        if not ids:
            raise EngineError(f"{rid}: the engine ended without a token, for the unknown reason {safe_repr(reason)}.")
        # A later release may have more finish reasons. The tokens are valid, and truncation describes them.
        name = safe_repr(reason)
        if name not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add(name)
            log.warning("%s: unknown finish reason %s; treated as truncated", rid, name)
        reason = FinishReason.LENGTH
    return Drawn(ids, logprobs, reason, utf8_safe(message, _MAX_MESSAGE), meta)


def read_scored(answer: Any, input_ids: list[int], start: int, vocab_size: int, rid: str) -> list[float] | None:
    """[L - start] Read logprobs of given tokens in an answer to /generate; None if it was aborted.

    Raises:
        EngineError: there is not exactly one finite number for each token.
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
        raise EngineError(f"{rid}: the engine's logprobs of the input are not of token ids: {safe_repr(scored)}.")
    # SGLang scores the last id of the vocabulary correctly, but reports it as 0 (seen in 0.5.20).
    names = {0, vocab_size - 1}
    same = [a == b or {a, b} == names for a, b in zip(input_ids[start:], scored, strict=False)]
    whole = len(scored) == len(input_ids) - start == len(same)
    if not whole or not all(same) or finite_of(logprobs) is None:
        raise EngineError(f"{rid}: the engine's logprobs are not one finite number for each token.")
    return logprobs


def finite_of(values: list[Any]) -> NDArray[np.float64] | None:
    """[T] Return the values as an array; None unless all are numbers that float32 holds as finite ones."""
    # JSON's null stands for NaN.
    if not set(map(type, values)) <= {float, int}:
        return None
    try:
        array = np.frombuffer(array_of("d", values))
    except OverflowError:
        return None
    return array if np.abs(array).max(initial=0) <= _LARGEST else None


def are_ids(values: Any) -> bool:
    """Return whether this is a list of token ids that fit into int32."""
    if type(values) is not list or not set(map(type, values)) <= {int}:
        return False
    try:
        return bool(np.frombuffer(array_of("i", values), np.int32).min(initial=0) >= 0)
    except OverflowError:
        return False
