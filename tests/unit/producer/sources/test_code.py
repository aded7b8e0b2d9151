"""Rows of a user's own class."""

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.mixture import mixture_of
from penstock.producer.sources.rows import BadLine

HERE = f"python:{__name__}"


class Squares:
    """A source as users write them."""

    def __init__(self, count: int = 3) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def row(self, index: int) -> dict[str, Any]:
        return {"prompt": f"{index} squared", "label": str(index**2)}


class Raises(Squares):
    def row(self, index: int) -> dict[str, Any]:
        raise SystemExit(f"row {index}")


class Listed(Squares):
    def row(self, index: int) -> dict[str, Any]:
        return [index]  # type: ignore[return-value]


class Map(dict[str, Any]):
    """A map of its own type."""

    def __contains__(self, key: object) -> bool:
        raise RuntimeError("contains")

    def get(self, key: str, default: Any = None) -> Any:
        raise RuntimeError("get")


class Strange(Squares):
    """Rows that JSON cannot hold, or that are not given, by the name of what is wrong with them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def row(self, index: int) -> dict[str, Any]:
        row: dict[Any, Any] = super().row(index)
        match self.what:
            case "mixed keys":
                row[1] = 2
            case "a tuple as key":
                row["more"] = {(1, 2): 3}
            case "mixed keys below":
                row["more"] = {"a": 1, 2: 3}
            case "itself":
                row["more"] = row
            case "depth":
                for _ in range(100_000):
                    row["more"] = [row.get("more")]
            case "digits":
                row["label"] = 10**5000
            case "cancelled":
                raise asyncio.CancelledError
            case "its own map":
                return Map(row)
        return row


class Endless(Squares):
    def __len__(self) -> int:
        return 2**62


class Cancelled(Squares):
    def __len__(self) -> int:
        raise asyncio.CancelledError


class Rowless:
    def __len__(self) -> int:
        return 1


def dataset(name: str, **keys: Any) -> Dataset:
    return Dataset(DatasetConfig(name="d", path=f"{HERE}:{name}", **keys))


def test_rows_of_a_class_become_jobs_that_name_the_dataset_alone() -> None:
    made = dataset("Squares@[1:]", source_args={"count": 5})
    assert [(one.index, one.text, one.label) for one in made][-1] == (4, "4 squared", "16")
    job = made.job(made[0], 2, n=1, lane="train", sampling={})
    assert job.id == "d/2/1"
    assert __name__.encode() not in job.to_bytes()


def test_other_rows_have_another_digest() -> None:
    digests = [dataset("Squares", source_args={"count": count}).rows.digest() for count in (3, 4, 3)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Absent", "cannot be imported"),
        ("Rowless", r"has no method row\(index\)"),
        ("Squares.row", "when it was created"),
    ],
)
def test_a_class_that_is_no_source_is_told(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"dataset d.*{says}"):
        dataset(name)


@pytest.mark.parametrize(
    ("name", "says"), [("Raises", "raised SystemExit: row 1"), ("Listed", "returned list, not a map")]
)
def test_what_the_code_does_wrong_ends_the_producer_even_where_bad_lines_do_not(name: str, says: str) -> None:
    made = dataset(name, on_bad_line="skip")
    with pytest.raises(ConfigError, match=says):
        made.take(1)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("mixed keys", r"row\(0\) has a column name that is not text: 1; rename it"),
        ("a tuple as key", r"row\(0\) has a value that JSON cannot represent \(TypeError: .*\): use text, numbers"),
        ("mixed keys below", r"row\(0\) has a value that JSON cannot represent \(TypeError: .*\): use text, numbers"),
        ("itself", r"row\(0\) has a value that JSON cannot represent \(ValueError: .*\): use text, numbers"),
        ("depth", r"row\(0\) has a value that JSON cannot represent \(RecursionError: .*\): use text, numbers"),
        ("digits", r"row\(0\) has a value that JSON cannot represent \(ValueError: .*\): use text, numbers"),
        ("cancelled", r"row\(0\) raised CancelledError"),
    ],
)
def test_rows_that_json_cannot_hold_are_a_sentence_that_names_them(what: str, says: str) -> None:
    made = dataset("Strange", source_args={"what": what})
    with pytest.raises(ConfigError, match=f"dataset d: {__name__}:Strange: {says}"):
        made.rows.digest()


@pytest.mark.parametrize("what", ["itself", "depth", "digits"])
def test_a_label_that_json_cannot_hold_is_a_bad_line(what: str) -> None:
    key = "label" if what == "digits" else "more"
    made = dataset("Strange", source_args={"what": what}, label_key=key)
    with pytest.raises(BadLine, match="dataset d, line 2: "):
        made[1]


def test_a_map_of_its_own_type_is_read_as_a_map() -> None:
    made = dataset("Strange", source_args={"what": "its own map"})
    assert made[1].label == "1"
    assert made.rows.digest() == dataset("Squares").rows.digest()


def test_a_length_beyond_memory_is_a_sentence_where_it_is_shuffled() -> None:
    for keys in ({}, {"weight": 1.0}):
        with pytest.raises(ConfigError, match=r"data.train has 4,611,686,018,427,387,904 lines.*use a slice"):
            mixture_of([dataset("Endless", **keys)], 0).at(0)
        assert mixture_of([dataset("Endless", shuffle=False, **keys)], 0).at(2**61)[2].index == 2**61
    with pytest.raises(ConfigError, match=r"raised CancelledError.* when it was created"):
        dataset("Cancelled")


def test_keys_of_other_sources_are_refused() -> None:
    for keys, says in (
        ({"path": "d", "source_args": {"a": 1}}, "source_args requires a class"),
        ({"path": "d", "split": "train"}, "remove"),
        ({"path": "python:x"}, "does not name a class"),
        ({"path": "hf:"}, "does not name a folder"),
    ):
        with pytest.raises(ValidationError, match=says):
            DatasetConfig(name="d", **keys)
