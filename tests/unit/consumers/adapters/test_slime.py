"""slime's train data: what each key holds, against the samples it was made from."""

import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.consumers.adapters.slime import lineage, train_data, train_shares
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.losses import token_weights
from penstock.errors import ConfigError, PenstockError, ProtocolError
from penstock.records.sample import Sample
from tests.adapters.slime_contract import check_share
from tests.batch_factory import make_batch, make_samples, tiny_model, with_sides

PER_SAMPLE = (
    "tokens", "response_lengths", "rewards", "truncated", "loss_masks", "rollout_log_probs", "sample_indices",
    "rollout_ids", "source_names", "partition", "temperatures", "oldest_versions", "newest_versions",
    "rollout_mask_sums",
)  # fmt: skip


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Eleven answers in groups of 4, 4 and 3."""
    samples = make_samples({4: tiny_model(1), 5: tiny_model(2)}, groups=3, n=4)[:-1]
    samples[2].status = "truncated"
    return samples


def shares(samples: list[Sample], dp_size: int, split: str = "balanced", **options: Any) -> list[dict[str, Any]]:
    batches = (make_batch(samples, dp_rank=rank, dp_size=dp_size, split=split) for rank in range(dp_size))
    made = [train_data(batch, **options) for batch in batches]
    for data in made:
        check_share(data, len(samples))
    return made


def with_lost_sides(
    samples: list[Sample], sides: dict[str, dict[str, NDArray[Any]]], *lost: int, **changes: Any
) -> Batch:
    """A batch of samples with side arrays (sample id -> name -> array), some of whose payloads are lost."""
    batch = with_sides(samples, sides, **changes)
    for i in lost:
        batch.payloads[samples[i].id] = None  # type: ignore[index]
    return batch


def experts_of(samples: list[Sample], num_experts: int = 256) -> dict[str, dict[str, NDArray[Any]]]:
    """Routing of every sample, uint8 as workers store it, and a teacher's logprobs of what was drawn."""
    rng = np.random.default_rng(1)
    return {
        one.id: {
            "routed_experts": rng.integers(0, num_experts, (len(one.tokens) - 1, 2, 2)).astype(np.uint8),
            "teacher_logprobs": rng.normal(-1, 0.1, len(one.tokens) - one.prompt_length).astype(np.float32),
        }
        for one in samples
    }


def test_every_key_holds_what_the_sample_has(samples: list[Sample]) -> None:
    [data] = shares(samples, 1)
    assert sorted(data["partition"]) == list(range(len(samples)))
    assert {len(data[key]) for key in PER_SAMPLE} == {len(samples)}
    for at, index in enumerate(data["partition"]):
        sample = samples[index]
        behind = slice(sample.prompt_length, None)
        assert data["tokens"][at].tolist() == sample.tokens
        assert data["response_lengths"][at] == len(sample.tokens) - sample.prompt_length
        assert data["loss_masks"][at].tolist() == sample.loss_mask[behind]
        assert data["rollout_mask_sums"][at] == sum(sample.loss_mask)
        assert data["rollout_log_probs"][at] == pytest.approx(sample.logprobs[behind])
        assert data["truncated"][at] == (sample.status == "truncated")
        assert data["source_names"][at] == "toy"
        assert (data["oldest_versions"][at], data["newest_versions"][at]) == (4, 5)
    assert data["raw_reward"] == [sample.reward for sample in samples], "of the whole batch, in its order"
    assert data["total_lengths"] == [len(sample.tokens) for sample in samples]
    assert data["global_batch_sizes"] == [11]
    origins = lineage(make_batch(samples), data)
    assert [(one["job"], one["k"]) for one in origins] == [
        (samples[place].job.id, samples[place].k) for place in data["partition"]
    ]


def test_T8_tokens_that_are_too_old_have_mask_0(samples: list[Sample]) -> None:
    batch = make_batch(samples, mask_below=5)
    data = train_data(batch)
    for at, index in enumerate(data["partition"]):
        versions = np.array(samples[index].versions[samples[index].prompt_length :])
        assert data["loss_masks"][at].tolist() == (versions >= 5).astype(int).tolist()


