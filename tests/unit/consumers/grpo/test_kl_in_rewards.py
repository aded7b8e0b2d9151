"""A penalty in the reward is of all that a sample drew: no mask makes an answer look nearer to the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.consumers.batch.batch import Batch
from penstock.errors import PayloadError
from penstock.names import REFERENCE_LOGPROBS
from penstock.records.sample import Sample, SampleStatus
from tests.batch_factory import make_batch, near_model, tiny_model, with_beside
from tests.unit.consumers.grpo.test_kl import NUMPY, WEIGHT, by_reference, config, drawn, learner

IN_REWARD = {"weight": WEIGHT, "place": "reward"}


def penalised(batch: Batch, **changes: Any) -> dict[str, float]:
    """Take the penalty off the rewards of a batch; the metrics of it."""
    own = tiny_model(3) if not batch.has_side(REFERENCE_LOGPROBS) else None
    trainer = learner(near_model(), config(kl=IN_REWARD | changes), reference=own, max_samples=2)
    return trainer._take_off_rewards(batch)


def equally_rewarded() -> list[Sample]:
    """The penalty alone tells them apart."""
    found = drawn()
    for one in found:
        one.reward = 1.0
    return found


def one_removed(samples: list[Sample]) -> Batch:
    batch = make_batch(samples)
    batch.remove([0])
    return batch


def one_untrained_turn(samples: list[Sample]) -> Batch:
    """A user has taken the loss off the first half of what one sample drew."""
    at = samples[0].prompt_length
    samples[0].loss_mask[at : at + 5] = [0] * 5
    return make_batch(samples)


def one_truncated(samples: list[Sample]) -> Batch:
    samples[0].status = SampleStatus.TRUNCATED
    batch = make_batch(samples, row_changes={0: {"num_loss": 0, "oldest_loss": -1}}, mask_truncated=True)
    assert not batch.arrays()["loss_mask"][0].any()
    return batch


MASKS: dict[str, Callable[[list[Sample]], Batch]] = {
    "hooks.samples": one_removed,
    "expiry": lambda samples: make_batch(samples, mask_below=5),
    "user": one_untrained_turn,
    "mask_truncated": one_truncated,
}


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("mask", MASKS)
def test_T11_a_mask_takes_nothing_off_the_penalty(mask: str, kind: str, advantage: Any) -> None:
    whole, masked = make_batch(equally_rewarded()), MASKS[mask](equally_rewarded())
    for batch in (whole, masked):
        batch._advantage = advantage
        penalised(batch, estimator=kind)

    assert masked.counts["loss_tokens"] < whole.counts["loss_tokens"]
    np.testing.assert_allclose(masked.advantages, whole.advantages, rtol=1e-5)


def test_the_metric_is_the_mean_over_the_loss_tokens() -> None:
    samples = drawn()
    said = by_reference(samples)
    terms = [
        NUMPY["k3"](np.float64(said[one.id][t - one.prompt_length] - mu))
        for one in samples
        for t, mu in enumerate(one.logprobs)
        if one.versions[t] >= 5
    ]
    assert penalised(make_batch(samples, mask_below=5))["ref_kl"] == pytest.approx(np.mean(terms), rel=1e-4)


def test_T11_a_sample_whose_payload_is_lost_is_compared_with_none() -> None:
    """Nobody knows how far it was from the reference: nothing is made of its reward, and others are not held to it."""
    samples = equally_rewarded()
    batch, without = make_batch(samples), make_batch(equally_rewarded()[1:])
    assert isinstance(batch.payloads, dict)
    batch.payloads[samples[0].id] = None

    penalised(batch)
    penalised(without)

    assert batch.advantages[0] == 0
    np.testing.assert_allclose(batch.advantages[1:], without.advantages, rtol=1e-5)


def test_T11_what_is_removed_weighs_in_the_whitening_either_way() -> None:
    """Samples that a hook takes out stay in their group for advantages, whenever these are made."""
    before, after = (make_batch(drawn(), advantage="reinforce_pp_baseline") for _ in range(2))
    after.remove([0])
    for batch in (before, after):
        penalised(batch)
    np.testing.assert_allclose(after.advantages, before.advantages, rtol=1e-5)


def test_a_sample_without_the_reference_is_refused_where_its_reward_counts() -> None:
    """One that bears no loss has a place in its group all the same; one that never bore any has none."""
    samples = drawn()
    said = by_reference(samples)
    del said[samples[0].id]
    no_loss = {"num_loss": 0, "oldest_loss": -1}
    samples[0].loss_mask = [0] * len(samples[0].tokens)

    never = with_beside(samples, REFERENCE_LOGPROBS, said, row_changes={0: no_loss | {"masked": True}})
    penalised(never)
    assert never.advantages[0] == 0

    expired = with_beside(samples, REFERENCE_LOGPROBS, said, row_changes={0: no_loss | {"masked": False}})
    with pytest.raises(PayloadError, match=f"sample {samples[0].id} lacks side array 'reference_logprobs'"):
        penalised(expired)
    learner(near_model(), config(kl=IN_REWARD | {"place": "loss"})).step(expired)
