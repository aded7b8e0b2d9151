"""Configuration: three sources, one sentence per mistake, no secret shown."""

import json
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from penstock.config import Config, EngineConfig, StalenessConfig, TrainerConfig
from penstock.config.engine import default_python
from penstock.config.load import (
    check_files,
    load_config,
    save_resolved,
    secret_environment,
    without_settings,
)
from penstock.errors import ConfigError
from penstock.text import redact

BASE = """
run: demo
model: {path: policy}
data: {train: [{name: sums, path: train.jsonl}]}
"""


def write(folder: Path, text: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(BASE + text)
    return path


def refused(path: Path, *overrides: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides), env or {})
    return str(caught.value)


def test_arguments_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, "worker: {slots: 1, count: 1, max_attempts: 7}\n")
    env = {"PENSTOCK_WORKER__SLOTS": "2", "PENSTOCK_WORKER__COUNT": "2"}

    config = load_config(path, ["--worker.slots=3"], env)

    assert (config.worker.slots, config.worker.count, config.worker.max_attempts) == (3, 2, 7)


def test_values_take_the_type_of_their_key(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path),
        [
            "run=007",
            "trainer.lr=1e-3",
            "trainer.max_tokens=null",
            "rollout.sampling.temperature=0.5",
            "rollout.sampling.stop=[a, b]",
            "engine.env.THREADS=1",
            "data.train.0.n=3",
        ],
        {},
    )

    assert config.run == "007"
    assert config.trainer.lr == 1e-3
    assert config.trainer.max_tokens is None
    assert config.rollout.sampling["temperature"] == 0.5
    assert config.rollout.sampling["stop"] == ["a", "b"]
    assert config.engine.env == {"THREADS": "1"}
    assert config.data.train[0].n == 3


