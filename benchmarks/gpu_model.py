"""Shapes of the models that GPU benchmarks serve, and small ones for a machine without."""

import os
from pathlib import Path

from benchmarks.random_model import Shape

SHAPES: dict[str, Shape] = {
    "tiny": Shape(),
    "135m": Shape(576, 30, 9, 3, 1536, 49152, 4096, "bfloat16"),
    "0.5b": Shape(896, 24, 14, 2, 4864, 151936, 4096, "bfloat16"),
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151936, 4096, "bfloat16"),
}


def fast_folder(fallback: Path) -> Path:
    """A folder in memory (tmpfs) where there is one, for published weights."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK):
        return shared / f"penstock-bench-{os.getpid()}"
    return fallback
