"""Two batches of prompts with images, trained on inside verl: ``python -m ... CONFIG.json OUT.json``.

publish ─> batch ─> from_batch ─> verl's log probs, PPO update ─> publish ─> batch of the new weights ─> log probs
"""

import json
import sys
from pathlib import Path
from typing import Any

import tests.adapters.torchvision_ops  # noqa: F401  # isort: skip

import redis
import torch
from transformers.core_model_loading import revert_weight_conversion
from verl import DataProto
from verl.utils import hf_processor

from penstock.config import Config
from penstock.consumers.adapters.verl import from_batch
from penstock.consumers.trainer import Trainer
from penstock.records.job import Job
from tests.adapters.verl_cpu import make_actor
from tests.adapters.verl_step import difference, log_probs, refusal, update, weights_of
from tests.integration import play
from tests.tiny_vision import asked, png


def ask(trainer: Trainer, first: int, n: int) -> None:
    """Admit two prompts with images, of different lengths."""
    prompts = [(first + i, asked("a" * (3 * i + 1), "b=")) for i in range(2)]
    jobs = [Job(f"d/0/{at}", n, prompt=text, images=[png(at, 3, 2)]) for at, text in prompts]
    client = redis.Redis.from_url(str(trainer.session.config.redis.url))
    assert play.admit(client, trainer.session.keys, jobs).admitted == len(jobs)


def saved(actor: Any) -> dict[str, torch.Tensor]:
    """Whole tensors by the names that the model's files have, which an engine loads."""
    return dict(revert_weight_conversion(actor.engine.module, weights_of(actor)))


def one_axis(data: DataProto) -> DataProto:
    """The same with all tokens in one row, as in a text."""
    other = data.select(deepcopy=True)
    positions = other.batch["position_ids"]
    other.batch["position_ids"] = positions[:, :1].expand_as(positions).contiguous()
    return other


def others_images(data: DataProto) -> DataProto:
    """The same with the images of the rows turned round; they are of one size."""
    other = data.select(deepcopy=True)
    held = other.non_tensor_batch["multi_modal_inputs"]
    held[:] = held[::-1].copy()
    return other


def told(data: DataProto, found: torch.Tensor) -> dict[str, Any]:
    return {
        "difference": difference(data, found),
        "tokens": int(data.batch["response_mask"].sum()),
        "versions": sorted(set(data.batch["rollout_versions"][data.batch["response_mask"].bool()].tolist())),
        "positions": list(data.batch["position_ids"].shape),
        "inputs": sorted({key for one in data.non_tensor_batch["multi_modal_inputs"] for key in one}),
    }


def main() -> None:
    config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    out, path = Path(sys.argv[2]), Path(config.model.path)
    processor = hf_processor(str(path))
    pad_id = processor.tokenizer.pad_token_id
    result: dict[str, Any] = {}
    with Trainer(config) as trainer:
        first_size = config.trainer.batch_groups * config.rollout.n
        actor = make_actor(path, out.with_suffix(".rendezvous"), lr=1e-3, batch=first_size)
        trainer.publish(saved(actor))
        ask(trainer, 0, config.rollout.n)
        batch = trainer.next(timeout=200)
        result["without"] = refusal(lambda: from_batch(batch, pad_id=pad_id))
        data = from_batch(batch, pad_id=pad_id, processor=processor)
        found = log_probs(actor, data)
        result["first"] = told(data, found)
        result["one_axis"] = difference(data, log_probs(actor, one_axis(data)))
        result["others_images"] = difference(data, log_probs(actor, others_images(data)))
        data.batch["old_log_probs"] = found
        result["grad_norm"] = float(torch.as_tensor(update(actor, data)["grad_norm"]).mean())
        trainer.commit(batch)
        trainer.publish(saved(actor), step=1)
        ask(trainer, 2, config.rollout.n)
        batch = trainer.next(timeout=200)
        after = from_batch(batch, pad_id=pad_id, processor=processor)
        result["second"] = told(after, log_probs(actor, after))
        result["moved"] = float((log_probs(actor, data) - found).abs().max())
        trainer.commit(batch)
        trainer.publish(saved(actor), step=2)
        trainer.state_dict()
        trainer.checkpointed()
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