def test_paths_of_the_file_are_relative_to_it_and_the_rest_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)

    config = load_config(write(there, "prepare: [make.py, --out, x]\n"), [], {})
    other = load_config(write(there), ["model.path=mine"], {})
    by_delta = ["trainer.transport=delta", "worker.copies_dir=copies"]
    stores = load_config(write(there), [*by_delta, "trainer.delta_store=deltas"], {})

    assert (stores.delta_store, stores.worker.copies_dir) == (str(here / "deltas"), str(here / "copies"))
    assert load_config(write(there), [*by_delta, "trainer.delta_store=s3://b/x"], {}).delta_store == "s3://b/x"
    assert config.model.path == str(there / "policy")
    assert config.data.train[0].path == str(there / "train.jsonl")
    assert config.prepare == [str(there / "make.py"), "--out", "x"]
    assert config.run_dir == here / "runs" / "demo"
    assert config.engine.python == default_python()
    assert other.model.path == str(here / "mine")
    assert load_config(write(there), ["engine.python=sh"], {}).engine.python == shutil.which("sh")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("worker.slot=3", "worker.slot (the argument --worker.slot): there is no such key; did you mean worker.slots?"),
        ("lr=1", "did you mean trainer.lr?"),
        ("data.train.0.paht=x", "did you mean data.train.0.path?"),
        ("worker.slots=-3", "worker.slots (the argument --worker.slots): it should be greater than 0, not -3."),
        ("worker.slots=many", "it should be an integer"),
        ("worker.apply=foo", "it should be 'in_place', 'abort' or 'drain', not \"foo\"."),
        ("worker=3", "worker (the argument --worker): it should be a"),
        ("data.train.4.n=1", "'4' is not an index of a list of 1"),
        ("run=a b", "is not a name"),
        ("--verbose", "write it as --a.b=c"),
        ("redis.url=http://x", "is not the address of a Redis"),
        ("redis.url=redis://:***@x", "masked password"),
        ("worker.heartbeat_s=10", "lower heartbeat_s or raise lease_s"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(tmp_path: Path, override: str, said: str) -> None:
    text = refused(write(tmp_path), override)

    assert said in text
    assert "\n" not in text


def test_a_misspelt_variable_is_refused_and_those_of_tests_are_not(tmp_path: Path) -> None:
    text = refused(write(tmp_path), env={"PENSTOCK_TRIANER__LR": "1"})
    load_config(write(tmp_path), [], {"PENSTOCK_TEST_REDIS": "1"})

    assert "trianer (the variable PENSTOCK_TRIANER__LR)" in text
    assert "did you mean trainer?" in text


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    assert len(refused(write(tmp_path), "worker.slots=0", "trainer.steps=0").splitlines()) == 2


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text("run: a\nrun: b\n")
    bad = tmp_path / "bad.yaml"
    bad.write_text("run: [\n")

    assert "There is no configuration" in refused(tmp_path / "absent.yaml")
    assert "line 2" in refused(twice)
    assert "the key run is given twice" in refused(twice)
    assert "bad.yaml" in refused(bad)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: demo\nmodel: {path: m}\n")

    assert refused(path) == f"data is missing in {path}; set it."


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward.function=mine.biggest", "unknown reward 'mine.biggest': did you mean mine:biggest?"),
        ("data.train.0.environment=my.games.Chess", "did you mean my.games:Chess?"),
        ("actor_rollout_ref.rollout.n=8", "verl's model is model here"),
        ("algorithm.adv_estimator=grpo", "there is no such key; remove it: see trainer.advantage"),
    ],
)
def test_names_of_other_tools_are_answered_with_ours(tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(write(tmp_path), override)


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"The configuration {tmp_path} is a folder; name the YAML file in it."


def test_T5_modes_fix_the_bound_and_one_step_drains(tmp_path: Path) -> None:
    path = write(tmp_path)

    sync = load_config(path, ["staleness.mode=sync"], {})
    one_step = load_config(path, ["staleness.mode=one_step"], {})

    assert sync.staleness.bound == 0
    assert (one_step.staleness.bound, one_step.worker.apply) == (1, "drain")
    assert StalenessConfig(mode="sync").bound == 0
    assert "remove worker.apply" in refused(path, "staleness.mode=one_step", "worker.apply=abort")
    assert "remove bound" in refused(path, "staleness.mode=sync", "staleness.bound=2")
    assert "remove port or url" in refused(path, "redis.url=redis://x", "redis.port=1")


def test_the_resolved_file_and_the_secrets_give_the_same_configuration(tmp_path: Path) -> None:
    overrides = [
        "redis.url=redis://me:p@ss@h:1/0",
        "redis.payload_servers={B: 'redis://:deep@h:2/0'}",
        "engine.env.HF_TOKEN=hush",
        "reward.function=remote_rm",
        "reward.remote.url=http://me:closed@scores/?token=locked",
        "staleness.mode=one_step",
    ]
    config = load_config(write(tmp_path), overrides, {})
    saved = tmp_path / "resolved.yaml"

    save_resolved(config, saved)

    text = saved.read_text()
    assert not any(secret in text for secret in ("p@ss", "deep", "hush", "closed", "locked"))
    assert yaml.safe_load(text)["redis"]["url"] == "redis://me:***@h:1/0"
    assert load_config(saved, [], secret_environment(config)) == config
    assert "masked password" in refused(saved)


def test_secrets_that_are_handed_to_ones_own_code_are_masked_and_given_to_children(tmp_path: Path) -> None:
    key, token = "sk-0123456789abcdef", "b1946ac92492d2347c62"
    overrides = [
        f"data.train=[{{name: a, path: 'python:mine:Rows', source_args: {{api_key: {key}, at: {{password: deep}}}}}}]",
        f"hooks.args={{stores: [{{token: {token}, url: 'https://me:barred@h'}}], input_key: text, eos_token: </s>}}",
    ]
    config = load_config(write(tmp_path), overrides, {})
    saved = tmp_path / "resolved.yaml"

    save_resolved(config, saved)

    text = saved.read_text()
    assert not any(secret in text for secret in (key, token, "deep", "barred"))
    kept = yaml.safe_load(text)["hooks"]["args"]
    assert (kept["input_key"], kept["eos_token"]) == ("text", "</s>"), "names of columns and marks are no secrets"
    assert load_config(saved, [], secret_environment(config)) == config
    assert redact(f"{key} {token} deep barred, a text") == "*** *** *** ***, a text"


def test_all_values_of_env_sections_are_masked_and_given_to_children(tmp_path: Path) -> None:
    engine = {
        "SLACK_WEBHOOK": "https://hooks.slack.com/services/T0/B0/hushhush",
        "BEARER": "letters-without-any-digit",
        "NETRC": "machine h login me password deep",
        "COOKIE": "sid=barred0",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    }
    fleet = "[{name: m, server_groups: [{num_engines: 1, env: {PLAIN: of-a-group}}]}]"
    config = load_config(write(tmp_path), [f"engine.env={json.dumps(engine)}", f"fleet.models={fleet}"], {})
    saved = tmp_path / "resolved.yaml"

    save_resolved(config, saved)

    text = saved.read_text()
    values = yaml.safe_load(text)
    assert values["engine"]["env"] == dict.fromkeys(engine, "***")
    assert values["fleet"]["models"][0]["server_groups"][0]["env"] == {"PLAIN": "***"}
    assert load_config(saved, [], secret_environment(config)) == config
    # The kind of logprobs follows a variable whose value the saved file does not show.
    assert load_config(saved, [], {}).engine.logprob_kind == "original"
    assert redact("Cookie: sid=barred0, letters-without-any-digit, of-a-group") == "Cookie: ***, ***, ***"


def test_a_variable_that_holds_a_common_value_masks_no_other_text(tmp_path: Path) -> None:
    values = ["true", "localhost", "10.0.0.1", "127.0.0.1,localhost", "/usr/local/cuda/lib64", "flashinfer", "12345678"]
    load_config(write(tmp_path), [f"engine.env={json.dumps({f'A{i}': one for i, one in enumerate(values)})}"], {})

    for value in values:
        assert redact(f"at {value}.") == f"at {value}."


def test_a_mistake_in_an_env_section_does_not_show_its_values(tmp_path: Path) -> None:
    for setting in (
        "engine.env={A: [hush]}",
        "engine.env=[A=hush]",
        "engine.env=hush",
        "engine.env={SGLANG_RETURN_ORIGINAL_LOGPROB: hush}",
        "fleet.models=[{name: m, server_groups: [{num_engines: 1, env: {A: [hush]}}]}]",
        "fleet.models=[{name: m, server_groups: [{num_engines: 1, env: hush}]}]",
    ):
        assert "hush" not in refused(write(tmp_path), setting)


def test_a_mistake_in_a_secret_does_not_show_it(tmp_path: Path) -> None:
    assert "hush" not in refused(write(tmp_path), "redis.url=http://:hush@x")
    assert "hush" not in refused(write(tmp_path), "redis.url=[redis://:hush@x]")
    assert "hush" not in refused(write(tmp_path), "redis://:hush@x")
    assert redact("a redis://u:hu@sh@h:1/0 b") == "a redis://u:***@h:1/0 b"


def test_children_do_not_take_settings_from_the_environment_again() -> None:
    env = {"PENSTOCK_WORKER__SLOTS": "2", "PENSTOCK_TEST_X": "1", "PATH": "p"}

    assert without_settings(env) == {"PENSTOCK_TEST_X": "1", "PATH": "p"}


def test_absent_data_and_model_are_named(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["data.train.0.path=train.jsonl@[0:5]"], {})

    with pytest.raises(ConfigError, match=r"data\.train\.0\.path: there is no file .*train\.jsonl; correct the path"):
        check_files(config)
    with pytest.raises(ConfigError, match=r"model\.path: .*policy is not a folder with a config\.json"):
        check_files(config, data=False)


def test_a_configuration_is_frozen(tmp_path: Path) -> None:
    config: Config = load_config(write(tmp_path), [], {})

    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    assert EngineConfig().python == ""


def test_the_resolved_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    saved = tmp_path / "resolved.yaml"

    save_resolved(load_config(write(tmp_path), [], {}), saved)

    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


def test_the_kind_of_logprobs_is_said_once(tmp_path: Path) -> None:
    env = "engine: {env: {SGLANG_RETURN_ORIGINAL_LOGPROB: '%s'}%s}\n"
    assert "remove the variable" in refused(write(tmp_path, env % ("1", ", logprob_kind: scaled")))
    assert "neither 1 nor 0" in refused(write(tmp_path, env % ("yes", "")))
    assert load_config(write(tmp_path, env % ("1", "")), [], {}).engine.logprob_kind == "original"


@pytest.mark.parametrize(
    ("nvidia", "visible", "overrides", "preset"),
    [
        (False, None, [], "cpu"),
        (True, None, [], "cuda"),
        (True, "", [], "cpu"),
        (False, None, ["trainer.device=cuda:0"], "cuda"),
        (True, None, ["engine.preset=cpu"], "cpu"),
        (True, None, ["engine.url=http://10.0.0.1:30000"], None),
        (False, None, ["engine.args.device=npu"], None),
    ],
)
def test_the_preset_of_the_engine_is_that_of_the_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvidia: bool,
    visible: str | None,
    overrides: list[str],
    preset: str | None,
) -> None:
    (tmp_path / "nvidia0").touch() if nvidia else None
    monkeypatch.setattr("penstock.config.engine._DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    config = load_config(write(tmp_path), overrides, {})

    assert config.engine.preset == preset
    # A machine that resumes the run may be another one.
    save_resolved(config, tmp_path / "saved.yaml")
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text())["engine"]
    assert ("preset" in saved) is ("engine.preset=cpu" in overrides)


