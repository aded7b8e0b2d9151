"""Rewards of steps: what a reward gives for tokens of the response, besides its number for the whole answer.

    {"score": 1.0, "step_rewards": [[12, 0.5], [40, 1.0]]}     steps that end with tokens 12 and 40 of the response
    {"score": 1.0, "token_rewards": [0.0, 0.1, ...]}           every token of the response is a step

They become the side array ``step_rewards`` of the sample.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import RewardError
from penstock.names import STEP_REWARDS
from penstock.payloads.step_rewards import are_step_rewards
from penstock.protocol.records.job import JobFailure
from penstock.protocol.records.sample import Sample
from penstock.text import safe_repr
from penstock.workers.rewards.outcomes import MAX_REWARD

TOKEN_REWARDS = "token_rewards"

#: Index of a token of the response -> the reward of the step that ends with it.
Steps = dict[int, float]


def take_out(info: dict[str, Any], sample: Sample, name: str) -> Steps | None:
    """Remove the step rewards from ``info``, a reward's entries, and return them; None if it has none.

    Raises:
        RewardError: reward_not_a_number if they are not finite numbers for tokens of the response, in order.
    """
    found = {key: info.pop(key) for key in (STEP_REWARDS, TOKEN_REWARDS) if key in info}
    if not found:
        return None
    what = f"sample {sample.id}: reward {name} gave"
    if len(found) == 2:
        raise RewardError(
            JobFailure.REWARD_NOT_A_NUMBER, f"{what} {STEP_REWARDS} and {TOKEN_REWARDS}: give one of them."
        )
    length = len(sample.tokens) - sample.prompt_length
    ((key, value),) = found.items()
    pairs = _pairs_of_tokens(value, length) if key == TOKEN_REWARDS else _pairs(value, length)
    if pairs is None:
        like = f"one finite number for each of the {length} tokens of its response"
        if key == STEP_REWARDS:
            like = f"pairs of a token's index in its response, below {length} and rising, and a finite number"
        raise RewardError(JobFailure.REWARD_NOT_A_NUMBER, f"{what} {key} {safe_repr(value)}, which are not {like}.")
    return dict(pairs)


def keep(sample: Sample, steps: Steps | None) -> None:
    """Set the sample's side array of step rewards; if ``steps`` is None, check the one user code may have set.

    Raises:
        RewardError: reward_not_a_number if it is invalid: a trainer would stop at its whole batch.
    """
    if steps is not None:
        sample.sides[STEP_REWARDS] = as_array(steps)
    if (side := sample.sides.get(STEP_REWARDS)) is None:
        return
    length = len(sample.tokens) - sample.prompt_length
    array = np.asarray(side)
    if not are_step_rewards(array, length):
        raise RewardError(
            JobFailure.REWARD_NOT_A_NUMBER,
            f"sample {sample.id}: its side array {STEP_REWARDS!r} of shape {array.shape} is not [steps, 2], the "
            f"index of a token of its response, below {length} and rising, and a finite number.",
        )


def added(steps: Steps, more: Steps, weight: float) -> Steps:
    """Return the sum of ``steps`` and ``weight`` times those of another part of the reward."""
    return steps | {at: steps.get(at, 0.0) + weight * number for at, number in more.items()}


def as_array(steps: Steps) -> NDArray[np.float32]:
    """[S, 2] Return index and reward of each step, in order."""
    with np.errstate(over="ignore"):  # infinite then, and refused
        return np.array(sorted(steps.items()), np.float32).reshape(len(steps), 2)


def _pairs_of_tokens(value: Any, length: int) -> list[tuple[int, float]] | None:
    if not isinstance(value, list) or len(value) != length or not all(map(_is_number, value)):
        return None
    return [(at, float(number)) for at, number in enumerate(value)]


def _pairs(value: Any, length: int) -> list[tuple[int, float]] | None:
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        return None
    indices = [one[0] for one in value]
    if not all(type(at) is int and 0 <= at < length for at in indices) or not all(_is_number(one[1]) for one in value):
        return None
    if any(later <= earlier for earlier, later in pairwise(indices)):
        return None
    return [(at, float(number)) for at, number in value]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= MAX_REWARD  # nan is not, nor is a huge integer
