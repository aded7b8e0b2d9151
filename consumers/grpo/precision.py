"""The number types that the reference trainer computes in.

    master weights, gradients, optimizer    float32, whatever type the engines use
    forward and backward pass               trainer.dtype: bfloat16 autocast on a GPU, float32 elsewhere

A bfloat16 weight has 8 significant bits: a step below 1/512 of its value changes nothing. At a learning rate of 5e-6
one step changed 0.98 % of the weights of a bfloat16 model of 135M, and 99.97 % of those of a float32 one.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

#: Devices whose matrix units compute bfloat16.
_GPUS = ("cuda", "xpu", "npu", "hpu")


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type of the forward and backward pass for a value of ``trainer.dtype``."""
    if name == "bfloat16" or (name == "auto" and device.type in _GPUS):
        return torch.bfloat16
    return torch.float32


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which modules with float32 weights compute in ``dtype``."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


def enable_tf32(name: str, device: torch.device) -> None:
    """Let the float32 matrix products of this process use TF32 on a GPU, unless ``trainer.dtype`` is float32."""
    if name != "float32" and device.type in _GPUS:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
