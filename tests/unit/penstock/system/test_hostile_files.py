"""Whatever stands in a small file of a run, a model or its weights is read, or refused by penstock's own error."""

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import DatasetConfig
from penstock.consumers.grpo.rows import _read as read_rows
from penstock.history.eval_rows import read_rows as read_evaluations
from penstock.model.folder import count_experts, read_config, read_eos_token_ids, read_vocab_size
from penstock.producer.dataset import Dataset
from penstock.redis.server import ADDRESS_FILE, read_addresses
from penstock.system.run_folder import RunFolder
from penstock.weights.index import INDEX_FILE, WeightsIndex, digest, read_index
from penstock.weights.safetensors_files import read_header
from tests.hostile import SAME, is_read_or_refused, json_near, packed_near

TENSORS = {"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
INDEX = {
    "tensors": [["w", "float32", [2, 3], "w.safetensors"]],
    "files": {"w.safetensors": 7},
    "sizes": {"w.safetensors": 7},
}
RUN = {"state": "running", "started_s": 1.0, "active_s": 2, "reason": "x"}
MODEL = {"eos_token_id": [1, 2], "vocab_size": 8, "text_config": {"vocab_size": 8}, "num_experts": 4}


def model_of(folder: Path) -> None:
    read_eos_token_ids(folder)
    read_vocab_size(folder)
    count_experts(read_config(folder))


def lines_of(folder: Path) -> list[Any]:
    return list(Dataset(DatasetConfig(name="d", path=str(folder / "d.jsonl"))))


#: File -> what reads it in its folder, and what may stand there.
FILES: dict[str, tuple[Callable[[Path], object], Any]] = {
    "run.json": (lambda folder: RunFolder(folder).record(), RUN),
    ADDRESS_FILE: (read_addresses, {"url": "redis://h", "payload_servers": {"a": "redis://h"}}),
    "config.json": (model_of, MODEL),
    "steps.jsonl": (lambda folder: read_rows(folder / "steps.jsonl", {"step": (int, float)}), {"step": 1}),
    "eval.jsonl": (lambda folder: read_evaluations(folder / "eval.jsonl"), {"step": 1}),
    "d.jsonl": (lines_of, {"prompt": "a", "label": [1, {"x": None}]}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_or_refused(name: str) -> None:
    read, good = FILES[name]

    @SAME
    @given(data=json_near(good))
    def holds(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, name).write_bytes(data)
            is_read_or_refused(read, Path(folder))

    holds()


@SAME
@given(header=json_near(TENSORS), lie=st.sampled_from([0, 0, 0, 1, -1, 2**62]), body=st.sampled_from([24, 24, 0, 25]))
def test_a_safetensors_file_is_read_or_refused(header: bytes, lie: int, body: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "w.safetensors")
        path.write_bytes(struct.pack("<Q", max(0, len(header) + lie)) + header + bytes(body))
        is_read_or_refused(read_header, path)


@SAME
@given(data=packed_near(INDEX))
def test_an_index_is_read_or_refused(data: bytes) -> None:
    def read(folder: Path) -> int:
        entries = read_index(folder, digest(data)).entries()
        return sum(entry.num_bytes for entry in entries)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, INDEX_FILE).write_bytes(data)
        is_read_or_refused(read, Path(folder))
    is_read_or_refused(WeightsIndex.from_bytes, data)
