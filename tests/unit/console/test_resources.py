"""The table of resources: what it names exists, and a value is shown whatever it is."""

from pkgutil import resolve_name
from typing import Any

import pytest

from penstock.console import resources
from penstock.console.details import detail_lines
from penstock.console.resources import LISTS, RESOURCES, Column, Resource

EVERY = [one for one in vars(resources).values() if isinstance(one, Resource)]
#: Kinds that are shown as they are.
PLAIN = {"text", "number", "state"}


@pytest.mark.parametrize("resource", EVERY, ids=lambda one: one.title)
def test_each_column_has_a_meaning_and_a_known_kind(resource: Resource) -> None:
    for column in resource.columns:
        assert column.meaning
        assert column.kind in PLAIN | resources._FORMATS.keys(), column
    assert len({column.name for column in resource.columns}) == len(resource.columns)
    assert set(resource.key) <= set(resource.fields)
    assert all(column.name in resource.meanings() for column in resource.columns)


@pytest.mark.parametrize("name", {**RESOURCES, **LISTS})
def test_readers_exist(name: str) -> None:
    resource = LISTS[name]
    for path in filter(None, (resource.read, resource.one, resource.also)):
        assert resolve_name(f"penstock.{path}") is not None


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("text", ["a", "b"], "a, b"),
        ("text", {"stale": 3, "filtered": 1}, "stale 3, filtered 1"),
        ("text", None, ""),
        ("text", True, "yes"),
        ("number", 0.12345, "0.123"),
        ("share", 0.5126, "51.3%"),
        ("seconds", 0.44, "0.4 s"),
        ("seconds", 119.6, "2 min"),
        ("seconds", 4000, "67 min"),
        ("seconds", 8000, "2 h 13 min"),
        ("seconds", float("nan"), "nan"),
        ("rate", 6.41e-9, "0.0"),
        ("bytes", 2_500_000_000, "2.5 GB"),
        ("clock_ms", 1_000, "1970-01-01T00:00:01Z"),
        ("last_line", "Traceback\n  line\nValueError: 42\n\n", "ValueError: 42"),
        ("by_k", {"1": 0.5, "4": 1.0}, "1: 0.5, 4: 1"),
        ("gpus", [{"use": -1.0, "used_bytes": 1e9, "size_bytes": 2e9}], "1.0 GB of 2.0 GB"),
        ("seconds", "not a number", "not a number"),
        ("gpus", 7, "7"),
    ],
)
def test_values_are_text(kind: str, value: Any, text: str) -> None:
    assert Column("x", kind, "", True).cell({"x": value}) == text


def test_details_are_lines_with_nested_values_below() -> None:
    details = {
        "job": "d/0/1",
        "state": "",
        "worker": None,
        "buried_ms": 1_000,
        "detail": "Traceback\nValueError: 42\n",
        "record": {"prompt": "p1", "sampling": {"temperature": 1.0}},
        "samples": [{"k": 0, "reward": 1.5, "extra": 1}, {"unreadable": "sample 1 cannot be read"}],
        "ended_s": 1_700_000_000.25,
    }
    assert list(detail_lines(details, RESOURCES["dead"])) == [
        "job: d/0/1",
        "buried_ms: 1970-01-01T00:00:01Z",
        "detail:",
        "  Traceback",
        "  ValueError: 42",
        "record:",
        "  prompt: p1",
        "  sampling:",
        "    temperature: 1",
        "samples:",
        "  k  reward",
        "  0  1.5",
        "  sample 1 cannot be read",
        "ended_s: 2023-11-14T22:13:20.250Z",
    ]
