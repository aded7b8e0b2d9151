"""Shares of a copy: what a server reads is what was copied, all of it is somebody's, and nothing beside it is read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from penstock.consumers.weights.copies import Arena, Copy
from penstock.consumers.weights.publish import write_weights
from penstock.consumers.weights.shared_memory import SharedMemory
from penstock.consumers.weights.sources import as_source
from penstock.consumers.weights.transports import shares

WEIGHTS = {
    "a": torch.arange(12.0).view(3, 4),
    "of.no.axis": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "half": torch.arange(5).to(torch.bfloat16),
    "eight": torch.arange(7).to(torch.float8_e4m3fn),
    "whole": torch.arange(9).to(torch.int64),
}
BUCKET_BYTES = 60


@pytest.fixture
def copy() -> Copy:
    return Arena(SharedMemory()).take(as_source(WEIGHTS), {})


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("num_servers", [1, 2, 7])
def test_servers_read_what_was_copied_each_tensor_once(copy: Copy, num_servers: int) -> None:
    assert copy.memory is not None
    each = shares.put(copy.memory, shares.shares_of(copy, num_servers, BUCKET_BYTES))
    found = [entry for place in each for entry in shares.read(place).items()]
    assert len(each) == num_servers
    assert sorted(name for name, _ in found) == sorted(WEIGHTS)
    for name, tensor in found:
        assert (tensor.dtype, tensor.shape) == (WEIGHTS[name].dtype, WEIGHTS[name].shape)
        assert bits(tensor) == bits(WEIGHTS[name]), name


def test_a_share_has_the_tensors_of_the_servers_files(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    written = write_weights(as_source(WEIGHTS), tmp_path, tmp_path / "weights", 1, max_bucket_bytes=BUCKET_BYTES)
    files = sorted(written.path.glob("*.safetensors"))
    assert len(files) > 2
    of_files = []
    for rank in range(2):
        names: set[str] = set()
        for file in files[rank::2]:
            with safe_open(file, "pt") as opened:
                names.update(opened.keys())
        of_files.append(names)
    assert [{name for name, _ in share} for share in shares.shares_of(copy, 2, BUCKET_BYTES)] == of_files


@pytest.mark.parametrize(
    "entry",
    [
        ["a", "float32", [4], "0"],
        ["a", "float32", [4], -64],
        ["a", "float32", [2**62, 2**62], 0],
        ["a", "float32", [-1], 0],
        ["a", "float32", ["4"], 0],
        ["a", "float32", [1] * 65, 0],
        ["a", "save", [4], 0],
        ["a", 4, [4], 0],
        [4, "float32", [4], 0],
    ],
)
def test_what_no_trainer_says_is_refused(entry: Any) -> None:
    memory = SharedMemory()
    table = json.dumps([entry]).encode()
    with pytest.raises(ValueError, match="no tensor like"):
        shares.read([memory.fd, memory.put(table), len(table)])


def test_nothing_beyond_the_memory_is_read() -> None:
    memory = SharedMemory()
    bound = os.fstat(memory.fd).st_size
    table = json.dumps([["a", "float32", [4], bound - 8]]).encode()
    with pytest.raises(ValueError, match="a is not in the memory"):
        shares.read([memory.fd, memory.put(table), len(table)])
    for start, num_bytes in ((-1, 4), (bound, 4), (0, bound + 1), (0, 0)):
        with pytest.raises(ValueError, match="no table of a share"):
            shares.read([memory.fd, start, num_bytes])
