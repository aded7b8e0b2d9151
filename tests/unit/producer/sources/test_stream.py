"""Streams of Hugging Face datasets: a position means the same prompt for everybody, and the end is found by reading."""

import gzip
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config import DatasetConfig
from penstock.config.data import DataConfig
from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.main import fingerprint
from penstock.producer.mixture import Mixture, mixture_of
from penstock.producer.sources.stream import Stream
from tests.missing import module
from tests.unit.producer.making import made

SHARDS = [7, 1, 0, 12, 3]
NUM = sum(SHARDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards of JSON lines, of uneven sizes."""
    monkeypatch.setattr(module("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "data"
    data.mkdir()
    first = 0
    for number, size in enumerate(SHARDS):
        rows = [{"prompt": f"p{i}", "label": str(i)} for i in range(first, first + size)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (data / f"train-{number:05}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        first += size
    return data


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.producer.sources.hub.STREAM_WINDOW", 4)


def stream(path: Path, suffix: str = "", **keys: Any) -> Dataset:
    keys = {"shuffle": False, "name": "d", **keys}
    return Dataset(DatasetConfig(path=f"hf:{path}{suffix}", streaming=True, **keys))


def found(source: Mixture, positions: Any) -> list[tuple[int, str | None]]:
    return [(epoch, prompt.text) for _, epoch, prompt in map(source.at, positions)]


def test_rows_come_in_the_order_of_the_shards_and_their_end_is_found_by_reading(folder: Path) -> None:
    dataset = stream(folder)
    source = mixture_of([dataset], 0)
    assert source.num_lines is None
    with pytest.raises(ConfigError, match="dataset d is a stream, whose length is unknown before its end"):
        len(dataset)
    assert found(source, range(NUM + 2)) == [*((0, f"p{i}") for i in range(NUM)), (1, "p0"), (1, "p1")]
    assert source.num_lines == len(dataset) == NUM


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_position_means_the_same_prompt_whoever_asks_in_whatever_order(folder: Path, shuffle: bool) -> None:
    """A producer that starts again, one that goes back, and one beside it."""
    wanted = found(mixture_of([stream(folder, shuffle=shuffle)], 3), range(3 * NUM))
    positions = random.Random(1).choices(range(3 * NUM), k=60)
    another = mixture_of([stream(folder, shuffle=shuffle)], 3)
    for position in positions:
        assert found(another, [position]) == [wanted[position]]
    for position in (NUM, 2 * NUM + 5, NUM - 1):
        assert found(mixture_of([stream(folder, shuffle=shuffle)], 3), [position]) == [wanted[position]]
    assert [Counter(text for e, text in wanted if e == epoch) for epoch in range(3)] == [
        Counter(f"p{i}" for i in range(NUM))
    ] * 3


def test_a_stream_is_shuffled_within_its_windows_by_seed_and_epoch(folder: Path) -> None:
    def epochs(seed: int) -> list[list[int]]:
        texts = [text for _, text in found(mixture_of([stream(folder, shuffle=True)], seed), range(2 * NUM))]
        lines = [int((text or "").removeprefix("p")) for text in texts]
        return [lines[:NUM], lines[NUM:]]

    first, second = epochs(1)
    for epoch in (first, second):
        for begin in range(0, NUM, 4):
            assert sorted(epoch[begin : begin + 4]) == list(range(begin, min(begin + 4, NUM)))
    assert first != second
    assert first != list(range(NUM))
    assert epochs(1) == [first, second] != epochs(2)


@pytest.mark.parametrize(
    ("suffix", "lines"),
    [("@[3:]", range(3, NUM)), ("@[3:10]", range(3, 10)), ("@[:8]", range(8)), (f"@[5:{NUM + 50}]", range(5, NUM))],
)
def test_a_slice_of_a_stream_ends_where_it_says_or_with_the_stream(folder: Path, suffix: str, lines: range) -> None:
    for shuffle in (False, True):
        source = mixture_of([stream(folder, suffix, shuffle=shuffle)], 0)
        jobs = [(epoch, prompt.index, prompt.text) for _, epoch, prompt in map(source.at, range(2 * len(lines)))]
        assert sorted(jobs) == [(epoch, i, f"p{i}") for epoch in (0, 1) for i in lines]
        assert source.num_lines == len(lines)
        late = mixture_of([stream(folder, suffix, shuffle=shuffle)], 0)
        assert late.place(2 * len(lines) - 1)[1:] == source.place(2 * len(lines) - 1)[1:]
    with pytest.raises(ConfigError, match="has no prompts"):
        stream(folder, f"@[{NUM}:]")


def test_streams_take_turns_with_other_datasets_each_with_epochs_of_its_own(folder: Path, tmp_path: Path) -> None:
    def make() -> Mixture:
        other = made(tmp_path, [{"prompt": f"q{i}"} for i in range(5)], "other", weight=1, shuffle=False)
        return mixture_of([stream(folder, weight=3), other], 0)

    source = make()
    jobs = found(source, range(4 * NUM))
    assert [one for one in jobs if one[1] and one[1][0] == "p"] == [divmod_of(k, NUM, "p") for k in range(3 * NUM)]
    assert [one for one in jobs if one[1] and one[1][0] == "q"] == [divmod_of(k, 5, "q") for k in range(NUM)]
    late = make()
    assert found(late, [4 * NUM - 1, 7]) == [jobs[-1], jobs[7]]


def divmod_of(k: int, size: int, letter: str) -> tuple[int, str]:
    epoch, line = divmod(k, size)
    return epoch, f"{letter}{line}"


def test_whoever_is_told_where_a_stream_ends_need_not_read_it_to_know(folder: Path) -> None:
    dataset = stream(folder)
    dataset.ends_after(NUM)
    opened: list[int] = []
    assert dataset.stream is not None
    watch(dataset.stream, opened)
    assert found(mixture_of([dataset], 0), [7 * NUM + 9]) == [(7, "p9")]
    assert opened == [8]


def watch(stream: Stream, opened: list[int]) -> None:
    before = stream._open

    def open_(first: int, num_rows: int) -> Any:
        opened.append(first)
        return before(first, num_rows)

    stream._open = open_


def test_reading_on_opens_the_files_once(folder: Path) -> None:
    dataset = stream(folder)
    opened: list[int] = []
    assert dataset.stream is not None
    watch(dataset.stream, opened)
    for first in range(0, NUM, 2):
        # As the producer does while the gate is closed: the same ones are offered, again and again.
        assert [dataset.take(line) for line in range(first, min(first + 6, NUM))]
    assert opened == []


def test_a_line_that_cannot_be_used_keeps_its_position(tmp_path: Path, folder: Path) -> None:
    (folder / "train-00002.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": null, "label": "x"}\n'))
    source = mixture_of([stream(folder, on_bad_line="skip")], 0)
    taken = [source.datasets[0].take(source.place(position)[2]) for position in range(NUM + 1)]
    assert [at for at, one in enumerate(taken) if isinstance(one, str)] == [8]
    with pytest.raises(ConfigError, match="dataset d, line 9: "):
        mixture_of([stream(folder)], 0).at(8)


def test_saved_datasets_and_their_splits_stream_too(tmp_path: Path) -> None:
    datasets = module("datasets")
    rows = [{"prompt": f"p{i}", "label": str(i)} for i in range(NUM)]
    whole = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"a": whole, "b": whole.select(range(5))}).save_to_disk(tmp_path / "two")
    source = mixture_of([stream(tmp_path / "two", split="b")], 0)
    assert found(source, range(6)) == [*((0, f"p{i}") for i in range(5)), (1, "p0")]
    assert len(found(mixture_of([stream(tmp_path / "two", split="a")], 0), range(NUM))) == NUM
    for split in (None, "other"):
        with pytest.raises(ConfigError, match=f"split is {split}, but it has a, b: set split"):
            stream(tmp_path / "two", split=split)


def test_splits_of_a_folder_of_files_stream(folder: Path) -> None:
    (folder / "test-00000.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "t", "label": "t"}\n'))
    assert found(mixture_of([stream(folder, split="test")], 0), range(2)) == [(0, "t"), (1, "t")]
    assert found(mixture_of([stream(folder, split="train")], 0), [NUM]) == [(1, "p0")]
    with pytest.raises(ConfigError, match="split is None, but it has test, train: set split"):
        stream(folder)


def test_other_files_or_another_order_are_another_source(folder: Path, tmp_path: Path) -> None:
    def told(**keys: Any) -> str:
        return fingerprint(mixture_of([stream(folder, **keys)], 0))

    first = told()
    assert told() == first
    assert len({first, told(shuffle=True), told(weight=2)}) == 3

    def beside(**keys: Any) -> str:
        other = made(tmp_path, [{"prompt": "q"}], "other", weight=1)
        return fingerprint(mixture_of([stream(folder, weight=1, **keys), other], 0))

    assert len({beside(), beside(shuffle=True)}) == 2
    os.utime(folder / "train-00000.jsonl.gz", (1, 1))
    assert told() == first, "a file that was only copied is the same"
    (folder / "train-00004.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "new", "label": ""}\n'))
    assert told() != first


def test_a_file_that_is_changed_while_it_is_read_ends_the_producer(folder: Path) -> None:
    dataset = stream(folder)
    last = folder / "train-00004.jsonl.gz"
    last.write_bytes(last.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match="dataset d: its files changed while being read"):
        dataset.take(5)


def test_a_shard_that_is_damaged_is_a_sentence(folder: Path) -> None:
    (folder / "train-00003.jsonl.gz").write_bytes(b"not gzip")
    source = mixture_of([stream(folder)], 0)
    assert found(source, range(8)) == [(0, f"p{i}") for i in range(8)]
    for _ in range(2):
        with pytest.raises(ConfigError, match="dataset d cannot be read from row 8 on"):
            source.at(8)


def test_a_damaged_saved_folder_is_a_sentence_and_no_signal(tmp_path: Path) -> None:
    """Where a text ends says that it ends far behind the file."""
    pa, datasets = module("pyarrow"), module("datasets")
    rows = [{"prompt": f"p{i}", "label": str(i)} for i in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    (file,) = (tmp_path / "d").glob("*.arrow")
    ends = pa.array([row["prompt"] for row in rows]).buffers()[1].to_pybytes()[:24]
    whole = file.read_bytes()
    file.write_bytes(whole.replace(ends, ends[:8] + b"\0\0\0\x70" + ends[12:]))
    with pytest.raises(ConfigError, match="dataset d cannot be read from row 0 on"):
        stream(tmp_path / "d")


def test_what_no_stream_can_do_is_refused_by_the_configuration(tmp_path: Path) -> None:
    def data(**sections: Any) -> None:
        DataConfig.model_validate(sections)

    one = {"name": "s", "path": "hf:folder", "streaming": True}
    other = {"name": "o", "path": "o.jsonl"}
    data(train=[one], epochs=2)
    data(train=[{**one, "weight": 1}, {**other, "weight": 1}])
    for words, sections in {
        "give each dataset a weight": {"train": [one, other]},
        "remove it .trainer.steps ends a run": {
            "train": [{**one, "weight": 1}, {**other, "weight": 1}],
            "epochs": 1,
        },
        "is always read completely: remove its streaming": {"train": [other], "eval": [one]},
        "streaming requires a Hugging Face dataset": {"train": [{**other, "streaming": True}]},
    }.items():
        with pytest.raises(ValidationError, match=words):
            data(**sections)
