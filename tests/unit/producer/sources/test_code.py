"""Rows of a user's own class."""

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from producer.dataset import Dataset

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
        ("Squares.row", "could not be made"),
    ],
)
def test_a_class_that_is_no_source_is_told(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"dataset d.*{says}"):
        dataset(name)


@pytest.mark.parametrize(("name", "says"), [("Raises", "raised SystemExit: row 1"), ("Listed", "gave list, which")])
def test_what_the_code_does_wrong_ends_the_producer_even_where_bad_lines_do_not(name: str, says: str) -> None:
    made = dataset(name, on_bad_line="skip")
    with pytest.raises(ConfigError, match=says):
        made.take(1)


def test_keys_of_other_sources_are_refused() -> None:
    for keys, says in (
        ({"path": "d", "source_args": {"a": 1}}, "remove them"),
        ({"path": "d", "split": "train"}, "remove it"),
        ({"path": "python:x"}, "names no class"),
        ({"path": "hf:"}, "names no folder"),
    ):
        with pytest.raises(ValidationError, match=says):
            DatasetConfig(name="d", **keys)
