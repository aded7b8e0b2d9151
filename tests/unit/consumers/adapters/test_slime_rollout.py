"""What slime's hooks do without slime: weights kept for the next rollout, samples filled, functions of the user's
called, and what is refused. Slime's modules are stand-ins with the few names that are asked for.
"""

import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.config import Config
from penstock.consumers.adapters import slime_rollout
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.rows import RowArrays
from penstock.consumers.adapters.slime_flags import check_eval_dataset, check_flags, eval_sampling
from penstock.errors import ConfigError


def write(folder: Path, version: int, content: bytes) -> None:
    written = folder / f"weight_v{version:06d}"
    written.mkdir(parents=True, exist_ok=True)
    (written / "model.safetensors").write_bytes(content)
    slime_rollout.weights_written(Namespace(), str(written), [])
    (written / "model.safetensors").unlink()


def test_weights_outlive_the_folder_that_slime_deletes(tmp_path: Path) -> None:
    write(tmp_path, 1, b"one")
    [kept] = slime_rollout._linked(tmp_path)
    assert (kept / "model.safetensors").read_bytes() == b"one"


def test_weights_of_a_restart_go_before_those_that_its_predecessor_left(tmp_path: Path) -> None:
    write(tmp_path, 7, b"of the killed one")
    left = tmp_path / "penstock_weight_v000007"
    os.utime(left, (1, 1))
    write(tmp_path, 1, b"restored")
    assert (slime_rollout._linked(tmp_path)[-1] / "model.safetensors").read_bytes() == b"restored"


def test_what_a_killed_process_was_writing_is_removed_with_the_next_weights(tmp_path: Path) -> None:
    (tmp_path / ".penstock_weight_v000006").mkdir()
    (tmp_path / ".penstock_weight_v000006" / "model.safetensors").touch()
    write(tmp_path, 7, b"seven")
    assert not list(tmp_path.glob(".penstock_*"))
    [kept] = slime_rollout._linked(tmp_path)
    assert (kept / "model.safetensors").read_bytes() == b"seven"


