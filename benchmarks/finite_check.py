"""Measure what the check for NaN and Inf adds to the copy of published weights.

``copy_ms`` is the copy into memory that a publication begins with, ``checked_ms`` the same with the check, ``check_ms``
what the check adds: medians over pairs, whose order alternates. Times are wall time on a GPU, and CPU time of one
thread, which does all of the work, on a CPU.

    python -m benchmarks.finite_check --json FILE
    python -m benchmarks.finite_check --device cuda --shape 1.5b --dtype bfloat16 --json FILE
"""

import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from benchmarks.common import Report, execute, median, patched, versions
from benchmarks.gpu_model import SHAPES
from benchmarks.options import Device, JsonFile, ShapeName
from benchmarks.random_model import Shape
from penstock.consumers.weights import copies
from penstock.consumers.weights.copies import Arena, CheckedSource, FiniteCheck
from penstock.consumers.weights.sources import State


def weights_of(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Return random tensors with the shapes of a model."""
    hidden, keys, mlp = shape.hidden, shape.hidden * shape.kv_heads // shape.heads, shape.mlp
    of_layer: dict[str, tuple[int, ...]] = {
        "q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden),
        "gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp), "norm_1": (hidden,), "norm_2": (hidden,),
        "q_bias": (hidden,), "k_bias": (keys,), "v_bias": (keys,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (shape.vocab, hidden), "norm": (hidden,)}
    for number in range(shape.layers):
        shapes |= {f"layers.{number}.{name}": size for name, size in of_layer.items()}
    return {name: torch.randn(size, dtype=dtype, device=device) for name, size in shapes.items()}


class NoCheck(FiniteCheck):
    """Accepts all weights."""

    def add(self, name: str, tensor: torch.Tensor, place: torch.Tensor | None = None) -> None:
        if place is not None:
            place.copy_(tensor, non_blocking=True)


def timed_ms(work: Callable[[], object], device: str) -> float:
    """Return the milliseconds of a call. Blocks."""
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if device == "cuda" else (time.process_time, int)
    wait()
    began_s = clock()
    work()
    wait()
    return 1e3 * (clock() - began_s)


def measure(shape: Shape, dtype: str, device: str, rounds: int) -> dict[str, float]:
    """Return the times of copies with and without the check. Blocks for about ``2 * rounds`` copies."""
    state, arena = State(weights_of(shape, getattr(torch, dtype), device)), Arena()

    def plain() -> None:
        with patched(copies, FiniteCheck=NoCheck):
            arena.take(state, {})

    def checked() -> None:
        arena.take(state, {})

    checked()  # takes the memory
    times: dict[Callable[[], None], list[float]] = {plain: [], checked: []}
    for turn in range(rounds):
        for work in (plain, checked) if turn % 2 else (checked, plain):
            times[work].append(timed_ms(work, device))
    alone = [timed_ms(lambda: list(CheckedSource(state).tensors({})), device) for _ in range(rounds)]
    copy_ms = median(times[plain])
    check_ms = median([with_it - without for without, with_it in zip(times[plain], times[checked], strict=True)])
    return {
        "num_bytes": arena.copy.num_bytes if arena.copy is not None else 0,
        "copy_ms": copy_ms,
        "checked_ms": median(times[checked]),
        "check_ms": check_ms,
        "check_alone_ms": median(alone),
        "share_of_copy": check_ms / copy_ms,
    }


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shape: ShapeName = "tiny",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Pairs of copies.")] = 15,
) -> None:
    """What the check for NaN and Inf adds to the copy of published weights."""
    torch.set_num_threads(1)
    row = measure(SHAPES[shape], dtype, device, rounds)
    Report(
        title=f"check of published weights: {shape}, {dtype}, {device}",
        columns={
            "num_bytes": "bytes", "copy_ms": "copy ms", "checked_ms": "with check ms", "check_ms": "check ms",
            "check_alone_ms": "check alone ms", "share_of_copy": "share of copy",
        },
        rows=[row],
        keys={name: row[name] for name in ("check_ms", "share_of_copy")},
        versions=versions(),
    ).finish(json_file)  # fmt: skip


if __name__ == "__main__":
    execute(main)
