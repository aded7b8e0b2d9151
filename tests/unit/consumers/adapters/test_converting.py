"""``hooks.convert``: rewards, loss taken off and keys of its own reach a slime-shaped trainer; what was drawn stays."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from penstock.config import Config
from penstock.console.launch.trainable import check_hooks
from penstock.consumers.adapters.converting import Converter
from penstock.consumers.adapters.rollout_manager import _check_hooks as check_hooks_of
from penstock.consumers.adapters.slime import train_shares
from penstock.errors import ConfigError, HookError
from penstock.records.sample import Sample
from tests.adapters.slime_contract import check_share
from tests.batch_factory import make_batch, make_samples, tiny_model
from tests.unit.consumers.adapters.test_slime import experts_of, with_lost_sides, with_sides

HERE = "tests.unit.consumers.adapters.test_converting"


def as_slime_has_it(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    """The keys that slime's own has, with other rewards, a shorter loss mask, and one key more."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [args.scale * sample.index for sample in samples],
        "raw_reward": [float(sample.index) for sample in samples],
        "truncated": [int(sample.index == 3) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.rollout_id for sample in samples],
        "loss_masks": [[0, *sample.loss_mask[1:]] for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "bonus": [0.5 * sample.metadata["k"] for sample in samples],
    }


def as_slimes_own(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    """Every key that slime's own function makes of what samples have, theirs beside the ones of a plain run."""
    for sample in samples:
        sample.loss_mask = [0] * sample.response_length if sample.remove_sample else sample.loss_mask
    found = as_slime_has_it(Namespace(scale=1.0), samples) | {
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_mask_sums": [sum(sample.loss_mask) for sample in samples],
        "source_names": [sample.metadata["source_name"] for sample in samples],
    }
    for key, attribute in {
        "rollout_top_p_token_ids": "rollout_top_p_token_ids",
        "rollout_routed_experts": "rollout_routed_experts",
        "metadata": "train_metadata",
        "multimodal_train_inputs": "multimodal_train_inputs",
        "teacher_log_probs": "teacher_log_probs",
    }.items():
        if getattr(samples[0], attribute) is not None:
            found[key] = [getattr(sample, attribute) for sample in samples]
    del found["bonus"]
    return found


def divides_by_two(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    return {"rollout_mask_sums": [2 * sample.response_length for sample in samples]}


def names_another_source(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    return {"source_names": ["web" for _ in samples]}


def teaches(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    for sample in samples:
        sample.teacher_log_probs += 1
    return {"teacher_log_probs": [sample.teacher_log_probs for sample in samples]}


def by_length(batch: Any) -> Mapping[str, Any]:
    return {"rewards": np.array([row.length for row in batch.all_rows])}


def draws_by_itself(args: Any, samples: list[Any]) -> dict[str, Any]:
    return {"tokens": [[*sample.tokens[:-1], 3] for sample in samples]}


def makes_likelier(args: Any, samples: list[Any]) -> dict[str, Any]:
    return {"rollout_log_probs": [[0.0] * sample.response_length for sample in samples]}


def adds_loss(args: Any, samples: list[Any]) -> dict[str, Any]:
    samples[4].loss_mask = [1] * samples[4].response_length
    return {"loss_masks": [sample.loss_mask for sample in samples]}


def halves(args: Any, samples: list[Any]) -> dict[str, Any]:
    return {"loss_masks": [sample.loss_mask[:1] for sample in samples]}


def leaves_some_out(args: Any, samples: list[Any]) -> dict[str, Any]:
    return {"rewards": [1.0]}


def knows_nothing(batch: Any) -> dict[str, Any]:
    return {"rewards": [float("nan")] * len(batch.all_rows)}


def takes_a_key(batch: Any) -> dict[str, Any]:
    return {"partition": [0] * len(batch.all_rows)}


def says_a_word(batch: Any) -> str:
    return "done"


def exits(batch: Any) -> Any:
    raise SystemExit(3)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    made = make_samples({4: tiny_model(1), 5: tiny_model(2)}, groups=3, n=4)[:-1]
    made[4].loss_mask[-1] = 0
    return made


def config(name: str, **args: Any) -> Config:
    hooks = {"convert": f"{HERE}:{name}", "args": args}
    values = {"run": "r", "model": {"path": "m"}, "hooks": hooks}
    return Config.model_validate(values | {"data": {"train": [{"name": "d", "path": "d.jsonl"}]}})


def shares(samples: list[Sample], name: str, dp_size: int = 2, **args: Any) -> list[dict[str, Any]]:
    made = config(name, **args)
    convert = Converter(made, f"{HERE}:{name}")
    found = train_shares(make_batch(samples), dp_size, convert=convert, first_index=7)
    for one in found:
        check_share(one, len(samples))
    return found


def test_rewards_masks_and_keys_of_ones_own_reach_the_trainer(samples: list[Sample]) -> None:
    plain = train_shares(make_batch(samples), 2, first_index=7)
    for before, data in zip(plain, shares(samples, "as_slime_has_it", scale=2.0), strict=True):
        places = data["partition"]
        assert data["rewards"] == [2.0 * (7 + place) for place in places]
        assert data["raw_reward"] == [7.0 + place for place in range(len(samples))]
        assert data["truncated"] == [int(7 + place == 3) for place in places]
        assert data["bonus"] == [0.5 * (place % 4) for place in places]
        for key in ("tokens", "rollout_log_probs", "sample_indices"):
            assert all(
                (a == b).all() if hasattr(a, "all") else a == b for a, b in zip(data[key], before[key], strict=True)
            )
        for mask, whole in zip(data["loss_masks"], before["loss_masks"], strict=True):
            assert mask[0] == 0
            assert (mask[1:] == whole[1:]).all()


def test_a_function_of_a_batch_says_what_it_wants_to(samples: list[Sample]) -> None:
    plain, found = train_shares(make_batch(samples), 2, first_index=7), shares(samples, "by_length")
    assert [data["rewards"] for data in found] == [[len(one) for one in data["tokens"]] for data in plain]
    assert found[0].keys() == plain[0].keys()


def test_a_lost_sample_is_there_without_tokens_and_stays_a_filler(samples: list[Sample]) -> None:
    convert = Converter(config("as_slime_has_it", scale=1.0), f"{HERE}:as_slime_has_it")
    batch = with_lost_sides(samples, {}, 5)

    def leaving(args: Any, given: list[Any]) -> Any:
        assert (given[5].tokens, given[5].remove_sample) == ([], True)
        return {"rewards": [0.5] * len(given), "loss_masks": [sample.loss_mask for sample in given]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_hook", type(convert._hook)("h", leaving, convert._hook.form))
        [data] = train_shares(batch, 1, convert=convert)
    assert not data["loss_masks"][data["partition"].index(5)].any()


@pytest.mark.parametrize("sides", [False, True])
def test_what_slimes_own_function_gives_is_taken(samples: list[Sample], sides: bool) -> None:
    batch = with_lost_sides(samples, experts_of(samples) if sides else {}, 5)
    convert = Converter(config("as_slimes_own"), f"{HERE}:as_slimes_own")
    plain, found = train_shares(batch, 2, first_index=7), train_shares(batch, 2, first_index=7, convert=convert)
    for before, data in zip(plain, found, strict=True):
        check_share(data, len(samples))
        assert data.keys() == before.keys()
        assert ("teacher_log_probs" in data) == ("rollout_routed_experts" in data) == sides
        for key in data.keys() - {"rewards", "raw_reward", "truncated"}:
            assert all(np.array_equal(a, b) for a, b in zip(data[key], before[key], strict=True)), key


def fans_out(args: Any, samples: list[Any]) -> dict[str, list[Any]]:
    """As slime's own function converts samples of which two are one rollout."""
    found = as_slimes_own(args, samples)
    ids = [sample.rollout_id // 2 for sample in samples]
    sums = [sum(sum(other.loss_mask) for other, two in zip(samples, ids, strict=True) if one == two) for one in ids]
    metadata = [{"index": sample.index} for sample in samples]
    return found | {"rollout_ids": ids, "rollout_mask_sums": sums, "raw_reward": ids, "metadata": metadata}


def test_T10_a_function_may_say_rollouts_raw_rewards_and_train_metadata(samples: list[Sample]) -> None:
    convert = Converter(config("fans_out"), f"{HERE}:fans_out")
    for data in train_shares(with_sides(samples, {}), 2, convert=convert):
        check_share(data, len(samples), num_rollouts=6)
        assert data["rollout_ids"] == [place // 2 for place in data["partition"]]
        assert data["metadata"] == [{"index": place} for place in data["partition"]]
        assert data["raw_reward"] == [place // 2 for place in range(len(samples))]


def test_a_teacher_cannot_be_changed(samples: list[Sample]) -> None:
    convert = Converter(config("teaches"), f"{HERE}:teaches")
    with pytest.raises(HookError, match=r"changed teacher_log_probs of sample toy/0/0/0"):
        train_shares(with_sides(samples, experts_of(samples)), 2, convert=convert)


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("draws_by_itself", "hook_unproven", "changed tokens of sample toy/0/0/0"),
        ("makes_likelier", "hook_unproven", "changed rollout_log_probs of sample toy/0/0/0"),
        ("adds_loss", "hook_unproven", "put loss on tokens of sample toy/0/1/0 that had none"),
        ("divides_by_two", "hook_unproven", "gave .* as rollout_mask_sums of sample toy/0/0/0, .* leave the key out"),
        ("names_another_source", "hook_unproven", "changed source_names of sample toy/0/0/0"),
        ("halves", "hook_unproven", "no 0 or 1 for each"),
        ("leaves_some_out", "hook_raised", "gave 1 entries for rewards of 11 samples"),
        ("knows_nothing", "hook_raised", "gave rewards of which one is not finite"),
        ("says_a_word", "hook_raised", "gave 'done', not a map"),
        ("exits", "hook_raised", "raised SystemExit: 3"),
    ],
)
def test_T6_T8_what_it_may_not_say_is_refused_by_name(samples: list[Sample], name: str, reason: str, says: str) -> None:
    with pytest.raises(HookError, match=says) as raised:
        shares(samples, name)
    assert raised.value.outcome == reason
    assert f"hooks.convert {HERE}:{name}" in str(raised.value)


def test_a_key_of_penstocks_own_cannot_be_replaced(samples: list[Sample]) -> None:
    with pytest.raises(ConfigError, match="partition"):
        shares(samples, "takes_a_key")


@pytest.mark.parametrize("key", ["rewards", "samples"])
def test_a_hook_that_nobody_would_call_is_refused(key: str) -> None:
    values = config("by_length").model_dump(exclude_unset=True)
    values |= {"hooks": {key: f"{HERE}:by_length"}}
    with pytest.raises(ConfigError, match=rf"hooks\.{key} .* is called by the reference trainer alone"):
        check_hooks_of(Config.model_validate(values))


def test_the_reference_trainer_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"hooks\.convert .* the reference trainer takes none"):
        check_hooks(config("by_length"))