def test_a_configuration_without_a_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="penstock_run"):
        slime_rollout.generate_rollout(Namespace(), 0, None)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"rm_type": "maths"}, r"--rm-type 'maths' is no reward of penstock's"),
        (
            {"custom_rm_path": "a.b"},
            r"--custom-rm-path names a:b, .* set reward\.function, or add it to worker\.rewards",
        ),
        ({"custom_rm_path": "a.b", "group_rm": True}, r"--group-rm with --custom-rm-path names a:b, .* reward\.group"),
        ({"custom_rm_path": "m.scores", "reward_key": "acc"}, r"--reward-key acc is not .* read, score"),
        ({"custom_generate_function_path": "a.b"}, r"--custom-generate-function-path names a:b, .* hooks\.generate"),
        ({"rollout_sample_hook_path": ["a.b"]}, r"--rollout-sample-hook-path names a:b, .* hooks\.sample"),
        ({"rm_url": "http://rm"}, r"--rm-url http://rm is not .* set reward\.remote\.url"),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay has no effect .*: leave it out"),
        ({"multimodal_keys": {"image": "images"}}, "--multimodal-keys has no effect .* RolloutManager"),
        ({"sglang_enable_deterministic_inference": True}, "--sglang-enable-deterministic-inference has no effect"),
        ({"update_weight_mode": "delta"}, "--update-weight-mode full"),
        ({"rollout_top_p": 0.9}, r"--rollout-top-p 0\.9 draws from another distribution"),
    ],
)
def test_what_has_no_effect_is_refused_by_its_flag(naming: Config, said: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_flags(Namespace(**{"reward_key": None} | said), naming)


@pytest.mark.parametrize(
    "said",
    [
        {"custom_generate_function_path": "m.generates", "custom_rm_path": "m.scores", "reward_key": "score"},
        {"custom_generate_function_path": "m.generates", "rm_type": "deepscaler"},
        {"custom_rm_path": "m.other", "rollout_sample_hook_path": ["m.masks"]},
        {"custom_rm_path": "m.ranks", "group_rm": True},
        {"rm_type": "boxed_math", "group_rm": True},
        {"rm_type": "remote_rm", "rm_url": "http://service/score"},
    ],
)
def test_flags_that_name_what_the_run_names_are_accepted(naming: Config, said: dict[str, Any]) -> None:
    check_flags(Namespace(**{"reward_key": None} | said), naming)


def test_differences_in_place_of_weights_are_refused_where_slime_writes_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--update-weight-mode full"):
        slime_rollout.weights_written(Namespace(update_weight_mode="delta"), str(tmp_path), [])


class Status(str):
    TRUNCATED = "truncated"


class Sample(SimpleNamespace):
    """The attributes of slime's that are looked at."""

    Status = Status


def sample(index: int, label: Any = "x", **changes: Any) -> Sample:
    values = {"prompt": "a", "response_length": 0, "remove_sample": False}
    values |= dict.fromkeys(["multimodal_inputs", "metadata", "rollout_id", "teacher_log_probs"])
    return Sample(index=index, label=label, **values | changes)


class Lane:
    """The run's workers: two tokens for whatever is asked; the reward is the prompt's number in the call."""

    version = 1

    def __init__(self, config: Config, *, teacher: bool = False) -> None:
        self.config, self.teacher, self.asked = config, teacher, list[Request]()
        self.recorded = dict[str, list[int]]()
        #: Rewards of the parts of each answer to the first prompt of a call.
        self.parts = list[float]()

    def answer(self, requests: Sequence[Request], *, takes_parts: bool) -> list[list[RowArrays]]:
        assert takes_parts
        self.asked += requests
        return [[row for k in range(one.n) for row in self._rows(float(at), k)] for at, one in enumerate(requests)]

    def _rows(self, reward: float, k: int) -> list[RowArrays]:
        if reward or not self.parts:
            return [self._row(reward, k)]
        return [self._row(1.5, k, own) for own in self.parts]

    def record_evaluation(self, dataset: str, groups: Sequence[Sequence[RowArrays]]) -> None:
        self.recorded[dataset] = [len(group) for group in groups]

    def _row(self, reward: float, k: int, own: float | None = None) -> RowArrays:
        made: Any = SimpleNamespace(k=k, prompt_length=2, oldest=1, newest=1, reward=reward, status="completed")
        drawn = np.array([0, 0, 1, 1], np.bool_)
        taught = np.array([0, 0, -1, -2], np.float32) if self.teacher else None
        arrays = {"loss_mask": drawn, "generated": drawn, "logprobs": np.zeros(4, np.float32)}
        return RowArrays(
            made, 0, np.arange(4), versions=np.ones(4, np.int32), lost=False, teacher_logprobs=taught, part_reward=own,
            **arrays,
        )  # fmt: skip


ARGS = {
    "reward_key": None, "eval_reward_key": None, "dynamic_sampling_filter_path": None, "rollout_batch_size": 2,
    "update_weight_disk_dir": None, "debug_rollout_only": True, "rollout_temperature": 1.0, "rollout_top_p": 1.0,
    "rollout_top_k": -1, "rollout_max_response_len": 8, "rollout_stop": ["#"], "rollout_stop_token_ids": [3],
    "eval_datasets": [], "eval_max_prompt_len": None, "apply_chat_template": False, "apply_chat_template_kwargs": None,
}  # fmt: skip


@pytest.fixture
def called() -> list[Any]:
    """What the user's functions were given."""
    return []


@pytest.fixture(autouse=True)
def _slime(monkeypatch: pytest.MonkeyPatch, called: list[Any]) -> None:
    """Slime's modules, by name; ``user.*`` are the user's functions."""

    def passes(args: Any, group: list[Any]) -> Any:
        return SimpleNamespace(keep=group[0].index > 0, reason=args.reason, keep_when_insufficient=args.insufficient)

    def takes_loss_off(args: Any, groups: list[list[Any]]) -> None:
        called.append(("filter", [group[0].index for group in groups]))
        groups[0][0].remove_sample = True

    def sees_all(args: Any, groups: list[list[Any]], source: Any) -> None:
        called.append(("all", [group[0].index for group in groups], source))

    def dataset(path: str, **_: Any) -> Any:
        return SimpleNamespace(samples=[sample(0, label=7), sample(0, label=None)])

    def load(path: str) -> Any:
        return {"user.passes": passes, "user.takes_loss_off": takes_loss_off, "user.sees_all": sees_all}[path]

    names: dict[str, dict[str, Any]] = {
        "slime": {}, "slime.rollout": {}, "slime.utils": {},
        "slime.rollout.base_types": {"RolloutFnTrainOutput": SimpleNamespace, "RolloutFnEvalOutput": SimpleNamespace},
        "slime.utils.misc": {"load_function": load},
        "slime.utils.types": {"Sample": Sample},
        "slime.utils.data": {"Dataset": dataset},
    }  # fmt: skip
    for name, values in names.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    importlib.invalidate_caches()


@pytest.fixture
def config() -> Config:
    values = {"run": "r", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]}}
    return Config.model_validate(values)


