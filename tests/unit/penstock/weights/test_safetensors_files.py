"""What safetensors files say of their tensors is compared with what torch says of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.errors import PublishError
from penstock.weights.index import DTYPE_BYTES
from penstock.weights.safetensors_files import as_safetensors, read_folder, read_header


@pytest.mark.parametrize("name", sorted(DTYPE_BYTES))
def test_every_dtype_that_can_be_published_is_found_again_in_its_file(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    save_file({"x": torch.zeros(3, dtype=dtype)}, tmp_path / "model.safetensors")

    assert read_header(tmp_path / "model.safetensors") == {"x": (as_safetensors(dtype), (3,))}


BYTES = {"dtype": "U8", "shape": [4]}


@pytest.mark.parametrize(
    "spans",
    [[(0, 4), (4, 8)], [(4, 8), (0, 4)], [(0, 4), (0, 4)], [(1, 5), (5, 9)], [(0, 4), (5, 9)], [(0, 5), (4, 8)]],
    ids=["end to end", "in any order", "over each other", "not from the start", "with a hole", "overlapping"],
)
def test_tensors_lie_as_the_format_has_them(spans: list[tuple[int, int]], tmp_path: Path) -> None:
    path = write(tmp_path, {f"w{n}": BYTES | {"data_offsets": span} for n, span in enumerate(spans)})
    try:
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
    except SafetensorError:
        with pytest.raises(PublishError, match=r"model\.safetensors (is not a whole safetensors file|has \d+ bytes)"):
            read_header(path)
    else:
        assert read_header(path).keys() == names


def test_a_header_longer_than_its_room_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, {"w": BYTES | {"data_offsets": (0, 4)}, "__metadata__": {"x": "y" * 100_000}})
    assert read_folder(tmp_path) == read_folder(tmp_path, {path.name: 200_000}) == {"w": ("U8", (4,))}
    monkeypatch.setattr(json, "loads", None)
    for rooms in ({path.name: 90_000}, {}):
        with pytest.raises(PublishError, match=r"a header of 100\d\d\d bytes in a file of"):
            read_folder(tmp_path, rooms)


def write(folder: Path, header: dict[str, Any]) -> Path:
    text = json.dumps(header).encode()
    end = max(one["data_offsets"][1] for one in header.values() if "data_offsets" in one)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return folder / "model.safetensors"
