"""Rewards of steps as advantages of tokens, against the formula written out (arXiv 2402.03300, 4.1.3)."""

from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.trainer import ProcessConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import process
from penstock.consumers.grpo.ranks import Ranks
from penstock.errors import PayloadError, ProtocolError
from penstock.names import STEP_REWARDS
from penstock.records.sample import Sample
from tests.batch_factory import make_samples, tiny_model, with_beside

ALONE = Ranks(1, None, torch.device("cpu"))
#: (index in the response, reward) of each step, by sample: two groups of two, one of which has a single step in all.
STEPS: list[list[tuple[int, float]]] = [[(0, 1.0), (3, 0.0)], [(2, 0.5)], [(1, 7.0)], []]


def samples() -> list[Sample]:
    return make_samples({6: tiny_model(1)}, groups=2, n=2)


def batch_of(made: list[Sample], steps: list[list[tuple[int, float]]] = STEPS, **changes: Any) -> Batch:
    arrays = {one.id: np.array(of, np.float32).reshape(len(of), 2) for one, of in zip(made, steps, strict=True)}
    return with_beside(made, STEP_REWARDS, arrays, **changes)


def advantages(batch: Batch, **config: Any) -> dict[int, list[float]]:
    """Of each row, of the tokens of its response."""
    parts = list(batch.minibatches(1))
    process.give_advantages(batch, parts, ProcessConfig(**config), ALONE)
    found = {}
    for micro in parts[0]:
        for at, index in enumerate(micro["rows"].tolist()):
            row = batch.all_rows[index]
            assert not micro["advantages"][at, : row.prompt_length].any(), "a prompt is nobody's choice"
            found[index] = micro["advantages"][at, row.prompt_length : row.length].tolist()
    return found


def written_out(row: Any, steps: list[tuple[int, float]], of_group: list[float]) -> list[float]:
    center, spread = mean(of_group), stdev(of_group) if len(of_group) > 1 else 0.0
    return [
        sum((reward - center) / (spread + 1e-6) for end, reward in steps if end >= t)
        for t in range(row.length - row.prompt_length)
    ]


def test_a_token_has_what_the_steps_that_end_with_it_or_later_are_worth() -> None:
    batch = batch_of(samples())
    found = advantages(batch, weight=2.0)

    for index, row in enumerate(batch.all_rows):
        of_group = [r for other in (0, 1, 2, 3) if other // 2 == index // 2 for _, r in STEPS[other]]
        wanted = written_out(row, STEPS[index], of_group) if of_group else [0.0]
        assert found[index] == pytest.approx([2 * one for one in wanted], rel=1e-4, abs=1e-5)
    assert any(found[0]), "a step that is worth 0 is a step"
    assert not any(found[2]), "it has nothing to be compared with"


def test_it_may_stand_beside_the_rewards_of_whole_answers() -> None:
    batch = batch_of(samples())
    alone, beside = advantages(batch), advantages(batch, with_rewards=True)

    for index, own in enumerate(batch.advantages.tolist()):
        assert beside[index] == pytest.approx([one + own for one in alone[index]], rel=1e-4, abs=1e-5)


def test_T11_a_sample_that_never_bore_loss_is_compared_with_none() -> None:
    made = samples()
    made[1].loss_mask = [0] * len(made[1].tokens)
    batch = batch_of(made, row_changes={1: {"masked": True}})
    found = advantages(batch)

    assert found[0] == pytest.approx(written_out(batch.all_rows[0], STEPS[0], [1.0, 0.0]), rel=1e-4, abs=1e-5)
    assert not any(found[1])


@pytest.mark.parametrize("wrong", [[(10_000, 1.0)], [(-1, 1.0)], [(0.5, 1.0)], [(0, float("nan"))]])
def test_T17_what_are_no_rewards_of_steps_stops_the_batch(wrong: list[tuple[float, float]]) -> None:
    batch = batch_of(samples(), [wrong, *STEPS[1:]])  # type: ignore[list-item]
    with pytest.raises(PayloadError, match=r"toy/0/0/0: its side array 'step_rewards' of shape \(1, 2\) is not"):
        advantages(batch)


def test_T17_a_sample_without_any_stops_every_rank() -> None:
    made = samples()
    with pytest.raises(ProtocolError, match=r"trainer\.process needs the side array 'step_rewards'"):
        advantages(with_beside(made, STEP_REWARDS, {}))
    some = {made[0].id: np.zeros((1, 2), np.float32)}
    with pytest.raises(PayloadError, match="toy/0/0/1 lacks side array 'step_rewards'"):
        advantages(with_beside(made, STEP_REWARDS, some))