@pytest.fixture
def naming(config: Config) -> Config:
    """A run that names functions of the user's."""
    reward = {"function": "m:scores", "group": "m:ranks", "remote": {"url": "http://service/score"}}
    more = {
        "hooks": {"generate": "m:generates", "sample": ["m:masks"], "eval": "m:evaluates"},
        "reward": reward, "worker": {"rewards": ["m:other"]},
        "data": {"train": [{"name": "d", "path": "d.jsonl"}], "eval": [{"name": "e", "path": "e.jsonl"}]},
    }  # fmt: skip
    return Config.model_validate(config.model_dump() | more)


def rollouts(config: Config, *, teacher: bool = False, **args: Any) -> Any:
    made: Any = slime_rollout.SlimeRollouts.__new__(slime_rollout.SlimeRollouts)
    made._args = Namespace(**ARGS | args)
    made._tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [1, 2],
        decode=lambda ids, skip_special_tokens: "skipped" if skip_special_tokens else "whole",
    )
    made._train, made._eval = Lane(config, teacher=teacher), Lane(config)
    return made


def source(*samples: Sample) -> Any:
    left = list(samples)
    return SimpleNamespace(get_samples=lambda n: [[left.pop(0)] for _ in range(n)])


def test_functions_of_the_user_are_called_as_slime_calls_them(config: Config, called: list[Any]) -> None:
    made = rollouts(
        config, dynamic_sampling_filter_path="user.passes", rollout_sample_filter_path="user.takes_loss_off",
        rollout_all_samples_process_path="user.sees_all", reason="easy", insufficient=False,
    )  # fmt: skip
    given = source(sample(2), sample(0), sample(1))
    output = made.generate(0, given)
    assert [group[0].index for group in output.samples] == [1, 2]
    assert called == [("filter", [1, 2]), ("all", [0, 1, 2], given)]
    assert [group[0].remove_sample for group in output.samples] == [True, False]
    assert output.metrics == {"rollout/dynamic_filter/drop_easy": 1}


@pytest.mark.parametrize(("insufficient", "kept"), [(False, [1, 2]), (True, [0, 2])])
def test_a_filter_may_rather_keep_than_have_too_few(config: Config, insufficient: bool, kept: list[int]) -> None:
    made = rollouts(config, dynamic_sampling_filter_path="user.passes", reason=None, insufficient=insufficient)
    output = made.generate(0, source(sample(2), sample(0), sample(1)))
    assert [group[0].index for group in output.samples] == kept
    assert output.metrics == {}


def test_a_teacher_reaches_slime(config: Config) -> None:
    [[taught], _] = rollouts(config, teacher=True).generate(0, source(sample(0), sample(1))).samples
    assert taught.teacher_log_probs == [-1, -2]
    [[plain], _] = rollouts(config).generate(0, source(sample(0), sample(1))).samples
    assert plain.teacher_log_probs is None


@pytest.mark.parametrize(
    ("label", "text", "value"),
    [
        ("x", "x", None),
        (None, "", None),
        (0, "0", 0),
        (False, "false", False),
        ({"a": [1]}, '{"a": [1]}', {"a": [1]}),
        (np.array(["assert f() == 1"], object), '["assert f() == 1"]', ["assert f() == 1"]),
    ],
)
def test_labels_reach_rewards_as_the_data_has_them(config: Config, label: Any, text: str, value: Any) -> None:
    made = rollouts(config, rollout_batch_size=1)
    made.generate(0, source(sample(0, label)))
    [asked] = made._train.asked
    assert (asked.label, asked.label_value) == (text, value)
    assert type(asked.label_value) is type(value)


def test_a_label_that_no_record_carries_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match="the label holds a bytes"):
        rollouts(config, rollout_batch_size=1).generate(0, source(sample(0, b"x")))


def test_a_sample_that_has_an_answer_already_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match="Sample 0 of slime's data source has an answer already"):
        rollouts(config, rollout_batch_size=1).generate(0, source(sample(0, response_length=3)))


def test_special_tokens_of_the_text_are_as_the_flag_says(config: Config) -> None:
    for skipped, text in ((False, "whole"), (True, "skipped")):
        made = rollouts(config, rollout_batch_size=1, rollout_skip_special_tokens=skipped)
        [[found]] = made.generate(0, source(sample(0))).samples
        assert found.response == text


def dataset_of(**changes: Any) -> Any:
    """One of slime's ``eval_datasets``."""
    values: dict[str, Any] = dict.fromkeys([
        "input_key", "label_key", "metadata_key", "tool_key", "top_p", "top_k", "max_response_len", "stop",
        "stop_token_ids", "apply_chat_template", "apply_chat_template_kwargs", "min_new_tokens", "repetition_penalty",
        "skip_special_tokens", "no_stop_trim", "rm_type",
    ])  # fmt: skip
    values |= {"name": "held", "path": "held.jsonl", "temperature": 0.6, "n_samples_per_eval_prompt": 1}
    inject = {"inject_metadata": lambda metadata: (metadata or {}) | {"held": True}}
    return SimpleNamespace(**values | inject | changes)


