"""Two rollouts and an optimizer step inside verl, as its trainer makes them: ``python -m ... CONFIG.json OUT.json``.

publish ─> generate_sequences ─> verl's log probs, GRPO advantages, PPO update ─> publish ─> generate_sequences
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.model import compute_position_id_with_mask
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from penstock.config import Config
from penstock.consumers.adapters.verl import VerlRollout, from_batch
from penstock.errors import ConfigError
from tests.adapters.verl_cpu import make_actor
from tests.batch_factory import make_batch, make_samples, tiny_model

#: Token ids of the tiny model's prompts, and answers per prompt.
PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9], [12, 13]]
N = 3
#: P and R.
LENGTHS = (6, 12)
#: verl's ``actor_rollout_ref.rollout.temperature``; the run's own configuration says 1.
TEMPERATURE = 0.8


def prompts_of(calls: int) -> DataProto:
    """What verl's loop gives: each prompt N times, with a uid and what the reward compares with."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS])
    columns = {
        "uid": np.array([f"u{calls}-{i}" for i in range(len(PROMPTS))], dtype=object),
        "reward_model": np.array([{"ground_truth": "a", "style": "rule"} for _ in PROMPTS], dtype=object),
        "extra_info": np.array([{"index": np.int64(i)} for i in range(len(PROMPTS))], dtype=object),
    }
    batch = DataProto.from_dict(tensors={"input_ids": ids, "attention_mask": (ids > 0).long()}, non_tensors=columns)
    return batch.repeat(repeat_times=N, interleave=True)


def log_probs(actor: TrainingWorker, data: DataProto) -> torch.Tensor:
    """[B, R] by verl's own pass over the batch, at the temperature that it was handed with the batch."""
    flat = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(flat, calculate_entropy=True, compute_loss=False)
    return no_padding_2_padding(tu.get(actor.infer_batch(flat), "log_probs"), flat).float()


def update(actor: TrainingWorker, data: DataProto) -> dict[str, Any]:
    """One optimizer step by verl's actor; its metrics."""
    flat = left_right_2_no_padding(data.to_tensordict())
    size = len(data)
    tu.assign_non_tensor(
        flat, calculate_entropy=False, global_batch_size=size, mini_batch_size=size, epochs=1, seed=1,
        dataloader_kwargs={"shuffle": False}, compute_loss=True,
    )  # fmt: skip
    return dict(tu.get(actor.train_mini_batch(flat), "metrics"))


def weights_of(actor: TrainingWorker) -> dict[str, torch.Tensor]:
    """Whole tensors by their Hugging Face names."""
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in actor.engine.module.state_dict().items()}


def difference(data: DataProto, found: torch.Tensor) -> float:
    """Largest difference between what the engine drew with and what verl computes, on tokens that bear loss."""
    mask = data.batch["response_mask"].bool()
    return float((found - data.batch["rollout_log_probs"])[mask].abs().max())


def versions(data: DataProto) -> list[int]:
    """Versions of the tokens that bear loss; nothing else has one."""
    drawn = data.batch["response_mask"].bool()
    found = torch.where(data.batch["rollout_versions"] >= 0, data.batch["rollout_versions"], -1)
    assert bool((found[~drawn] == -1).all())
    return sorted(set(found[drawn].tolist()))


def refusal(of: Callable[[], object]) -> str:
    """What it raises, in words; '' where nothing."""
    try:
        of()
    except (AssertionError, ConfigError) as exc:
        return str(exc)
    return ""


def fed() -> dict[str, Any]:
    """Batches that penstock's producer fed, at a temperature of their own."""
    batch = make_batch(make_samples({4: tiny_model(1)}, groups=2, n=2, temperature=0.7))
    data = from_batch(batch, pad_id=0)
    other = DataProto(meta_info={"temperature": 1.0}, batch=data.batch.clone())
    return {
        "temperature": data.meta_info["temperature"],
        "other": refusal(lambda: from_batch(batch, pad_id=0, temperature=1.0)),
        "union": refusal(lambda: other.union(data)),
    }


def main() -> None:
    config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    out = Path(sys.argv[2])
    actor = make_actor(Path(config.model.path), out.with_suffix(".rendezvous"), lr=1e-2, batch=len(PROMPTS) * N)
    result: dict[str, Any] = {"fed": fed()}
    widths = {"prompt_length": LENGTHS[0], "response_length": LENGTHS[1]}
    sampling = {"temperature": TEMPERATURE, "max_new_tokens": LENGTHS[1] - 4}
    with VerlRollout(config, pad_id=0, **widths, sampling=sampling, timeout=200) as rollout:
        rollout.update_weights(weights_of(actor))
        named = prompts_of(0)
        named.meta_info["temperature"] = 1.0
        result["named"] = refusal(lambda: rollout.generate_sequences(named))
        data = rollout.generate_sequences(prompts_of(0))
        result["temperature"] = data.meta_info["temperature"]
        data.batch["old_log_probs"] = log_probs(actor, data)
        # The engine scores the policy itself, at temperature 1.
        plain = data.select(deepcopy=True)
        plain.meta_info["temperature"] = 1.0
        scored = rollout.compute_log_prob(plain)
        mask = data.batch["response_mask"].bool()
        result["scored"] = {
            "difference": float((scored.batch["old_log_probs"] - log_probs(actor, plain))[mask].abs().max()),
            "versions": sorted(set(scored.non_tensor_batch["scored_version"].tolist())),
            "shape": list(scored.batch["old_log_probs"].shape),
        }
        advantages, _ = compute_grpo_outcome_advantage(
            data.batch["rm_scores"], data.batch["response_mask"], data.non_tensor_batch["uid"]
        )
        data.batch["advantages"] = advantages
        positions = compute_position_id_with_mask(data.batch["attention_mask"])
        result["first"] = {
            "shapes": {name: list(tensor.shape) for name, tensor in data.batch.items()},
            "prompts": data.batch["prompts"].tolist(),
            "uid": data.non_tensor_batch["uid"].tolist(),
            "tokens": int(data.batch["response_mask"].sum()),
            "difference": difference(data, data.batch["old_log_probs"]),
            "positions_as_verl": bool((positions == data.batch["position_ids"]).all()),
            "versions": versions(data),
            "rewards": data.batch["rm_scores"].sum(-1).tolist(),
            "sums": (data.batch["input_ids"] * data.batch["attention_mask"]).sum(-1).tolist(),
        }
        result["metrics"] = {name: np.asarray(value).mean().item() for name, value in update(actor, data).items()}
        after = log_probs(actor, data)
        result["moved"] = float((after - data.batch["old_log_probs"]).abs().max())
        result["version"] = rollout.update_weights(weights_of(actor), step=1)
        again = rollout.generate_sequences(prompts_of(1))
        result["second"] = {
            "difference": difference(again, log_probs(actor, again)),
            "versions": versions(again),
        }
        greedy = prompts_of(2)
        greedy.meta_info["validate"] = True
        result["greedy"] = rollout.generate_sequences(greedy).batch["responses"].tolist()
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