def test_arguments_and_variables_override_those_of_the_preset(tmp_path: Path) -> None:
    given = "engine: {preset: cpu, args: {mem_fraction_static: 0.5}, env: {OMP_NUM_THREADS: '4'}}\n"
    engine = load_config(write(tmp_path, given), [], {}).engine

    assert engine.server_args["mem-fraction-static"] == 0.5
    assert engine.server_args["device"] == "cpu"
    assert engine.server_env == {"OMP_NUM_THREADS": "4"}


def test_an_external_engine_takes_nothing_that_is_for_a_spawned_one(tmp_path: Path) -> None:
    url = "engine: {url: 'http://10.0.0.1:30000'"
    said = refused(write(tmp_path, url + ", args: {tp-size: 2}, env: {A: b}}\n"))
    assert "args and env are for a server that penstock starts" in said
    assert "write http://HOST:PORT" in refused(write(tmp_path, "engine: {url: '10.0.0.1:30000'}\n"))
    config = load_config(write(tmp_path, url + ", logprob_kind: original}\n"), [], {})
    save_resolved(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml", [], {}) == config


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (0.2, 0.2, 3.0, "token")),
        ({"loss": "ppo"}, (0.2, 0.2, 3.0, "token")),
        ({"loss": "gspo"}, (3e-4, 4e-4, 3.0, "sample")),
        ({"loss": "cispo"}, (1.0, 4.0, None, "token")),
        ({"loss": "reinforce", "correction": "truncated"}, (None, None, None, "token")),
        ({"loss": "gspo", "clip_high": 0.01, "aggregation": "token"}, (3e-4, 0.01, 3.0, "token")),
        ({"loss": "gspo", "dual_clip": None}, (3e-4, 4e-4, None, "sample")),
    ],
)
def test_a_loss_brings_the_clips_and_the_aggregation_of_its_paper(
    given: dict[str, Any], wanted: tuple[float, float, float | None, str]
) -> None:
    trainer = TrainerConfig(**given)
    assert (trainer.clip_low, trainer.clip_high, trainer.dual_clip, trainer.aggregation) == wanted
    # A resolved configuration is read again as it was written.
    assert TrainerConfig(**trainer.model_dump()) == trainer


