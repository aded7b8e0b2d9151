"""Rows that Hugging Face datasets reads, of folders on this machine."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config import DatasetConfig
from penstock.config.reading.dataset_path import anchored
from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from tests.missing import module

ROWS = [{"prompt": f"p{i}", "label": str(i)} for i in range(5)]


def dataset(path: Path, suffix: str = "", **keys: Any) -> Dataset:
    return Dataset(DatasetConfig(name="d", path=f"hf:{path}{suffix}", **keys))


def test_a_saved_dataset_is_read_by_its_rows(tmp_path: Path) -> None:
    datasets = module("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a")
    found = dataset(tmp_path / "a", "@[1:3]")
    assert [(one.index, one.text, one.label) for one in found] == [(1, "p1", "1"), (2, "p2", "2")]
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "b")
    datasets.Dataset.from_list(ROWS[:4] + ROWS[:1]).save_to_disk(tmp_path / "c")
    same, other = dataset(tmp_path / "b").rows.digest(), dataset(tmp_path / "c").rows.digest()
    assert found.rows.digest() == same != other


def test_of_several_splits_one_is_named(tmp_path: Path) -> None:
    datasets = module("datasets")
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    assert len(dataset(tmp_path, split="test")) == 2
    for split in (None, "other"):
        with pytest.raises(ConfigError, match=f"split is {split}, but it has test, train: set split"):
            dataset(tmp_path, split=split)


def test_a_folder_of_parquet_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = module("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    assert [one.text for one in dataset(tmp_path / "data")] == [row["prompt"] for row in ROWS]


def test_a_damaged_folder_is_a_sentence_and_no_signal(tmp_path: Path) -> None:
    """Where a text ends says that it ends far behind the file."""
    pa, datasets = module("pyarrow"), module("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "d")
    (file,) = (tmp_path / "d").glob("*.arrow")
    ends = pa.array([row["prompt"] for row in ROWS]).buffers()[1].to_pybytes()[: 4 * len(ROWS) + 4]
    whole = file.read_bytes()
    assert whole.count(ends) == 1
    file.write_bytes(whole.replace(ends, ends[:8] + b"\0\0\0\x70" + ends[12:]))
    with pytest.raises(ConfigError, match=f"dataset d: {tmp_path}/d is damaged .*: save or download it again"):
        dataset(tmp_path / "d")


def test_a_folder_whose_file_was_cut_is_a_sentence(tmp_path: Path) -> None:
    datasets = module("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "d")
    (file,) = (tmp_path / "d").glob("*.arrow")
    whole = file.read_bytes()
    for length in range(0, len(whole) - 8, 64):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="dataset d"):
            list(dataset(tmp_path / "d"))


def test_a_folder_is_made_absolute_and_a_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert anchored("hf:here@[:2]", tmp_path) == f"hf:{tmp_path}/here@[:2]"
    assert anchored("hf:owner/name", tmp_path) == "hf:owner/name"
    assert anchored("python:module:Class", tmp_path) == "python:module:Class"
    assert anchored("d.jsonl", tmp_path) == f"{tmp_path}/d.jsonl"