def test_T10_what_is_left_of_a_stale_answer_weighs_no_more_than_it_did(samples: list[Sample]) -> None:
    """slime divides by ``rollout_mask_sums``: so that it weighs what penstock's own ``aggregation: sample`` says."""
    batch = make_batch(samples, mask_below=5)
    [data] = train_shares(with_lost_sides(samples, {}, 3, mask_below=5), 1)
    masked = 0
    for at, index in enumerate(data["partition"]):
        left = int(data["loss_masks"][at].sum())
        drawn = 1 if index == 3 else sum(samples[index].loss_mask)
        masked += left < drawn
        assert data["rollout_mask_sums"][at] == drawn
    assert masked
    [whole] = batch.micro_batches()
    weights = token_weights(whole["loss_mask"], "sample", generated=whole["generated"]).sum(-1).tolist()
    for at, index in enumerate(data["partition"]):
        if index != 3:
            own = weights[whole["rows"].tolist().index(index)]
            assert int(data["loss_masks"][at].sum()) / float(data["rollout_mask_sums"][at]) == pytest.approx(own)


def test_fillers_are_divided_by_1(samples: list[Sample]) -> None:
    for data in shares(samples[:3], 4):
        for at, mask in enumerate(data["loss_masks"]):
            if not mask.any():
                assert data["rollout_mask_sums"][at] == 1


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
    # Each row stands once; what it stands beside once more is a filler.
    assert {place for data in every for place in data["partition"]} >= set(range(len(samples)))
    bearing = [
        place for data in every for place, mask in zip(data["partition"], data["loss_masks"], strict=True) if mask.any()
    ]
    assert sorted(bearing) == list(range(len(samples)))
    for data in every:
        indices = data["micro_batch_indices"]
        assert len(indices) == data["num_microbatches"][0]
        assert all(indices), "slime runs no empty micro-batch"
        assert sorted(i for one in indices for i in one) == list(range(len(data["tokens"])))
        for one in indices:
            total = sum(len(data["tokens"][i]) for i in one)
            assert len(one) == 1 or total <= limits.get("max_tokens", 10**6)
            assert len(one) <= limits.get("max_samples", 10**6)


def test_T10_micro_batches_are_a_multiple_where_pipeline_stages_want_it(samples: list[Sample]) -> None:
    for data in shares(samples, 2, max_samples=1, multiple=4):
        assert data["num_microbatches"] == [8]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_fillers_are_copies_of_a_real_row_with_mask_0(samples: list[Sample], dp_size: int) -> None:
    batch = with_lost_sides(samples, experts_of(samples))
    every = train_shares(batch, dp_size, max_samples=2, multiple=12)
    fillers = 0
    for data in every:
        check_share(data, len(samples))
        for at, mask in enumerate(data["loss_masks"]):
            if mask.any():
                continue
            fillers += 1
            sample = samples[data["partition"][at]]
            assert data["tokens"][at].tolist() == sample.tokens
            assert data["raw_reward"][data["partition"][at]] == sample.reward
            assert data["rollout_routed_experts"][at].count_nonzero(), "not expert 0 everywhere"
    assert fillers > 0


def test_a_rank_without_any_row_copies_one_of_another_rank(samples: list[Sample]) -> None:
    every = train_shares(with_lost_sides(samples[:3], experts_of(samples)), 4)
    assert sorted(len(data["tokens"]) for data in every) == [1, 1, 1, 1]
    for data in every:
        check_share(data, 3)
    assert sum(bool(data["loss_masks"][0].any()) for data in every) == 3


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_a_lost_payload_is_a_copy_of_a_real_row_without_loss(samples: list[Sample], dp_size: int) -> None:
    batch = with_lost_sides(samples, experts_of(samples), 3, 7)
    for data in train_shares(batch, dp_size, max_tokens=40):
        check_share(data, len(samples))
        for lost in {3, 7} & set(data["partition"]):
            at = data["partition"].index(lost)
            tokens = data["tokens"][at].tolist()
            assert tokens in [one.tokens for i, one in enumerate(samples) if i not in (3, 7)]
            assert not data["loss_masks"][at].any()
            assert data["raw_reward"][lost] == samples[lost].reward
            assert data["total_lengths"][lost] == len(tokens)