def test_clips_that_would_do_nothing_are_refused_and_those_that_must_be_there_too() -> None:
    for name in ("clip_low", "clip_high"):
        with pytest.raises(ValidationError, match=f"{name} clips a ratio that loss reinforce does not use"):
            TrainerConfig(loss="reinforce", correction="truncated", **{name: 0.2})
        with pytest.raises(ValidationError, match=f"{name} is null, but loss ppo has this clip"):
            TrainerConfig(**{name: None})


def test_T9_the_clips_of_gspo_are_of_a_ratio_to_pi_old() -> None:
    assert TrainerConfig(loss="gspo").correction == "decoupled"
    assert TrainerConfig(loss="gspo", correction="bypass").correction == "bypass"
    assert TrainerConfig(loss="cispo").correction == "bypass"


def test_T9_a_clip_is_by_default_of_a_ratio_to_pi_old() -> None:
    """A clip of a ratio to the behaviour policy halves what samples four versions old teach (docs/trainer.md)."""
    assert TrainerConfig().correction == "decoupled"


@pytest.mark.parametrize("given", [{"loss": "cispo"}, {"loss": "reinforce", "correction": "truncated"}])
def test_a_dual_clip_that_would_do_nothing_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="dual_clip bounds a ratio that loss"):
        TrainerConfig(**given, dual_clip=3.0)


def test_defaults_of_a_loss_hold_from_the_command_line_too(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["trainer.loss=gspo"], {})
    assert (config.trainer.clip_low, config.trainer.aggregation) == (3e-4, "sample")


