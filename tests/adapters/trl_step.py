"""Two optimizer steps of TRL's GRPOTrainer on rollouts of a run: ``python -m ... CONFIG.json OUT.json``."""

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

PROMPTS = ["ab", "cde", "f"]
N = 4
STEPS = 2


class Watching(TrlRollouts):
    """Keeps what it returned, and how far TRL's own log probs are from it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = super().__call__(prompts, trainer)
        self.calls.append(found | {"prompts": prompts, "difference": difference(trainer.model, found)})
        return found


@torch.no_grad()
def difference(model: Any, found: dict[str, Any]) -> float:
    """Largest |logprob of the engine - logprob of the model that TRL is about to train|."""
    worst = 0.0
    for prompt, answer, logprobs in zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True):
        table = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        mine = [float(table[len(prompt) + t - 1, token]) for t, token in enumerate(answer)]
        worst = max(worst, *(abs(a - b) for a, b in zip(mine, logprobs, strict=True)))
    return worst


def main() -> None:
    config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    out = Path(sys.argv[2])
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = GRPOConfig(
        output_dir=str(out.with_suffix(".trl")), use_cpu=True, bf16=False, report_to=[], logging_steps=1,
        learning_rate=1e-2, max_steps=STEPS, num_generations=N, per_device_train_batch_size=N * len(PROMPTS),
        max_completion_length=12, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    with Watching(config, label={"ab": "x"}.get, timeout=200) as rollouts:
        trainer = GRPOTrainer(
            model=model,
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(config.model.path),
            reward_funcs=[rollouts.reward],
            rollout_func=rollouts,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        )
        trainer.train()
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in trainer.model.state_dict().items())
    out.write_text(
        json.dumps(
            {
                "calls": [
                    {key: call[key] for key in ("prompts", "difference", "penstock_version", "penstock_reward")}
                    for call in rollouts.calls
                ],
                "steps": trainer.state.global_step,
                "moved": moved,
                "log": trainer.state.log_history,
            }
        )
    )


if __name__ == "__main__":
    main()
