"""Published folders of a small model in several dtypes, as a trainer writes them."""

from pathlib import Path

import torch
from torch import Tensor

from penstock.consumers.weights.write import Written, write_weights

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.int64, torch.float64]


def a_model(seed: int = 0, size: int = 3000) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{n}.{str(dtype).removeprefix('torch.')}": (torch.randn(size // 3, 3, generator=generator) * 9).to(dtype)
        for n, dtype in enumerate(DTYPES)
    } | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}


def moved(model: dict[str, Tensor], seed: int, share: float = 0.02) -> dict[str, Tensor]:
    """The same with some elements one step of their bits further."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in model.items():
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = tensor.clone().reshape(-1).view(word)
        bits[torch.rand(bits.shape, generator=generator) < share] += 1
        found[name] = bits.view(tensor.dtype).reshape(tensor.shape)
    return found


def publish(
    folder: Path, version: int, model: dict[str, Tensor], *, max_bucket_bytes: int = 20_000, keep: int = 100
) -> Written:
    """Version ``version`` under ``folder``, in several files."""
    source = folder / "source"
    source.mkdir(exist_ok=True, parents=True)
    (source / "config.json").write_text('{"model_type": "tiny"}')
    return write_weights(model, source, folder / "weights", version, max_bucket_bytes=max_bucket_bytes, keep=keep)