def test_the_data_has_no_end_unless_it_is_given_so_many_passes(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = load_config(path, []).data
    assert (data.epochs, data.last_batch) == (None, "drop")
    data = load_config(path, ["--data.epochs=3", "--data.last_batch=train"]).data
    assert (data.epochs, data.last_batch) == (3, "train")
    assert load_config(path, ["--data.epochs=null"]).data.epochs is None
    assert "data.epochs" in refused(path, "--data.epochs=0")
    assert "data.last_batch" in refused(path, "--data.last_batch=keep")
    assert "here it is data.epochs." in refused(path, "--trainer.num_train_epochs=3")


@pytest.mark.parametrize(
    ("given", "changed", "key", "value"),
    [
        ([], "trainer.loss=gspo", "trainer.clip_low", 3e-4),
        ([], "trainer.loss=gspo", "trainer.aggregation", "sample"),
        (["trainer.loss=cispo"], "trainer.loss=ppo", "trainer.dual_clip", 3.0),
        (["trainer.loss=cispo"], "trainer.loss=ppo", "trainer.correction", "decoupled"),
        (["trainer.loss=reinforce"], "trainer.loss=ppo", "trainer.correction", "decoupled"),
        (["trainer.clip_low=0.1"], "trainer.loss=gspo", "trainer.clip_low", 0.1),
        ([], "staleness.mode=sync", "staleness.bound", 0),
        ([], "staleness.mode=one_step", "worker.apply", "drain"),
        (["staleness.mode=one_step"], "staleness.mode=async", "worker.apply", "in_place"),
        (["staleness.mode=sync"], "staleness.mode=async", "staleness.bound", 4),
        ([], "rollout.n=1", "rollout.n", 1),
    ],
)
def test_a_key_changed_on_top_of_the_resolved_file_takes_along_what_follows_it(
    tmp_path: Path, given: list[str], changed: str, key: str, value: object
) -> None:
    saved = tmp_path / "resolved.yaml"
    save_resolved(load_config(write(tmp_path), given, {}), saved)

    config = load_config(saved, [changed], {})

    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == value


def test_the_resolved_file_tells_in_a_comment_what_follows_other_keys(tmp_path: Path) -> None:
    saved = tmp_path / "resolved.yaml"
    save_resolved(load_config(write(tmp_path), ["trainer.loss=gspo", "trainer.clip_high=0.1"], {}), saved)

    text = saved.read_text()

    assert "# trainer.clip_low: 0.0003\n" in text
    assert "clip_low" not in yaml.safe_load(text)["trainer"]
    assert yaml.safe_load(text)["trainer"]["clip_high"] == 0.1


def test_a_group_of_one_is_taken_from_the_resolved_file_too(tmp_path: Path) -> None:
    saved = tmp_path / "resolved.yaml"
    config = load_config(write(tmp_path), ["rollout.n=1"], {})
    save_resolved(config, saved)

    assert load_config(saved, [], {}) == config


def test_a_fleet_that_names_running_servers_is_taken_from_the_resolved_file_too(tmp_path: Path) -> None:
    fleet = "fleet: {models: [{name: policy, server_groups: [{urls: ['http://127.0.0.1:30000']}]}]}\n"
    saved = tmp_path / "resolved.yaml"
    config = load_config(write(tmp_path, fleet), [], {})
    save_resolved(config, saved)

    assert load_config(saved, [], {}) == config


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"train": [{"curriculum": {"skip_above": 0.2, "skip_below": 0.2}}]}, "skip every prompt: lower skip_below"),
        ({"train": [{"curriculum": {"revisit": 0}}]}, "revisit"),
        ({"train": [{"curriculum": {"groups": 9}}]}, "groups"),
        ({"train": [{"curriculum": {}, "answer_key": "answer"}]}, "answer_key provides them: remove one"),
        ({"train": [{}], "eval": [{"name": "e", "path": "e", "curriculum": {}}]}, "held-out dataset 'e' is always"),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused_by_name(data: dict[str, Any], words: str) -> None:
    named = data | {"train": [{"name": "d", "path": "d.jsonl", **one} for one in data["train"]]}
    with pytest.raises(ValidationError, match=re.escape(words)):
        Config.model_validate({"run": "r", "model": {"path": "m"}, "data": named})
