"""Mistakes in a configuration are refused while it is loaded: one sentence with a remedy, before anything is slow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.config.hooks import REWARDS
from penstock.config.load import load_config
from penstock.config.reading.mistakes import ABSENT, CALLED
from penstock.config.reading.settings import section_at
from penstock.config.sampling import NAMES
from penstock.console.cli.main import execute
from penstock.console.launch import preflight, trainable
from penstock.errors import ConfigError

BASE = """
run: demo
model: {path: policy}
data: {train: [{name: sums, path: train.jsonl}]}
engine: {args: {device: cpu}}
"""


def write(folder: Path, text: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(BASE + text)
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides), {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("trainer.lr=-1", "trainer.lr (the argument --trainer.lr): it should be greater than or equal to 0, not -1."),
        ("trainer.lr=.nan", "it should be"),
        ("trainer.lr=nan", "it should be"),
        ("trainer.lr=.inf", "it should be a finite number"),
        ("trainer.clip_low=-0.2", "it should be greater than or equal to 0"),
        ("trainer.clip_low=2", "it should be less than or equal to 1"),
        ("trainer.clip_high=-0.2", "it should be greater than or equal to 0"),
        ("trainer.max_grad_norm=0", "it should be greater than 0"),
        ("trainer.max_grad_norm=-1", "it should be greater than 0"),
        ("trainer.device=gpu", "device 'gpu' is not a torch device: write cuda."),
        ("trainer.device=gpu:1", "write cuda:1."),
        ("trainer.device=coda", "is not a torch device: write cpu, cuda, "),
        ("trainer.device=cuda:x", "is not a torch device"),
        ("trainer.name=a:b", "'a:b' is not a name"),
        ("trainer.stop_at_accuracy=7", "it should be less than or equal to 1, not 7."),
        ("trainer.stop_at_accuracy=0.9", "requires an evaluation set, but data.eval is empty"),
        ("trainer.subscription.keep_s=.inf", "it should be a finite number"),
        ("worker.lease_s=.nan", "it should be"),
        ("rollout.group_timeout_s=.inf", "it should be a finite number"),
        ("seed=-1", "seed (the argument --seed): it should be greater than or equal to 0, not -1."),
        (
            "rollout.n=2 rollout.min_group=3 rollout.on_group_timeout=train rollout.group_timeout_s=9",
            "rollout.min_group is 3, but a group has at most 2 samples",
        ),
        (
            "seed=3 rollout.n=2 rollout.min_group=3 rollout.on_group_timeout=train rollout.group_timeout_s=9",
            "or raise n (the argument --rollout.n).",
        ),
        (
            "seed=3 staleness.bound=2 staleness.mode=sync",
            "staleness (the argument --staleness.bound): mode sync requires bound",
        ),
        (
            "reward.function=exact_macth",
            "unknown reward 'exact_macth': did you mean exact_match?",
        ),
        ("reward.function=nope", f"unknown reward 'nope': use {', '.join(REWARDS)}, module:function."),
        ("data.train.0.reward=:mine", "unknown reward ':mine'"),
        ("data.train.0.environment=nope", "unknown environment 'nope': use agent, module:Class."),
        ("worker.rewards=[nope]", "worker.rewards.0 (the argument --worker.rewards): unknown reward 'nope'"),
        ("worker.environments=[nope]", "unknown environment 'nope'"),
        ("trainer.filter.functions=[nonzero_sdt]", "unknown filter 'nonzero_sdt': did you mean nonzero_std?"),
        ("buffer.filters=[nope]", "unknown filter 'nope': use nonzero_std, module:function."),
        ("rollout.max_context_tokens=4", "rollout.max_context_tokens is 4, but rollout.sampling.max_new_tokens"),
        ("data.train.0.path=t.jsonl@[5:2]", "the slice [5:2] of t.jsonl is empty"),
        ("data.train.0.path=t.jsonl@[5]", "does not end in a slice: write FILE@[FIRST:LAST]"),
        ("data.train.0.path=t.jsonl@[-5:]", "does not end in a slice: write FILE@[FIRST:LAST]"),
        ("data.train.0.name=a/b", "'a/b' is not a name"),
        ("data.eval=[{name: sums, path: h}]", "two datasets are named 'sums'"),
        (
            "rollout.sampling.max_tokens=9",
            "max_tokens is not a sampling parameter of SGLang; did you mean max_new_tokens?",
        ),
        ("rollout.sampling.temprature=1", "did you mean temperature?"),
        ("rollout.eval_sampling.zzz=1", "zzz is not a sampling parameter of SGLang; remove it."),
        ("data.train.0.sampling={topp: 1}", "did you mean top_p?"),
        ("rollout.sampling.temperature=hot", "temperature is a number of at least 0, not 'hot'"),
        ("rollout.sampling.temperature=-1", "temperature is a number of at least 0, not -1"),
        ("rollout.sampling.temperature=.nan", "temperature is a number of at least 0, not nan"),
        ("rollout.eval_sampling.top_p=7", "top_p is a number from 0 to 1, not 7"),
        ("rollout.sampling.max_new_tokens=0", "max_new_tokens is a whole number of at least 1, not 0"),
        ("rollout.sampling.max_new_tokens=9.5", "max_new_tokens is a whole number of at least 1, not 9.5"),
        ("rollout.sampling.ignore_eos=3", "ignore_eos is true or false, not 3"),
        ("learning_rate=1", "there is no such key; here it is trainer.lr."),
        ("report_to=wandb", "here it is trainer.report_to (a list, such as [wandb])."),
        ("trainer.logger=wandb", "here it is trainer.report_to (a list, such as [wandb])."),
        ("trainer.report_to=wandb", '(the argument --trainer.report_to): it should be a list: write ["wandb"].'),
        ("history.max_bytes=10GB", 'it should be an integer, not "10GB".'),
        pytest.param(
            f"worker.slots={'9' * 5000}", 'it should be an integer with fewer digits, not "999', id="too_many_digits"
        ),
        ("history.enabled=maybe", 'it should be true or false, not "maybe".'),
        ("trainer.learning_rate=1", "here it is trainer.lr."),
        ("batch_size=1", "here it is trainer.batch_groups (groups of rollout.n answers)."),
        ("trainer.per_device_train_batch_size=1", "here it is trainer.batch_groups"),
        ("max_steps=1", "here it is trainer.steps."),
        ("num_generations=1", "here it is rollout.n."),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=1", "there is no such key"),
        ("trainer.beta=0.1", "here it is trainer.kl.weight (estimator and place beside it)."),
        ("trainer.use_kl_loss=true", "here it is trainer.kl (weight, estimator, place)."),
        ("trainer.entropy_coeff=1", "remove it: the losses have no entropy term."),
        ("group_rm=true", "here it is reward.group."),
        ("custom_generate_function_path=a:b", "here it is hooks.generate."),
        ("data_source_path=a:b", "here it is data.train.0.path (python:module:Class)."),
        ("multimodal_keys={image: images}", "here it is data.train.0.image_key."),
        ("data.filter_overlong_prompts=true", "here it is data.train.0.on_long_prompt (error or skip)."),
        ("reward.overlong_buffer={enable: true}", "here it is reward.overlong (max_tokens, buffer_tokens, factor)."),
        ("trainer.clip_ratio_c=3", "here it is trainer.dual_clip."),
        ("update_weight_transfer_mode=delta", "here it is trainer.transport."),
        ("rollout.checkpoint_engine.backend=nccl", "here it is trainer.transport."),
        ("rollout.update_weights_bucket_megabytes=512", "here it is trainer.bucket_bytes."),
        ("rollout.partial_rollout=true", "here it is worker.apply (in_place and abort continue generated prefixes)."),
        ("use_rollout_routing_replay=true", "here it is rollout.sides: [routed_experts]."),
        ("trainer.transport=NCCL", "did you mean nccl?"),
        # The same name in the section that is meant, or where a dataset has it.
        ("reward.url=http://x", "did you mean reward.remote.url?"),
        ("data.image_key=images", "did you mean data.train.0.image_key?"),
        ("data.label_key=x", "did you mean data.train.0.label_key?"),
        ("trainer.serving.enabled=true", "did you mean serving?"),
        ("reward.curriculum={}", "did you mean data.train.0.curriculum?"),
        ("data.train.0.type=jsonl", "there is no such key; remove it."),
        ("data.train.0.curriculum={skip_abov: 1}", "did you mean data.train.0.curriculum.skip_above?"),
        ("reward.judges=[{name: x, rul: y}]", "did you mean reward.judges.0.url?"),
        ("rollout.max_completion_length=5", "here it is rollout.sampling.max_new_tokens."),
        ("trainer.num_epochs=5", "here it is data.epochs."),
        ("trainer.kl=0.1", "trainer.kl (the argument --trainer.kl): it should be a map of keys, not 0.1."),
        ("serving=true", "it should be a map of keys, not true."),
        ("reward.parts=[math,f1]", 'it should be a map of keys, not ["math", "f1"].'),
        ("reward.parts={maths: 1}", "reward.parts (the argument --reward.parts): unknown reward 'maths'"),
        ("data.train=[]", "it should be a list of 1 or more entries, not []."),
        ("data.train={name: a, path: b}", 'it should be a list: write [{"name": "a", "path": "b"}].'),
        ("reward.jail.readable=[data]", "'data' is not absolute: use an absolute path."),
        (
            "reward.remote.url=localhost:80",
            "is not an HTTP address: use http://HOST/PATH or https://HOST/PATH.",
        ),
        ("reward.remote.url=http://h:99999/x", "is not an HTTP address"),
        ("serving.token=short", "serving.token is invalid: use 16 to 256"),
        ("reached_at=me:80", "'me:80' is no host: give a name or an address, without port"),
        ("serving.host=10.0.0.300", "'10.0.0.300' is no host"),
        ("metrics.host=a:b:c", "'a:b:c' is no host"),
        ("trainer.delta_store=https://a/b", "is read-only: use an object store, or a folder, which"),
        ("trainer.delta_store=s3:/bucket/run", "has one slash too few: write s3://bucket/run"),
        ("trainer.delta_store=gs://", "has no bucket: write gs://BUCKET/FOLDER"),
        ("trainer.transfer_address=10.0.0.1:3000", "'10.0.0.1:3000' is no host"),
        ("model.dtype=float17", "'float17' is not a dtype of weights: use auto, float32"),
        ("trainer.stpes=5", "did you mean trainer.steps?"),
        ("trainer.batch_grups=5", "did you mean trainer.batch_groups?"),
    ],
)
def test_a_mistake_is_refused_while_loading_and_says_what_to_change(tmp_path: Path, overrides: str, said: str) -> None:
    text = refused(write(tmp_path), *([overrides] if "{" in overrides else overrides.split(" ")))

    assert said in text, text
    assert "\n" not in text
    assert text.endswith((".", "?"))
    assert not text.endswith(("?.", ".."))


def test_a_hint_names_a_key_that_is_there() -> None:
    for named in CALLED.values():
        for key in named.split(" (")[0].split(",")[0].split(" and ")[0].split(":")[0].split(" or "):
            path = tuple(key.strip().split("."))
            declared = getattr(section_at(path[:-1]), "model_fields", {})
            known = path[-1] in declared or path[-2:][0] in ("sampling", "eval_sampling", "args")
            assert known, f"{key} is no key"
    assert not CALLED.keys() & ABSENT.keys()
    assert {"temperature", "max_new_tokens", "top_p", "n", "stop"} <= NAMES


def config(folder: Path, *overrides: str) -> Config:
    return load_config(write(folder), list(overrides), {})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.sampling.top_p=0.9"], "rollout.sampling.top_p is 0.9, which draws from another distribution"),
        (["rollout.sampling.temperature=1e-7"], "rollout.sampling.temperature is 1e-07, which draws from another"),
        (["data.train.0.sampling={top_k: 5}"], "data.train.0.sampling.top_k is 5"),
        (["rollout.sampling.json_schema='{}'"], "rollout.sampling.json_schema is"),
    ],
)
def test_T7_sampling_that_hides_the_distribution_is_refused_before_a_start(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainable.check_rollouts(config(tmp_path, *overrides))

    assert said in str(caught.value)
    trainable.check_rollouts(config(tmp_path, "rollout.eval_sampling.top_p=0.9", "rollout.sampling.top_k=-1"))


def test_groups_of_one_are_refused_where_advantages_compare(tmp_path: Path) -> None:
    for overrides, where in (["rollout.n=1"], "rollout.n"), (["data.train.0.n=1"], "data.train.0.n"):
        with pytest.raises(ConfigError, match=rf"{where} is 1, and trainer.advantage grpo compares"):
            trainable.check_groups(config(tmp_path, *overrides))
    trainable.check_groups(config(tmp_path, "rollout.n=1", "data.train.0.n=2"))


TEACHER = "{name: t, url: 'http://127.0.0.1:1', path: p}"


def test_groups_of_one_are_taken_where_something_else_makes_advantages(tmp_path: Path) -> None:
    trainable.check_groups(config(tmp_path, "rollout.n=1", "hooks.rewards=m:f"))
    distills = [f"rollout.teacher={TEACHER}", "rollout.n=1"]
    trainable.check_groups(config(tmp_path, *distills, "trainer.distill={}"))
    with_rewards = [*distills, "trainer.distill={with_rewards: true}"]
    trainable.check_groups(config(tmp_path, *with_rewards, "data.train.0.n=4"))
    with pytest.raises(ConfigError, match=r"rollout.n is 1, and trainer.distill.with_rewards adds advantages"):
        trainable.check_groups(config(tmp_path, *with_rewards))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [f"rollout.teacher={TEACHER}"],
            "rollout.teacher t scores every sample, and without trainer.distill the reference",
        ),
        ([f"rollout.reference={TEACHER}"], "set trainer.kl, or remove rollout.reference if no other trainer reads"),
        (["trainer.kl={weight: 1, estimator: k1}"], "k1 in the loss has a gradient of mean 0: it is noise: choose k2"),
        (
            ["data.epochs=2", "data.train.0.curriculum={groups: 2}"],
            "data.epochs is 2, and the curriculum of dataset sums skips no prompt before its epoch 3: raise",
        ),
    ],
)
def test_what_the_reference_trainer_has_no_use_for_is_told(tmp_path: Path, overrides: list[str], said: str) -> None:
    """It may be meant: for a trainer of one's own, or for a later start."""
    told = [": ".join(one) for one in trainable.unheeded(config(tmp_path, *overrides))]
    assert len(told) == 1
    assert said in told[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"rollout.teacher={TEACHER}", "trainer.distill={}"],
        [f"rollout.reference={TEACHER}", "trainer.kl={weight: 1}"],
        [f"rollout.reference={TEACHER}", "debug.rollout_only=true"],
        ["trainer.kl={weight: 1, estimator: k1, place: reward}"],
        ["data.train.0.curriculum={}"],
        ["data.epochs=2", "data.train.0.curriculum={}"],
        ["data.epochs=1", "data.train.0.curriculum={}", "data.train.0.weight=1"],
    ],
)
def test_nothing_is_told_where_all_is_used(tmp_path: Path, overrides: list[str]) -> None:
    assert trainable.unheeded(config(tmp_path, *overrides)) == []


