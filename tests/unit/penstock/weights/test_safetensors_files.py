"""What safetensors files say of their tensors is compared with what torch says of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.weights.index import DTYPE_BYTES
from penstock.weights.safetensors_files import as_safetensors, read_header


@pytest.mark.parametrize("name", sorted(DTYPE_BYTES))
def test_every_dtype_that_can_be_published_is_found_again_in_its_file(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    save_file({"x": torch.zeros(3, dtype=dtype)}, tmp_path / "model.safetensors")

    assert read_header(tmp_path / "model.safetensors") == {"x": (as_safetensors(dtype), (3,))}
