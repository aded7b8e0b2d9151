"""Verify the samples of a custom generate function: find the engine request that generated each token.

returned samples ─> find each token in the requests of its sample ─> one sample, with a part per returned sample
"""

import math
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

from penstock.errors import HookError
from penstock.names import ROUTED_EXPERTS
from penstock.records.job import JobFailure
from penstock.records.sample import FinishReason, Sample, SampleStatus
from penstock.text import safe_repr, utf8_safe
from penstock.workers.hooks.recorded_engine import EngineAnswer
from penstock.workers.jobs.routed_experts import add_rows

#: Largest difference between a claimed logprob and the engine's.
CLOSE = 1e-4

#: Request that generated a token, and the index of the token in it.
_Proof = tuple[EngineAnswer, int]


class _ReturnedSample:
    """Match one returned sample with the requests that generated its tokens.

    Args:
        taken: requests whose tokens bear loss in an earlier returned sample; extended.

    Raises:
        HookError: hook_raised if the sample is unfinished or malformed; hook_unproven if no request generated a token.
    """

    def __init__(
        self, made: Any, draws: Sequence[EngineAnswer], taken: set[int], *, max_context: int, what: str
    ) -> None:
        self.what = what
        self.tokens, length = _sequence(made, max_context, what)
        self.at = len(self.tokens) - length
        self.mask = [0] * self.at + _mask(made, length, what)
        claimed = [None] * self.at + (_logprobs(made, length, what) or [None] * length)
        proofs = _proofs(self.tokens, claimed, draws, taken)
        for i in range(self.at, len(self.tokens)):
            if self.mask[i]:
                _check(proofs[i], claimed[i], self.name_of(i))
        #: [L] proof of each token; None if it was not generated or must not be trained on.
        self.proofs = [
            proof if i >= self.at and proof is not None and not proof[0].unfit else None
            for i, proof in enumerate(proofs)
        ]
        taken |= {id(proof[0]) for proof, bit in zip(self.proofs, self.mask, strict=True) if proof is not None and bit}

    def name_of(self, i: int) -> str:
        return f"{self.what}: response token {i - self.at}"


def settle(sample: Sample, made: Sequence[Any], draws: Sequence[EngineAnswer], *, max_context: int, what: str) -> None:
    """Fill ``sample`` from the returned samples ``made``, verified by the recorded ``draws``; each becomes a part.

    A token counts as generated if a request of the sample generated it after exactly the preceding tokens. It gets the
    logprob and version of that request, whatever was returned. Loss on other tokens is refused (T6, T8). A token that
    several returned samples share counts as generated in one of them, the one in which it bears loss.

    Args:
        made: returned samples, at least one.
        max_context: most tokens of each returned sample.

    Raises:
        HookError: hook_unproven for loss on tokens not generated, or twice on a token; hook_raised for an unfinished or
        malformed sample.
    """
    names = [what] if len(made) == 1 else [f"{what}: sample {i} of {len(made)}" for i in range(len(made))]
    taken: set[int] = set()
    claims = [
        _ReturnedSample(one, draws, taken, max_context=max_context, what=name)
        for one, name in zip(made, names, strict=True)
    ]
    _assign(claims)
    own = [proof for claim in claims for proof in claim.proofs]
    sample.tokens, sample.prompt_length = [token for claim in claims for token in claim.tokens], claims[0].at
    sample.logprobs = [0.0 if proof is None else proof[0].sample.logprobs[proof[1]] for proof in own]
    sample.versions = [-1 if proof is None else proof[0].sample.versions[proof[1]] for proof in own]
    sample.generated = [int(proof is not None) for proof in own]
    sample.loss_mask = [bit for claim in claims for bit in claim.mask]
    sample.parts = list(accumulate(len(claim.tokens) for claim in claims[:-1]))
    used = list({id(proof[0]): proof[0] for proof in own if proof is not None}.values())
    _describe(sample, made, used)


def _assign(claims: Sequence[_ReturnedSample]) -> None:
    """Keep the proof of each generated token in one returned sample only, so that it is trained on once."""
    taken: dict[tuple[int, int], int] = {}
    for with_loss in (True, False):
        for number, claim in enumerate(claims):
            for i, proof in enumerate(claim.proofs):
                if proof is None or bool(claim.mask[i]) is not with_loss:
                    continue
                if taken.setdefault((id(proof[0]), proof[1]), number) == number:
                    continue
                if with_loss:
                    raise HookError(
                        JobFailure.HOOK_UNPROVEN,
                        f"{claim.name_of(i)} also bears loss in another returned sample: set its loss_mask to 0 in all "
                        "samples but one.",
                    )
                claim.proofs[i] = None


