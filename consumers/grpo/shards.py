"""Shard a policy over the data-parallel ranks (FSDP2): each has 1/N of weights, gradients and optimizer state.

A checkpoint has the shards of all ranks. They are joined and split anew, so that a run can continue with any number of
ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from penstock.consumers.grpo.policy import Policy


def shard(policy: Policy, device: torch.device | None = None) -> None:
    """Shard every parameter over all ranks. Call it on all ranks before creating the optimizer. Blocks.

    Args:
        device: where the shards go, layer by layer, so that it never holds the complete policy; None: where they are.

    Layers are gathered one at a time for their forward and backward pass; gradients are averaged over the ranks.
    """
    device = device or next(policy.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether a module has sharded parameters."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or an unsharded tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(state: Any) -> Any:
    """Return a state dict with each sharded tensor as ``{"shard": this rank's rows of it, in host memory}``."""
    if isinstance(state, DTensor):
        assert state.placements == (Shard(0),), state.placements
        return {"shard": state.to_local().cpu()}
    if isinstance(state, dict):
        return {name: own_part(value) for name, value in state.items()}
    return state


def joined(parts: Sequence[Any]) -> Any:
    """Return the full tensor of what ``own_part`` made of a sharded one on all ranks, or the value of rank 0.

    Tensors are copies: those of a mapped file would keep it on the disk after its deletion.
    """
    first = parts[0]
    if isinstance(first, dict) and "shard" in first:
        return torch.cat([one["shard"] for one in parts])
    return first.clone() if isinstance(first, Tensor) else first


def split_like(value: Any, like: Tensor | None) -> Any:
    """Return a full tensor with the shape of the parameter ``like`` split as it is, anything else unchanged."""
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    # Every rank has read the same checkpoint, so nothing is sent. A view would keep the full tensor.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None).clone()


def load(module: torch.nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[dict[str, Any]]) -> None:
    """Load ``model`` and ``optimizer`` of the checkpoint's ranks into a module and its optimizer, sharded or not."""
    own = module.state_dict(keep_vars=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def split(of: Sequence[dict[str, Any]], name: str, like: Tensor | None) -> Any:
        return split_like(joined([part[name] for part in of]), like)

    models, states = [part["model"] for part in parts], [part["optimizer"]["state"] for part in parts]
    module.load_state_dict({name: split(models, name, own.get(name)) for name in models[0]})
    of_parameters = {
        index: {name: split([state[index] for state in states], name, parameters[index]) for name in one}
        for index, one in states[0].items()
    }
    optimizer.load_state_dict({**parts[0]["optimizer"], "state": of_parameters})