def test_cuda_without_cuda_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda = config(tmp_path, "trainer.device=cuda")
    monkeypatch.setattr(trainable, "_torch_has_cuda", lambda: False)
    with pytest.raises(ConfigError, match="the torch of this environment was built without it"):
        trainable.check_device(on_cuda)
    monkeypatch.setattr(trainable, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(trainable, "visible_gpus", tuple)
    with pytest.raises(ConfigError, match=r"this machine shows no GPU: start where one is, or set trainer.device=cpu"):
        trainable.check_device(on_cuda)
    monkeypatch.setattr(trainable, "visible_gpus", lambda: ("0",))
    trainable.check_device(on_cuda)
    trainable.check_device(config(tmp_path))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("--data.train.0.path=nope.jsonl", "data.train.0.path: there is no file"),
        ("--model.path=nope", "is not a folder with a config.json"),
        ("--engine.python=/nope/python", "engine.python: there is no interpreter /nope/python"),
        ("--redis.url=redis://127.0.0.1:1/0", "No Redis answers at redis://127.0.0.1:1/0"),
        ("--rollout.sampling.top_p=0.5", "draws from another distribution"),
        ("--rollout.n=1", "rollout.n is 1"),
        ("--data.train.0.path=bad.jsonl", "line 2"),
        ("--data.train.0.input_key=question", "the row has no column 'question'"),
        ("--data.eval=[{name: h, path: train.jsonl}]", "its prompts are also trained on"),
    ],
)
def test_cheap_checks_come_before_slow_ones(
    tmp_path: Path,
    setting: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "p", "label": "l"}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p", "label": "l"}\n{"prompt"\n')
    (tmp_path / "python").write_text("#!/bin/sh\n")
    (tmp_path / "python").chmod(0o755)
    for slow in ("check_engine", "check_engine_arguments"):
        monkeypatch.setattr(preflight, slow, lambda *_: pytest.fail("a slow check came first"))

    code = execute(["run", "run.yaml", f"--engine.python={tmp_path / 'python'}", setting])

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs" / "demo").exists()


def test_a_wrong_path_answers_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    write(tmp_path)
    code = (
        "import sys\nfrom penstock.console.cli import main as cli\n"
        "try: cli.main(['run', 'run.yaml', '--engine.python=/bin/sh'])\n"
        "except SystemExit as e: print('code', e.code)\n"
        "print('heavy', sorted({'torch', 'matplotlib', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(preflight.__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split("\n")[:2] == ["code 2", "heavy []"], done.stderr
    assert "data.train.0.path: there is no file" in done.stderr