def _sequence(made: Any, max_context: int, what: str) -> tuple[list[int], int]:
    """Return the tokens [P + R] of a returned sample, and R."""
    status = getattr(getattr(made, "status", None), "value", None)
    if status not in (SampleStatus.PENDING, SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
        raise HookError(
            JobFailure.HOOK_RAISED, f"{what} returned an unfinished sample with status {safe_repr(status)}."
        )
    # Check before assigning: a failure must leave the sample unchanged.
    if not isinstance(made.response, str):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} returned a response that is not text.")
    tokens, length = made.tokens, made.response_length
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} returned tokens that are not a list of token ids.")
    if type(length) is not int or not 0 < length < len(tokens):
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} returned {len(tokens)} tokens with response_length {safe_repr(length)}: a sample needs a prompt "
            "and a response.",
        )
    if len(tokens) > max_context:
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} returned {len(tokens)} tokens; rollout.max_context_tokens and the engine allow {max_context}.",
        )
    return list(tokens), length


def _proofs(
    tokens: list[int], claimed: Sequence[Any], draws: Sequence[EngineAnswer], taken: Collection[int]
) -> list[_Proof | None]:
    """Find for each token the request that generated it, and its index there.

    Longer matches win. Among requests with the same answer (sent for several returned samples), matching logprobs win,
    then requests that are not taken.
    """
    found: list[_Proof | None] = [None] * len(tokens)
    matches = []
    for draw in draws:
        begin = draw.sample.prompt_length
        if tokens[:begin] == draw.input_ids:
            pairs = zip(tokens[begin:], draw.output_ids, strict=False)
            end = begin + next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens) - begin, len(draw.output_ids))
            )
            wrong = sum(not _agrees(claimed[i], draw.sample.logprobs[i]) for i in range(begin, end))
            matches.append(((bool(draw.unfit), begin - end, wrong, id(draw) in taken), begin, end, draw))
    for _, begin, end, draw in sorted(matches, key=lambda one: one[0]):
        for i in range(begin, end):
            found[i] = found[i] or (draw, i)
    return found


def _mask(made: Any, length: int, what: str) -> list[int]:
    mask = [1] * length if made.loss_mask is None else made.loss_mask
    if not isinstance(mask, list) or len(mask) != length or any(one not in (0, 1) for one in mask):
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} returned an invalid loss_mask: it needs a 0 or 1 for each of {length} tokens.",
        )
    return [0] * length if getattr(made, "remove_sample", False) else [int(one) for one in mask]


def _logprobs(made: Any, length: int, what: str) -> list[Any] | None:
    claimed = made.rollout_log_probs
    if claimed is None:
        return None
    if not isinstance(claimed, list) or len(claimed) != length:
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} returned invalid rollout_log_probs: a list with one for each of {length} tokens is needed.",
        )
    return claimed


def _agrees(claimed: Any, logprob: float) -> bool:
    """Return whether a returned logprob matches the engine's; None always does."""
    if claimed is None:
        return True
    return isinstance(claimed, (int, float)) and math.isclose(claimed, logprob, rel_tol=0.0, abs_tol=CLOSE)


def _check(proof: _Proof | None, claimed: Any, what: str) -> None:
    if proof is None:
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} bears loss, but no request of this sample generated it after the preceding tokens: send tokens "
            "unchanged, and set loss_mask to 0 for tokens that the engine did not generate.",
        )
    draw, index = proof
    if draw.unfit:
        raise HookError(JobFailure.HOOK_UNPROVEN, f"{what} bears loss, but {draw.unfit}.")
    sampled = draw.sample.logprobs[index]
    if not _agrees(claimed, sampled):
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} claims log-probability {safe_repr(claimed)}, but was sampled with {sampled}.",
        )


def _describe(sample: Sample, made: Sequence[Any], used: Sequence[EngineAnswer]) -> None:
    """Set text, turns, times and counts; the sample is truncated if a returned sample is."""
    inner = [draw.sample for draw in used]
    ends = {one.status.value for one in made}
    is_cut = SampleStatus.TRUNCATED in ends
    if SampleStatus.PENDING in ends:
        is_cut = is_cut or (bool(inner) and inner[-1].finish_reason == FinishReason.LENGTH)
    sample.status = SampleStatus.TRUNCATED if is_cut else SampleStatus.COMPLETED
    sample.finish_reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    sample.turns = [one.text for one in inner]
    sample.text = utf8_safe("".join(one.response for one in made)) or "".join(sample.turns)
    sample.num_turns = max(1, len(inner))
    sample.num_aborts = sum(one.num_aborts for one in inner)
    sample.cached_tokens = sum(one.cached_tokens for one in inner)
    sample.generate_s = sum(one.generate_s for one in inner)
    sample.num_unproven = min(sum(sample.generated), sum(one.num_unproven for one in inner))
    if any(ROUTED_EXPERTS in one.sides for one in inner):
        for one in sorted(inner, key=lambda one: len(one.tokens)):
            add_rows(sample, one.sides.get(ROUTED_EXPERTS))
