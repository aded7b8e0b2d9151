"""Measure what the check for NaN and Inf adds to the copy of published weights.

    python -m benchmarks.finite_check [--device cuda] [--model small|0.5b|1.5b] [--dtype float32|bfloat16]

``copy_ms`` is the copy into memory that a publication begins with, ``checked_ms`` the same with the check, ``check_ms``
what the check adds: medians over pairs in turn. Times are wall time on a GPU, CPU time on a CPU.
The bound is the larger of 2 ms and 5 % of the send on a GPU, and 10 % of ``publish_s`` (the copy and more) on a CPU.
"""

import argparse
import json
import statistics
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch

from consumers.weights import copies
from consumers.weights.copies import Arena
from consumers.weights.finite_check import CheckedSource, FiniteCheck
from consumers.weights.sources import Source, State

#: Layers, hidden size, intermediate size, size of keys and values, vocabulary.
SHAPES = {
    "small": (30, 576, 1536, 192, 49152),  # SmolLM2-135M
    "0.5b": (24, 896, 4864, 128, 151936),  # Qwen2.5-0.5B
    "1.5b": (28, 1536, 8960, 256, 151936),  # Qwen2.5-1.5B
}


def weights_of(model: str, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Return random tensors with the shapes of a model."""
    layers, hidden, wide, keys, vocabulary = SHAPES[model]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, hidden), "norm": (hidden,)}
    for number in range(layers):
        parts: dict[str, tuple[int, ...]] = {
            "q": (hidden, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, hidden),
        }
        parts |= {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
        parts |= {"norm_1": (hidden,), "norm_2": (hidden,), "q_bias": (hidden,), "k_bias": (keys,), "v_bias": (keys,)}
        shapes |= {f"layers.{number}.{name}": shape for name, shape in parts.items()}
    return {name: torch.randn(shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def measure(model: str = "small", dtype: str = "float32", device: str = "cpu", rounds: int = 15) -> dict[str, Any]:
    """Return the times of copies with and without the check, in ms. Blocks for about ``2 * rounds`` copies."""
    state = State(weights_of(model, getattr(torch, dtype), device))
    arena = Arena()
    arena.take(state, {})  # takes the memory
    plain, checked = [], []
    for _ in range(rounds):
        plain.append(_timed(lambda: _unchecked(arena, state)))
        checked.append(_timed(lambda: arena.take(state, {})))
    check_ms = statistics.median(b - a for a, b in zip(plain, checked, strict=True))
    alone_ms = statistics.median(_timed(lambda: _walk(CheckedSource(state))) for _ in range(rounds))
    num_bytes = arena.copy.num_bytes if arena.copy is not None else 0
    copy_ms = statistics.median(plain)
    return {
        "model": model, "dtype": dtype, "device": _name(device), "num_bytes": num_bytes, "copy_ms": round(copy_ms, 3),
        "checked_ms": round(statistics.median(checked), 3), "check_ms": round(check_ms, 3),
        "check_alone_ms": round(alone_ms, 3), "share_of_copy": round(check_ms / copy_ms, 4),
    }  # fmt: skip


class _NoCheck(FiniteCheck):
    """Copies as a trainer did before there was a check."""

    def copy(self, name: str, tensor: torch.Tensor, place: torch.Tensor) -> None:
        place.copy_(tensor, non_blocking=True)


def _unchecked(arena: Arena, state: State) -> None:
    with unittest.mock.patch.object(copies, "FiniteCheck", _NoCheck):
        arena.take(state, {})


def _timed(call: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        began = time.thread_time()
        call()
        return (time.thread_time() - began) * 1e3
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def _walk(source: Source) -> None:
    for _ in source.tensors({}):
        pass


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the check of published weights for NaN and Inf.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default="small", choices=SHAPES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    print(json.dumps(measure(asked.model, asked.dtype, asked.device, asked.rounds)))


if __name__ == "__main__":
    main()
