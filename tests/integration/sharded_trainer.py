"""Two ranks publish a policy that they hold in parts: FSDP2 (version 1), then tensor-parallel shards (version 2)."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from penstock.config.load import load_config
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.sources import Shards, concatenated

#: How a tensor-parallel trainer splits a Qwen2: columns of what reads the hidden state, rows of what writes it.
DIMS = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "gate_proj": 0,
    "up_proj": 0,
    "embed_tokens": 0,
    "o_proj": 1,
    "down_proj": 1,
}


def dim_of(name: str, tensor: torch.Tensor) -> int | None:
    dim = next((dim for part, dim in DIMS.items() if part in name), None)
    return dim if dim is not None and dim < tensor.ndim else None


def main(config_file: str, rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    config = load_config(Path(config_file), [])
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    whole = load_file(Path(config.model.path, "model.safetensors"))
    dims = {name: dim for name, tensor in whole.items() if (dim := dim_of(name, tensor)) is not None}
    parts = {
        name: tensor.chunk(size, dims[name])[rank].contiguous() if name in dims else tensor
        for name, tensor in whole.items()
    }
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert any(isinstance(tensor, DTensor) for tensor in model.state_dict().values())
    with Trainer(config, dp_rank=rank, dp_size=size) as trainer:
        assert trainer.publish(model) == 1
        trainer.load_state_dict({"run": config.run, "subscription": trainer.name, "batch": 0})
        assert trainer.publish(Shards(parts, concatenated(dims))) == 2
        if rank == 0:
            last = trainer.publisher.last
            assert last is not None
            assert not last.failure, last.failure
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[2])
    # All is said and done; gloo's threads have been seen to abort the interpreter's own end.
    sys.stdout.flush()
    os._exit(0)
