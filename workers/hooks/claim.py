"""Verify a sample of a custom generate function against what the engine generated for it (T6, T8).

A token counts as generated if one of the sample's own requests generated it after exactly the tokens before it. It gets
the logprob and version of that request, whatever the function claims. Loss on any other token is refused.
"""

import math
from collections.abc import Sequence
from typing import Any

from penstock.errors import HookError
from penstock.names import ROUTED_EXPERTS
from penstock.protocol.records.job import JobFailure
from penstock.protocol.records.sample import FinishReason, Sample, SampleStatus
from penstock.text import safe_repr, utf8_safe
from penstock.workers.hooks.draws import Draw
from penstock.workers.jobs.routed_experts import keep_rows

#: Largest difference between a claimed logprob and the engine's.
CLOSE = 1e-4


def settle(sample: Sample, made: Any, draws: Sequence[Draw], *, max_context: int, what: str) -> None:
    """Fill ``sample`` with what ``made``, a slime sample, claims and ``draws`` prove.

    Raises:
        HookError: hook_unproven if loss is claimed on tokens not generated; hook_raised if it is no finished sample.
    """
    tokens, length = _sequence(made, max_context, what)
    at = len(tokens) - length
    proofs = _proofs(tokens, draws)
    mask = _mask(made, length, what)
    claimed = _logprobs(made, length, what)
    for i in range(length):
        proof = proofs[at + i]
        if mask[i]:
            _check(proof, claimed[i] if claimed is not None else None, f"{what}: token {i} of its response")
    own = [proof if i >= at and proof is not None and not proof[0].unfit else None for i, proof in enumerate(proofs)]
    sample.tokens, sample.prompt_length = tokens, at
    sample.logprobs = [0.0 if proof is None else proof[0].sample.logprobs[proof[1]] for proof in own]
    sample.versions = [-1 if proof is None else proof[0].sample.versions[proof[1]] for proof in own]
    sample.generated = [int(proof is not None) for proof in own]
    sample.loss_mask = [0] * at + mask
    used = list({id(proof[0]): proof[0] for proof in own if proof is not None}.values())
    _describe(sample, made, used)


def _sequence(made: Any, max_context: int, what: str) -> tuple[list[int], int]:
    """[P + R] Return its tokens, and R."""
    status = getattr(getattr(made, "status", None), "value", None)
    if status not in (SampleStatus.PENDING, SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} did not finish its sample: its status is {safe_repr(status)}.")
    # Before anything is assigned: a failure must leave the sample unchanged.
    if not isinstance(made.response, str):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} gave a response that is not text.")
    tokens, length = made.tokens, made.response_length
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise HookError(JobFailure.HOOK_RAISED, f"{what} gave tokens that are not a list of token ids.")
    if type(length) is not int or not 0 < length < len(tokens):
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} gave {len(tokens)} tokens with response_length {safe_repr(length)}: a sample needs a prompt and a "
            "response.",
        )
    if len(tokens) > max_context:
        raise HookError(
            JobFailure.HOOK_RAISED,
            f"{what} gave {len(tokens)} tokens, and rollout.max_context_tokens and the engine allow {max_context}.",
        )
    return list(tokens), length


def _proofs(tokens: list[int], draws: Sequence[Draw]) -> list[tuple[Draw, int] | None]:
    """Return for each token the request that generated it and its index there; the longest match goes first."""
    found: list[tuple[Draw, int] | None] = [None] * len(tokens)
    matches = []
    for draw in draws:
        begin = draw.sample.prompt_length
        if tokens[:begin] == draw.input_ids:
            pairs = zip(tokens[begin:], draw.output_ids, strict=False)
            end = begin + next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens) - begin, len(draw.output_ids))
            )
            matches.append((bool(draw.unfit), begin - end, begin, end, draw))
    for _, _, begin, end, draw in sorted(matches, key=lambda one: one[:2]):
        for i in range(begin, end):
            found[i] = found[i] or (draw, i)
    return found


def _mask(made: Any, length: int, what: str) -> list[int]:
    mask = [1] * length if made.loss_mask is None else made.loss_mask
    if not isinstance(mask, list) or len(mask) != length or any(one not in (0, 1) for one in mask):
        raise HookError(
            JobFailure.HOOK_UNPROVEN, f"{what} gave a loss_mask that has no 0 or 1 for each of {length} tokens."
        )
    return [0] * length if getattr(made, "remove_sample", False) else [int(one) for one in mask]


def _logprobs(made: Any, length: int, what: str) -> list[Any] | None:
    claimed = made.rollout_log_probs
    if claimed is None:
        return None
    if not isinstance(claimed, list) or len(claimed) != length:
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} gave rollout_log_probs that are not a list with one for each of {length} tokens.",
        )
    return claimed


def _check(proof: tuple[Draw, int] | None, claimed: Any, what: str) -> None:
    if proof is None:
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} bears loss, and no request of this sample generated it after the tokens before it: send the "
            "tokens unchanged, and set loss_mask 0 on tokens that the engine did not generate.",
        )
    draw, index = proof
    if draw.unfit:
        raise HookError(JobFailure.HOOK_UNPROVEN, f"{what} bears loss, and {draw.unfit}.")
    drawn = draw.sample.logprobs[index]
    close = isinstance(claimed, (int, float)) and math.isclose(claimed, drawn, rel_tol=0.0, abs_tol=CLOSE)
    if claimed is not None and not close:
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} claims log-probability {safe_repr(claimed)}, but was sampled with {drawn}.",
        )


def _describe(sample: Sample, made: Any, used: Sequence[Draw]) -> None:
    """Set text, turns, times and counts."""
    inner = [draw.sample for draw in used]
    is_cut = made.status.value == SampleStatus.TRUNCATED
    if made.status.value == SampleStatus.PENDING:
        is_cut = bool(inner) and inner[-1].finish_reason == FinishReason.LENGTH
    sample.status = SampleStatus.TRUNCATED if is_cut else SampleStatus.COMPLETED
    sample.finish_reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    sample.turns = [one.text for one in inner]
    sample.text = utf8_safe(made.response) or "".join(sample.turns)
    sample.num_turns = max(1, len(inner))
    sample.num_aborts = sum(one.num_aborts for one in inner)
    sample.cached_tokens = sum(one.cached_tokens for one in inner)
    sample.generate_s = sum(one.generate_s for one in inner)
    sample.num_unproven = min(sum(sample.generated), sum(one.num_unproven for one in inner))
    if any(ROUTED_EXPERTS in one.sides for one in inner):
        for one in sorted(inner, key=lambda one: len(one.tokens)):
            keep_rows(sample, one.sides.get(ROUTED_EXPERTS))
