"""verl's own trainer, ``verl.trainer.main_ppo``, with penstock as its rollout by configuration alone.

Its Ray, its resource pools, its FSDP2 worker, its agent loop worker and its reward loop; verl has no CPU platform, so
the test adds one in every process (tests/adapters/verl_cpu_plugin.py).
"""

import os
import re
import subprocess
from pathlib import Path
from shlex import split

import pytest
import redis

from penstock.config import Config
from penstock.protocol.audit import audit
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from tests.integration import play
from tests.integration.docs_blocks import blocks
from tests.integration.parts import buffering, until
from tests.wide.foreign import PYTHON, _adapters, config, working

__all__ = ["_adapters", "config"]
#: verl starts eight processes, each of which imports torch, Ray and verl.
TRAINING_S = 900

pytestmark = [pytest.mark.engine, pytest.mark.timeout(TRAINING_S + 300)]

#: Prompts of a batch, and answers to each.
PROMPTS, N = ("ab", "cde", "f", "gh"), 3
#: verl's own settings for a tiny model in float32, one optimizer step, one process of each kind.
SMALL = """
data.train_batch_size=4 data.max_prompt_length=8 data.max_response_length=8 data.dataloader_num_workers=0
data.filter_overlong_prompts=False
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.rollout.agent.num_workers=1 actor_rollout_ref.rollout.n=3
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size=4
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.optim.lr=1e-2
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32
algorithm.adv_estimator=grpo reward.num_workers=1
trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console]
actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0
trainer.val_before_train=True trainer.test_freq=-1 trainer.save_freq=-1 trainer.total_training_steps=1
trainer.total_epochs=1 trainer.resume_mode=disable
ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.resources.ACCEL=1
+ray_kwargs.ray_init.include_dashboard=False
"""


def documented(run: Path) -> list[str]:
    """The page's settings of penstock, for a run of this file."""
    [page] = [block for block in blocks() if "-m verl.trainer.main_ppo" in block.text]
    name = "+actor_rollout_ref.rollout.engine_kwargs.penstock"
    words = [word for word in split(page.text.replace("\\\n", " ")) if "penstock" in word or ".use_v1=" in word]
    return [f"{name}.config={run}" if word.startswith(name) else word for word in words]


def data(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "d",
            "reward_model": {"ground_truth": "x", "style": "rule"},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(PROMPTS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def model(config: Config, folder: Path) -> Path:
    """The tiny model with a chat template that only joins what is said, and two tokens that verl looks for."""
    from transformers import AutoTokenizer

    copy = folder / "policy"
    subprocess.run(["cp", "-r", config.model.path, copy], check=True)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens(["\n", "<|im_end|>"])
    tokenizer.save_pretrained(copy)
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return copy


def figure(log: str, name: str, step: int = 1) -> float:
    """One of verl's metrics of a step."""
    found = re.search(rf"step:{step} .*?{re.escape(name)}:(?:np\.\w+\()?([-\d.e]+)", log)
    assert found, f"{name} is not in {log[-6000:]}"
    return float(found[1])


def test_verls_trainer_takes_a_step_with_penstock_named_in_its_configuration(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")} | {
        "PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "VERL_USE_EXTERNAL_MODULES": "tests.adapters.verl_cpu_plugin", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    reward = config.reward.model_copy(update={"function": "tests.adapters.rewards:last_digit_and_length"})
    config = config.model_copy(update={"reward": reward})
    train = data(tmp_path)
    files = [f"data.train_files={train}", f"data.val_files={train}", f"trainer.default_local_dir={tmp_path / 'verl'}"]
    files += [f"actor_rollout_ref.model.path={model(config, tmp_path)}", f"hydra.run.dir={tmp_path / 'hydra'}"]
    with buffering(config), working(config, tmp_path):
        files += ["+actor_rollout_ref.rollout.engine_kwargs.penstock.reward_info=[length,missing]"]
        command = [PYTHON, "-m", "verl.trainer.main_ppo", *documented(tmp_path / "run.yaml"), *split(SMALL), *files]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TRAINING_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:]
        until(lambda: play.counter(client, keys, "retired") == len(PROMPTS) * (N + 1))
    # Validation is drawn as training is here, and stands in a lane of its own all the same.
    admitted = {name: int(client.hget(keys.source, name) or 0) for name in ("verl", "verl-validation")}
    assert admitted == {"verl": len(PROMPTS) * N, "verl-validation": len(PROMPTS)}
    assert audit(client, keys).ok
    # Published before the first prompts, and after the step.
    steps = [
        Publication.from_bytes(entry[b"p"], "publication").step for _, entry in client.xrange(keys.weights("policy"))
    ]
    assert steps == [0, 1]
    # T6: what the engine drew with is what verl's own pass over its own padding gives.
    assert figure(done.stdout, "training/rollout_probs_diff_max") < 2e-3
    assert figure(done.stdout, "actor/grad_norm") > 0
    # Turns of both sides, and what the reward gave beside its number; what it never gives is in no metric.
    assert figure(done.stdout, "num_turns/mean") == 2
    assert 1 <= figure(done.stdout, "val-aux/d/length/mean@1", step=0) <= 8
    assert "val-aux/d/missing" not in done.stdout
    # The rewards that the run's workers gave are those that verl trained on.
    assert 0 <= figure(done.stdout, "critic/score/min") <= figure(done.stdout, "critic/score/max") <= 9
    assert figure(done.stdout, "critic/score/max") == int(figure(done.stdout, "critic/score/max"))
