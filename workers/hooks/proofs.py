"""Verify what a custom generate function returned: which tokens the engine generated, in which request.

the samples that it returned ─> each token is looked up among the requests of its sample ─> a sample, with a part each
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
from penstock.workers.hooks.draws import Draw
from penstock.workers.jobs.routed_experts import add_rows

#: Largest difference between a claimed logprob and the engine's.
CLOSE = 1e-4

#: The request that generated a token, and the token's index there.
_Proof = tuple[Draw, int]


class _Claim:
    """One sample that a function returned: its tokens, and the proofs of those after its prompt.

    Args:
        taken: requests whose tokens bear loss in an earlier one; extended.

    Raises:
        HookError: hook_raised if it is no finished sample; hook_unproven if it claims what no request generated.
    """

    def __init__(self, made: Any, draws: Sequence[Draw], taken: set[int], *, max_context: int, what: str) -> None:
        self.what = what
        self.tokens, length = _sequence(made, max_context, what)
        self.at = len(self.tokens) - length
        self.mask = [0] * self.at + _mask(made, length, what)
        claimed = [None] * self.at + (_logprobs(made, length, what) or [None] * length)
        proofs = _proofs(self.tokens, claimed, draws, taken)
        for i in range(self.at, len(self.tokens)):
            if self.mask[i]:
                _check(proofs[i], claimed[i], self.name_of(i))
        #: [L] None for tokens that are not generated, or must not be trained on.
        self.proofs = [
            proof if i >= self.at and proof is not None and not proof[0].unfit else None
            for i, proof in enumerate(proofs)
        ]
        taken |= {id(proof[0]) for proof, bit in zip(self.proofs, self.mask, strict=True) if proof is not None and bit}

    def name_of(self, i: int) -> str:
        return f"{self.what}: token {i - self.at} of its response"


def settle(sample: Sample, made: Sequence[Any], draws: Sequence[Draw], *, max_context: int, what: str) -> None:
    """Fill ``sample`` with what ``made``, the samples that a custom generate function returned, claims and ``draws``
    prove. Each of several becomes a part of it.

    A token counts as generated if one of the sample's own requests generated it after exactly the tokens before it. It
    gets the logprob and version of that request, regardless of the claim. Loss on any other token is refused (T6, T8).
    A token that several of them contain is generated in one of them: that in which it bears loss.

    Args:
        made: at least one.
        max_context: most tokens of each.

    Raises:
        HookError: hook_unproven if loss is claimed on tokens not generated, or twice on one; hook_raised if one is no
            finished sample.
    """
    names = [what] if len(made) == 1 else [f"{what}: sample {i} of {len(made)}" for i in range(len(made))]
    taken: set[int] = set()
    claims = [
        _Claim(one, draws, taken, max_context=max_context, what=name) for one, name in zip(made, names, strict=True)
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


def _assign(claims: Sequence[_Claim]) -> None:
    """Keep the proof of each generated token in one claim only: a token is generated, and trained on, once."""
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
                        f"{claim.name_of(i)} bears loss in another of the samples that it returned, too: set "
                        "loss_mask 0 on it in all but one.",
                    )
                claim.proofs[i] = None


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


def _proofs(
    tokens: list[int], claimed: Sequence[Any], draws: Sequence[Draw], taken: Collection[int]
) -> list[_Proof | None]:
    """Return for each token the request that generated it and its index there.

    The longest match goes first. Of requests with the same answer, which a function may have sent for several samples,
    that with the claimed logprobs does, and then one that is not taken.
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


def _agrees(claimed: Any, logprob: float) -> bool:
    """Return whether a claimed logprob is the engine's; None claims nothing."""
    if claimed is None:
        return True
    return isinstance(claimed, (int, float)) and math.isclose(claimed, logprob, rel_tol=0.0, abs_tol=CLOSE)


def _check(proof: _Proof | None, claimed: Any, what: str) -> None:
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
    if not _agrees(claimed, drawn):
        raise HookError(
            JobFailure.HOOK_UNPROVEN,
            f"{what} claims log-probability {safe_repr(claimed)}, but was sampled with {drawn}.",
        )


def _describe(sample: Sample, made: Sequence[Any], used: Sequence[Draw]) -> None:
    """Set text, turns, times and counts. A sample is truncated if one of those that were returned is."""
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
