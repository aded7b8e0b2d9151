"""Rows that cannot be read keep their positions, whatever they come from: broken JSON, broken UTF-8, another type."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import DatasetConfig
from penstock.producer.dataset import Dataset
from penstock.producer.mixture import mixture_of
from penstock.producer.offers import Offers
from penstock.producer.sources.rows import BadLine
from tests.missing import module
from tests.unit.producer.test_offers import CONFIG, HeldOut, names

#: A line that is not JSON, one that is not UTF-8, one that is no map, and one without a prompt, among good ones.
LINES = [
    b'{"prompt": "p0", "label": "0"}',
    b'{"prompt": "p1", "label": "1"',
    '{"prompt": "\N{LATIN SMALL LETTER E WITH ACUTE}\x85", "label": "2"}'.encode(),
    b'{"prompt": "p3\xff", "label": "3"}',
    b"[4]",
    b'{"label": "5"}',
    b'{"prompt": "p6", "label": "6"}',
]
GOOD = [0, 2, 6]
SAYS = [
    "line 2( of .*)? is not JSON in UTF-8",
    "line 4( of .*)? is not JSON in UTF-8",
    "line 5( of .*)? is not a JSON",
]


def lines(folder: Path, name: str, text: bytes = b"\n".join(LINES) + b"\n") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text, mtime=0) if name.endswith(".gz") else text)
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.producer.sources.hub.STREAM_WINDOW", 3)


SOURCES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a file": lambda folder: {"path": str(lines(folder, "d.jsonl"))},
    "a compressed file": lambda folder: {"path": str(lines(folder, "d.jsonl.gz"))},
}


def offered(dataset: Dataset, count: int) -> list[str]:
    offers = Offers(CONFIG, mixture_of([dataset], 0), HeldOut([]))
    return names([offers.at(position) for position in range(count)])


@pytest.mark.parametrize("source", SOURCES)
def test_lines_that_cannot_be_read_are_passed_over_in_their_places(tmp_path: Path, source: str) -> None:
    keys = {"name": "d", "shuffle": False} | SOURCES[source](tmp_path)
    made = Dataset(DatasetConfig(**keys, on_bad_line="skip"))
    epoch = [f"d/0/{at}" if at in GOOD else "-" for at in range(len(LINES))]
    assert offered(made, len(LINES) + 1) == [*epoch, "d/1/0"]
    assert made[2].text == "\N{LATIN SMALL LETTER E WITH ACUTE}\x85"
    strict = Dataset(DatasetConfig(**keys))
    assert strict.take(0) == made.take(0)
    for at, says in zip((1, 3, 4), SAYS, strict=True):
        with pytest.raises(BadLine, match=says):
            strict.take(at)


def broken_text() -> Any:
    pa = module("pyarrow")
    ends = b"".join(end.to_bytes(4, "little") for end in (0, 1, 2, 3))
    return pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(ends), pa.py_buffer(b"a\xffc")])


@pytest.mark.parametrize("form", ["file", "folder", "stream", "saved", "saved stream"])
def test_text_that_is_not_utf8_is_a_row_of_its_own(tmp_path: Path, form: str) -> None:
    pa, datasets = module("pyarrow"), module("datasets")
    module("pyarrow.parquet")
    table = pa.table({"prompt": broken_text(), "label": ["0", "1", "2"]})
    (data := tmp_path / "data").mkdir()
    if form.startswith("saved"):
        datasets.Dataset(table).save_to_disk(data)
    else:
        pa.parquet.write_table(table, data / "train-0.parquet")
    path = f"hf:{data}" if form != "file" else str(data / "train-0.parquet")
    keys = {"name": "d", "path": path, "shuffle": False, "streaming": "stream" in form}
    made = Dataset(DatasetConfig(**keys, on_bad_line="skip"))
    assert offered(made, 4) == ["d/0/0", "-", "d/0/2", "d/1/0"]
    with pytest.raises(BadLine, match="dataset d, line 2: column 'prompt' cannot be read"):
        Dataset(DatasetConfig(**keys)).take(1)


@pytest.mark.parametrize("kind", [7, b"7", {"a": 1}, [["x"]], [1.5], True])
def test_a_prompt_of_parquet_that_is_no_prompt_is_passed_over(tmp_path: Path, kind: Any) -> None:
    pa = module("pyarrow")
    module("pyarrow.parquet")
    pa.parquet.write_table(pa.table({"prompt": pa.array([kind]), "label": ["0"]}), tmp_path / "d.parquet")
    made = Dataset(DatasetConfig(name="d", path=str(tmp_path / "d.parquet"), on_bad_line="skip"))
    assert offered(made, 1) == ["-"]