def test_a_batch_of_which_nothing_is_left_has_rows_without_loss(samples: list[Sample]) -> None:
    [data] = train_shares(with_lost_sides(samples[:4], {}, 0, 1, 2, 3), 1)
    check_share(data, 4)
    assert not any(mask.any() for mask in data["loss_masks"])


def test_a_rank_alone_without_any_row_makes_one_up_but_no_routing(samples: list[Sample]) -> None:
    [*_, data] = sorted(shares(samples[:3], 4), key=lambda data: -sum(int(mask.sum()) for mask in data["loss_masks"]))
    assert data["tokens"][0].tolist() == [0, 0]
    empty = next(batch for rank in range(4) if not (batch := make_batch(samples[:3], dp_rank=rank, dp_size=4)).rows)
    empty.all_rows[0].sides = [["routed_experts", 8, 0]]
    with pytest.raises(ProtocolError, match=r"rollout_routed_experts cannot be made up: .*train_shares"):
        train_data(empty)


def test_T17_routing_of_256_experts_is_no_uint8(samples: list[Sample]) -> None:
    sides = experts_of(samples)
    [data] = train_shares(with_lost_sides(samples, sides), 1)
    for at, place in enumerate(data["partition"]):
        found = data["rollout_routed_experts"][at]
        assert found.dtype == torch.int32
        assert found.tolist() == sides[samples[place].id]["routed_experts"].tolist()
        wanted = torch.tensor(sides[samples[place].id]["teacher_logprobs"])
        assert torch.equal(data["teacher_log_probs"][at], wanted)


def test_a_teachers_logprobs_may_be_of_the_whole_sequence(samples: list[Sample]) -> None:
    whole = {one.id: {"teacher_logprobs": np.arange(len(one.tokens), dtype=np.float32)} for one in samples}
    [data] = train_shares(with_lost_sides(samples, whole), 1)
    at = data["partition"].index(2)
    assert data["teacher_log_probs"][at].tolist() == list(range(samples[2].prompt_length, len(samples[2].tokens)))


@pytest.mark.parametrize(("name", "length"), [("routed_experts", 5), ("teacher_logprobs", 1)])
def test_T17_a_side_array_of_another_length_is_refused(samples: list[Sample], name: str, length: int) -> None:
    sides = experts_of(samples)
    sides[samples[2].id][name] = sides[samples[2].id][name][:length]
    with pytest.raises(PenstockError, match=rf"toy/0/0/2: .* (has {length} entries|of shape \({length},\))"):
        train_shares(with_lost_sides(samples, sides), 1)


def test_T17_a_side_array_that_only_some_samples_have_is_refused(samples: list[Sample]) -> None:
    sides = experts_of(samples)
    del sides[samples[4].id]["routed_experts"]
    with pytest.raises(ProtocolError, match=r"toy/0/1/0 has no side array 'routed_experts'.*rollout\.sides"):
        train_shares(with_lost_sides(samples, sides), 2)


def test_what_bears_no_loss_may_lack_a_side_array_and_is_a_filler_then(samples: list[Sample]) -> None:
    sides = experts_of(samples)
    del sides[samples[4].id]["routed_experts"]
    mute = [replace(one, loss_mask=[0] * len(one.tokens)) if i == 4 else one for i, one in enumerate(samples)]
    [data] = train_shares(with_lost_sides(mute, sides), 1)
    check_share(data, len(samples))
    assert not data["loss_masks"][data["partition"].index(4)].any()


