"""Functions that section ``hooks`` names: a path or a signature that is wrong is a sentence before anything starts."""

import pytest

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.hooks.signatures import FORMS, check_hook, load_hook
from penstock.hooks.slime import args_of
from penstock.hooks.user_imports import check_user_code, named
from tests.unit.penstock.hooks import examples

HERE = "tests.unit.penstock.hooks.examples"


def config(**hooks: object) -> Config:
    return Config.model_validate(
        {"run": "r", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]}, "hooks": hooks}
    )


def test_a_hook_is_known_by_its_signature() -> None:
    assert not load_hook("sample", f"{HERE}:plain").form.is_slime
    assert load_hook("sample", f"{HERE}:of_slime").form.is_slime
    assert load_hook("sample", f"{HERE}:of_slime_with_all").form.is_slime


def test_it_is_given_what_it_takes_by_name() -> None:
    assert load_hook("sample", f"{HERE}:of_slime").named(rollout_id=None, evaluation=True) == {"evaluation": True}
    every = load_hook("sample", f"{HERE}:of_slime_with_all").named(rollout_id=None, evaluation=True)
    assert every == {"rollout_id": None, "evaluation": True}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere_at_all:f", "there is no module nowhere_at_all"),
        (f"{HERE}:missing", "correct the name after the colon"),
        (f"{HERE}:NUMBER", "is not a function"),
        (
            f"{HERE}:of_three",
            r"has the signature \(a: Any, .* but is called as of_three\(sample\) or of_three\(args, sample\)",
        ),
    ],
)
def test_what_cannot_be_a_hook_is_refused_with_its_key(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"hooks\.sample {path}.*{says}"):
        load_hook("sample", path)
    with pytest.raises(ConfigError, match=rf"hooks\.sample {path}.*{says}"):
        check_user_code(config(sample=[path]))


#: Function of examples.py -> keys that may name it.
CALLED = {
    "of_verl": (),
    "of_two": (),
    "with_judges": ("reward.function", "worker.rewards", "reward.group", "data.train.d.reward"),
    "of_trl": ("reward.function", "worker.rewards", "reward.group", "data.train.d.reward", "trainer.filter.functions"),
    "of_slime": ("reward.function", "worker.rewards", "reward.group", "data.train.d.reward"),
    "Scorer": (),
    "SCORER": ("reward.function", "worker.rewards", "reward.group", "data.train.d.reward", "trainer.filter.functions"),
    "Answers": ("worker.environments", "data.train.d.environment"),
    "Sends": ("trainer.transport",),
}


@pytest.mark.parametrize("name", CALLED)
def test_rewards_filters_environments_and_transports_are_looked_at_before_a_start(name: str) -> None:
    found = getattr(examples, name)
    for key in sorted({key for keys in CALLED.values() for key in keys}):
        if key in CALLED[name]:
            check_hook(key, f"m:{name}", found)
            continue
        with pytest.raises(ConfigError, match=rf"{key} m:{name} .*: (change its parameters|it needs|derive)"):
            check_hook(key, f"m:{name}", found)


def test_a_reward_of_another_trainer_is_told_how_it_is_called() -> None:
    with pytest.raises(ConfigError) as told:
        check_hook("reward.function", "m:of_verl", examples.of_verl)
    assert "of_verl(sample) or of_verl(args, sample): change its parameters." in str(told.value)


def test_a_name_that_is_no_import_path_is_refused_where_it_is_read() -> None:
    with pytest.raises(ValueError, match="unknown hook 'mask'"):
        config(sample=["mask"])


def test_every_hook_of_the_section_is_imported_before_a_start() -> None:
    assert named(config(sample=[f"{HERE}:plain"])).count(("hooks.sample", f"{HERE}:plain")) == 1
    values = ("timeout_s", "args")
    assert {key for key in type(config().hooks).model_fields if not key.endswith(values)} == FORMS.keys()


def test_args_follow_from_the_run_and_yield_to_those_that_are_given() -> None:
    args = args_of(config(args={"my_limit": 3, "group_rm": True}))
    assert (args.hf_checkpoint, args.rollout_temperature, args.my_limit, args.group_rm) == ("m", 1.0, 3, True)
    assert examples.NUMBER == 3