def test_an_evaluation_is_drawn_and_rewarded_as_its_data_set_says(config: Config) -> None:
    datasets = [dataset_of(min_new_tokens=2, repetition_penalty=1.1, stop=["!"])]
    made = rollouts(config, eval_datasets=datasets, reward_key="math", eval_reward_key="acc")
    held = made.evaluate().data["held"]
    assert held["rewards"] == [0.0, 1.0]
    assert held["samples"][1].reward == {"math": 1.0, "acc": 1.0}
    assert made._eval.recorded == {"held": [1, 1]}
    assert [(one.label, one.metadata) for one in made._eval.asked] == [("7", {"held": True}), ("", {"held": True})]
    assert made._eval.asked[0].sampling == {
        "temperature": 0.6, "min_new_tokens": 2, "repetition_penalty": 1.1, "stop": ["!"], "stop_token_ids": [3],
    }  # fmt: skip


def test_flags_stand_where_a_data_set_for_evaluation_says_nothing() -> None:
    args = Namespace(rollout_stop=["#"], rollout_stop_token_ids=None, eval_min_new_tokens=1)
    assert eval_sampling(args, dataset_of()) == {"temperature": 0.6, "stop": ["#"], "min_new_tokens": 1}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"custom_rm_path": "a.b"}, r"custom_rm_path of slime's data set 'held' names a:b, .* worker\.rewards"),
        ({"custom_generate_function_path": "m.generates"}, r"custom_generate_function_path of .* set hooks\.eval to"),
        ({"multimodal_keys": {"image": "i"}}, "multimodal_keys of slime's data set 'held'"),
        ({"rm_type": "maths"}, "rm_type of slime's data set 'held' 'maths' is no reward"),
    ],
)
def test_what_a_data_set_for_evaluation_would_not_get_is_refused(
    naming: Config, said: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check_eval_dataset(Namespace(reward_key=None), dataset_of(**said), naming)


def test_a_data_set_for_evaluation_may_have_functions_of_its_own(naming: Config) -> None:
    said = {"custom_rm_path": "m.other", "custom_generate_function_path": "m.evaluates", "rm_type": "math"}
    check_eval_dataset(Namespace(reward_key=None), dataset_of(**said), naming)


@pytest.mark.parametrize(
    ("flags", "metadata", "run", "reward"),
    [
        ({}, {}, "math", None),
        ({}, {"rm_type": "f1"}, "math", "f1"),
        ({}, {"rm_type": "f1"}, "m:scores", None),
        ({"rm_type": "dapo"}, {}, "m:scores", "dapo"),
        ({"rm_type": "dapo"}, {"rm_type": "f1"}, "m:scores", "f1"),
        ({"rm_type": "dapo", "custom_rm_path": "m.scores"}, {"rm_type": "f1"}, "math", "m:scores"),
        ({"group_rm": True, "custom_rm_path": "m.ranks"}, {"rm_type": "f1"}, "math", None),
        ({"group_rm": True, "rm_type": "dapo"}, {}, "math", "dapo"),
    ],
)
def test_a_request_names_the_reward_that_slime_would_compute(
    config: Config, flags: dict[str, Any], metadata: dict[str, Any], run: str, reward: str | None
) -> None:
    named = config.reward.model_copy(update={"function": run})
    made = rollouts(config.model_copy(update={"reward": named}), rollout_batch_size=1, **flags)
    made.generate(0, source(sample(0, metadata=metadata)))
    assert [one.reward for one in made._train.asked] == [reward]


@pytest.mark.parametrize(("by_group", "rewards"), [(False, [1.0, 2.0]), (True, [1.5, 1.5])])
def test_parts_of_an_answer_are_samples_of_one_rollout(config: Config, by_group: bool, rewards: list[float]) -> None:
    group = config.reward.model_copy(update={"group": "ranks" if by_group else None})
    made = rollouts(config.model_copy(update={"reward": group}))
    made._train.parts = [1.0, 2.0]
    output = made.generate(0, source(sample(0), sample(1)))
    [[parts], [[single]]] = output.samples
    assert [one.reward for one in parts] == rewards
    assert [one.rollout_id for one in parts] == [0, 0]
    assert (single.reward, single.rollout_id) == (1.0, 1), "as deep in lists as the others"
