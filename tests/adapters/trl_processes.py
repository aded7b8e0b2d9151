"""An optimizer step of TRL's GRPOTrainer in several processes: ``accelerate launch ... CONFIG.json OUT``.

Each writes OUT.RANK.json. The lines are those of docs/adapters.md.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from penstock.config import Config
from penstock.consumers.adapters.trl import TrlRollouts

PROMPTS = ["ab", "cde", "f", "gh"]
N = 4


class Watching(TrlRollouts):
    """Keeps what it returned."""

    calls: list[dict[str, Any]]

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = super().__call__(prompts, trainer)
        self.calls.append(found | {"prompts": prompts})
        return found


def main() -> None:
    config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    out = Path(sys.argv[2])
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    rank = int(os.environ["RANK"])
    Path(f"{out}.{rank}.pid").write_text(str(os.getpid()))
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = GRPOConfig(
        output_dir=f"{out}.trl", use_cpu=True, bf16=False, report_to=[], logging_steps=1, max_steps=1,
        learning_rate=1e-2, num_generations=N, per_device_train_batch_size=N * len(PROMPTS) // 2,
        max_completion_length=12, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    with Watching(config, label={"ab": "x"}.get) as rollouts:
        rollouts.calls = []
        trainer = GRPOTrainer(
            model=model,
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(config.model.path),
            reward_funcs=[rollouts.reward],
            rollout_func=rollouts,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        )
        trainer.train()
        state = {name.removeprefix("module."): tensor for name, tensor in trainer.model.state_dict().items()}
    found = {
        "calls": rollouts.calls,
        "processes": trainer.accelerator.num_processes,
        "steps": trainer.state.global_step,
        "moved": max(float((tensor - before[name]).abs().max()) for name, tensor in state.items()),
        "sum": float(sum(tensor.double().sum() for tensor in state.values())),
    }
    Path(f"{out}.{rank}.json").write_text(json.dumps(found))
    trainer.accelerator.end_training()  # with the process group left open, gloo aborts the interpreter's exit at times


if __name__ == "__main__":
    main()
