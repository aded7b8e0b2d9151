"""Rows of a table that Python cannot hold."""

from typing import Any

import pytest

from producer.sources.arrow_rows import ArrowRows
from producer.sources.rows import BadLine
from tests.missing import module

FAR = 2**60


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
        "ns": arrow.timestamp("ns"),
    }
    return arrow.array([FAR + 1 if kind == "ns" else FAR], types[kind])


@pytest.mark.parametrize("kind", ["text", "day", "second", "span", "ns"])
def test_what_python_cannot_hold_is_a_bad_line_by_its_number(kind: str) -> None:
    table = module("pyarrow").table({"prompt": values(kind)})
    with pytest.raises(BadLine, match="dataset d, line 1: it cannot be read"):
        ArrowRows(table, "dataset d", "digest").row(0)