def test_a_column_has_a_value_for_every_sample(samples: list[Sample]) -> None:
    numbers = {one.id: i for i, one in enumerate(samples)}
    arrays = {one.id: [0.5] * i for i, one in enumerate(samples, start=1)}
    [data] = shares(samples, 1, columns={"round_number": numbers, "weights": arrays, "none": {}})
    assert data["round_number"] == data["partition"]
    assert [len(one) for one in data["weights"]] == [place + 1 for place in data["partition"]]
    assert "none" not in data
    with pytest.raises(ConfigError, match=r"columns\['round_number'\] has no value for sample toy/0/0/1"):
        shares(samples, 1, columns={"round_number": {samples[0].id: 1}})
    with pytest.raises(ConfigError, match=r"columns\['notes'\]: sample toy/0/0/0 has a value of str"):
        shares(samples, 1, columns={"notes": dict.fromkeys(numbers, "good")})


def test_images_are_the_one_thing_that_a_sample_may_lack(samples: list[Sample]) -> None:
    image = {"pixel_values": torch.zeros(2, 3)}
    [data] = shares(samples, 1, columns={"multimodal_train_inputs": {samples[6].id: image}})
    found = data["multimodal_train_inputs"]
    assert [place for place, one in zip(data["partition"], found, strict=True) if one is not None] == [6]


def test_a_column_may_not_replace_a_key(samples: list[Sample]) -> None:
    with pytest.raises(ConfigError, match=r"columns\['tokens'\]"):
        shares(samples, 1, columns={"tokens": {samples[0].id: 1}})


def test_sample_indices_count_on(samples: list[Sample]) -> None:
    [data] = shares(samples, 1, first_index=100)
    assert data["sample_indices"] == [100 + place for place in data["partition"]] == data["rollout_ids"]


def test_T10_samples_of_one_rollout_share_its_id_and_what_they_are_divided_by(samples: list[Sample]) -> None:
    ids = {one.id: 70 + i // 2 for i, one in enumerate(samples)}
    generated = [sum(one.loss_mask) for one in samples]
    sums = {ids[one.id]: sum(n for n, other in zip(generated, samples, strict=True) if ids[other.id] == ids[one.id])
            for one in samples}  # fmt: skip
    found = [*train_shares(make_batch(samples), 2, columns={"rollout_ids": ids})]
    found += [train_data(make_batch(samples, dp_rank=1, dp_size=2), columns={"rollout_ids": ids})]
    for data in found:
        check_share(data, len(samples), num_rollouts=6)
        assert data["rollout_ids"] == [ids[samples[place].id] for place in data["partition"]]
        bears = [bool(mask.any()) for mask in data["loss_masks"]]
        assert [
            int(one) for one, loss in zip(data["rollout_mask_sums"], bears, strict=True) if loss
        ] == [sums[one] for one, loss in zip(data["rollout_ids"], bears, strict=True) if loss]  # fmt: skip


def test_a_sample_may_have_a_raw_reward_and_train_metadata_of_its_own(samples: list[Sample]) -> None:
    about = {"turns": [1, 2], "tool": "python"}
    columns: dict[str, Any] = {"raw_reward": {samples[3].id: 2.5}, "metadata": {samples[3].id: about}}
    for data in train_shares(make_batch(samples), 2, columns=columns):
        check_share(data, len(samples))
        assert data["raw_reward"] == [2.5 if i == 3 else one.reward for i, one in enumerate(samples)]
        assert data["metadata"] == [about if place == 3 else None for place in data["partition"]]


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("rollout_ids", 1.5, "give an integer for every sample"),
        ("rollout_ids", None, "give an integer for every sample"),
        ("raw_reward", float("nan"), "give a finite number"),
        ("raw_reward", "good", "give a finite number"),
        ("metadata", 3, "give a dict"),
    ],
)
def test_a_field_of_slimes_that_is_of_another_kind_is_refused(
    samples: list[Sample], column: str, value: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"columns\['{column}'\].*{samples[0].id}: {says}"):
        train_shares(make_batch(samples), 1, columns={column: {samples[0].id: value}})
