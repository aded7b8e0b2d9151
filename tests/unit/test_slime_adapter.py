"""slime's train data: what each key holds, against the samples it was made from."""

import statistics
from typing import Any

import numpy as np
import pytest

from consumers.adapters.slime import train_data
from consumers.batch import Batch
from penstock.errors import ConfigError
from penstock.messages import Sample
from tests.batch_factory import make_batch, make_samples, tiny_model

PER_SAMPLE = (
    "tokens", "response_lengths", "rewards", "truncated", "loss_masks", "rollout_log_probs", "sample_indices",
    "rollout_ids", "source_names", "metadata", "partition",
)  # fmt: skip


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Eleven answers in groups of 4, 4 and 3."""
    samples = make_samples({4: tiny_model(1), 5: tiny_model(2)}, groups=3, n=4)[:-1]
    samples[2].status = "truncated"
    return samples


def shares(samples: list[Sample], dp_size: int, split: str = "balanced", **options: Any) -> list[dict[str, Any]]:
    batches = (make_batch(samples, dp_rank=rank, dp_size=dp_size, split=split) for rank in range(dp_size))
    return [train_data(batch, **options) for batch in batches]


def test_every_key_holds_what_the_sample_has(samples: list[Sample]) -> None:
    [data] = shares(samples, 1)
    assert sorted(data["partition"]) == list(range(len(samples)))
    assert {len(data[key]) for key in PER_SAMPLE} == {len(samples)}
    for at, index in enumerate(data["partition"]):
        sample = samples[index]
        behind = slice(sample.prompt_length, None)
        assert data["tokens"][at] == sample.tokens
        assert data["response_lengths"][at] == len(sample.tokens) - sample.prompt_length
        assert data["loss_masks"][at] == sample.loss_mask[behind]
        assert data["rollout_log_probs"][at] == pytest.approx(sample.logprobs[behind])
        assert data["truncated"][at] == (sample.status == "truncated")
        assert data["source_names"][at] == "toy"
        assert (data["metadata"][at]["job"], data["metadata"][at]["k"]) == (sample.job.id, sample.k)
        assert data["metadata"][at]["oldest_version"] == 4
    assert data["raw_reward"] == [sample.reward for sample in samples], "of the whole batch, in its order"
    assert data["total_lengths"] == [len(sample.tokens) for sample in samples]
    assert data["global_batch_sizes"] == [11]


def test_T8_tokens_that_are_too_old_have_mask_0(samples: list[Sample]) -> None:
    batch = make_batch(samples, mask_below=5)
    data = train_data(batch)
    for at, index in enumerate(data["partition"]):
        versions = np.array(samples[index].versions[samples[index].prompt_length :])
        assert data["loss_masks"][at] == (versions >= 5).astype(int).tolist()


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "ppo"])
@pytest.mark.parametrize("std", [True, False])
def test_T11_rewards_are_normalised_by_group_id_though_groups_differ_in_size(
    samples: list[Sample], estimator: str, std: bool
) -> None:
    for data in shares(samples, 2, estimator=estimator, std=std):
        for at, index in enumerate(data["partition"]):
            sample = samples[index]
            group = [one.reward or 0.0 for one in samples if one.job.id == sample.job.id]
            wanted = sample.reward or 0.0
            if estimator != "ppo":
                wanted -= statistics.mean(group)
            if std and estimator in ("grpo", "gspo", "cispo"):
                wanted /= statistics.stdev(group) + 1e-6
            assert data["rewards"][at] == pytest.approx(wanted)


def test_T11_a_group_of_one_has_reward_0(samples: list[Sample]) -> None:
    [data] = shares(samples[:9], 1)
    assert data["rewards"][data["partition"].index(8)] == 0.0


def test_rewards_stay_raw_where_normalisation_is_off(samples: list[Sample]) -> None:
    [data] = shares(samples, 1, normalize=False)
    assert [data["rewards"][data["partition"].index(i)] for i in range(11)] == data["raw_reward"]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("limits", [{}, {"max_tokens": 40}, {"max_tokens": 5}, {"max_samples": 1}])
@pytest.mark.parametrize("split", ["balanced", "tokens", "strided"])
def test_T10_ranks_divide_the_batch_into_equally_many_micro_batches(
    samples: list[Sample], dp_size: int, limits: dict[str, int], split: str
) -> None:
    every = shares(samples, dp_size, split, **limits)
    assert len({data["num_microbatches"][0] for data in every}) == 1
    real = [place for data in every for place in data["partition"] if place < len(samples)]
    assert sorted(real) == list(range(len(samples)))
    for data in every:
        indices = data["micro_batch_indices"]
        assert len(indices) == data["num_microbatches"][0]
        assert all(indices), "slime runs no empty micro-batch"
        assert sorted(i for one in indices for i in one) == list(range(len(data["tokens"])))
        assert {len(data[key]) for key in PER_SAMPLE} == {len(data["tokens"])}
        for tokens, place in zip(data["tokens"], data["partition"], strict=True):
            assert data["total_lengths"][place] == len(tokens)
        for one in indices:
            total = sum(len(data["tokens"][i]) for i in one)
            assert len(one) == 1 or total <= limits.get("max_tokens", 10**6)
            assert len(one) <= limits.get("max_samples", 10**6)
        fillers = [at for at, place in enumerate(data["partition"]) if place >= len(samples)]
        assert all(data["loss_masks"][at] == [0] and data["rewards"][at] == 0.0 for at in fillers)


def test_a_lost_payload_is_a_row_without_loss(samples: list[Sample]) -> None:
    batch = make_batch(samples)
    batch._payloads[samples[3].id] = None  # type: ignore[index]
    data = train_data(batch)
    at = data["partition"].index(3)
    assert (data["tokens"][at], data["response_lengths"][at], data["loss_masks"][at]) == ([0, 0], 1, [0])
    assert data["total_lengths"][3] == 2
    assert data["raw_reward"][3] == samples[3].reward


def test_a_column_that_any_sample_has_is_there_for_all(samples: list[Sample]) -> None:
    column = {samples[6].id: [1.0, 2.0]}
    [data] = shares(samples, 1, columns={"teacher_log_probs": column, "round_number": {}})
    at = data["partition"].index(6)
    assert data["teacher_log_probs"][at] == [1.0, 2.0]
    assert [value for i, value in enumerate(data["teacher_log_probs"]) if i != at] == [None] * 10
    assert "round_number" not in data


def test_a_column_may_not_replace_a_key(samples: list[Sample]) -> None:
    with pytest.raises(ConfigError, match=r"columns\['tokens'\]"):
        shares(samples, 1, columns={"tokens": {samples[0].id: 1}})


def test_side_arrays_stand_under_slimes_names(samples: list[Sample]) -> None:
    batch: Batch = make_batch(samples)
    from penstock import payloads

    data = payloads.encode(samples[0], {"routed_experts": np.ones((2, 3), np.int16)})
    batch._payloads[samples[0].id] = data  # type: ignore[index]
    row = batch.rows[0]
    object.__setattr__(row, "checksum", payloads.checksum_of(data))
    found = train_data(batch)["rollout_routed_experts"]
    assert [value is not None for value in found] == [True] + [False] * 10


def test_sample_indices_count_on(samples: list[Sample]) -> None:
    [data] = shares(samples, 1, first_index=100)
    assert data["sample_indices"] == [100 + place for place in data["partition"]] == data["rollout_ids"]
