"""A policy held in parts by the data-parallel ranks (FSDP2): each has 1/N of weights, gradients and optimizer state.

Checkpoints have full tensors, so that a run can continue with any number of ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.consumers.grpo.policy import Policy


def shard(policy: Policy) -> None:
    """Leave each rank 1/N of every parameter. Call it on all ranks, before the optimizer is made; blocks for them.

    Layers are gathered one at a time, for their forward and their backward pass; gradients are averaged over the ranks.
    """
    device = next(policy.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether a module has sharded parameters."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or the tensor if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(state: Any) -> Any:
    """Return a state dict with whole tensors, in host memory, on rank 0; other ranks take part, and keep none."""
    if isinstance(state, DTensor):
        full = state.full_tensor()
        return full.cpu() if dist.get_rank() == 0 else None
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    return state


def split_like(value: Any, like: Tensor | None) -> Any:
    """Return a full tensor with the shape of the parameter ``like`` split as it is, anything else unchanged."""
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    # All ranks have read the same checkpoint, so nothing is sent. A view would keep the full tensor.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None).clone()


def load(module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load full ``model`` and ``optimizer`` state into a module and its optimizer, sharded or not."""
    own = module.state_dict(keep_vars=True)
    module.load_state_dict({name: split_like(value, own.get(name)) for name, value in state["model"].items()})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_parameters = {
        index: {name: split_like(value, parameters[index]) for name, value in one.items()}
        for index, one in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({**state["optimizer"], "state": of_parameters})
