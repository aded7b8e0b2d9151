"""Rows of a table: what Python cannot hold, and what it holds less exactly."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import ArrowRows
from penstock.producer.sources.rows import BadLine
from tests.missing import module

FAR = 2**60


def rows(table: Any, **keys: Any) -> ArrowRows:
    return ArrowRows(table, DatasetConfig(name="d", path="d.parquet", **keys), "digest")


def values(kind: str) -> Any:
    """One value of a column that no object of Python's stands for."""
    arrow = module("pyarrow")
    if kind == "text":
        end, data = (1).to_bytes(4, "little"), b"\xff"
        return arrow.Array.from_buffers(
            arrow.string(), 1, [None, arrow.py_buffer(bytes(4) + end), arrow.py_buffer(data)]
        )
    types = {
        "day": arrow.date64(),
        "second": arrow.timestamp("s"),
        "span": arrow.duration("ms"),
    }
    return arrow.array([FAR], types[kind])


@pytest.mark.parametrize("kind", ["text", "day", "second", "span"])
def test_what_python_cannot_hold_is_a_bad_line_by_its_number(kind: str) -> None:
    table = module("pyarrow").table({"prompt": values(kind)})
    with pytest.raises(BadLine, match="dataset d, line 1: column 'prompt' cannot be read"):
        rows(table).row(0)


def test_times_are_pythons_own_whether_pandas_is_installed_or_not() -> None:
    arrow = module("pyarrow")
    time, span = arrow.timestamp("ns"), arrow.duration("ns")
    nested = arrow.list_(arrow.struct([("at", time)]))
    columns = {"at": ([1_001], time), "for": ([2_001], span), "in": ([[{"at": 3_001}]], nested), "no": ([None], time)}
    table = arrow.table({name: arrow.array(values, kind) for name, (values, kind) in columns.items()})
    row = {name: rows(table, input_key=name).row(0)[name] for name in columns}
    assert row == {
        "at": datetime(1970, 1, 1, microsecond=1),
        "for": timedelta(microseconds=2),
        "in": [{"at": datetime(1970, 1, 1, microsecond=3)}],
        "no": None,
    }
    assert [type(row["at"]), type(row["for"])] == [datetime, timedelta]


def test_columns_that_nobody_asked_for_are_not_read() -> None:
    arrow = module("pyarrow")
    nowhere = arrow.array([0], arrow.timestamp("us", tz="Nowhere/Bad"))
    far = arrow.array([FAR], arrow.duration("ms"))
    table = arrow.table({"prompt": ["p"], "label": ["l"], "about": [{"a": 1}], "nowhere": nowhere, "far": far})
    assert rows(table, metadata_key="about").row(0) == {"prompt": "p", "label": "l", "about": {"a": 1}}
    for name in ("nowhere", "far"):
        with pytest.raises(BadLine, match=f"line 1: column '{name}' cannot be read"):
            rows(table, label_key=name).row(0)


def test_a_column_that_is_there_twice_is_refused_where_it_is_read() -> None:
    arrow = module("pyarrow")
    table = arrow.table([["p"], ["l"], ["m"], ["x"], ["y"]], names=["prompt", "label", "label", "other", "other"])
    with pytest.raises(ConfigError, match=r"dataset d: it has 2 columns named 'label'.*remove all but one"):
        rows(table)
    assert rows(table, label_key=None).row(0) == {"prompt": "p"}


def test_every_column_that_a_dataset_names_is_read() -> None:
    keys = ("input_key", "label_key", "metadata_key", "answer_key", "tools_key", "image_key")
    columns = {f"the {key}": [key] for key in keys}
    config = {key: f"the {key}" for key in keys} | {"apply_chat_template": True}
    assert rows(module("pyarrow").table(columns), **config).row(0) == {f"the {key}": key for key in keys}
