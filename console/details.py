"""Format one resource in detail, as lines of text."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.console.resources import Resource, text_of
from penstock.console.terminal import aligned

#: Columns of nested tables, as far as their rows have them; of other tables all fields are shown.
_NESTED: Mapping[str, Sequence[str]] = {
    "samples": (
        *("id", "k", "try", "status", "reward", "length", "num_generated", "oldest", "newest", "worker", "server"),
        *("fate", "reason", "longest"),
    ),
    "jobs": (
        *("job", "state", "lane", "committed", "n", "samples", "reward_mean", "oldest", "newest", "min_version"),
        *("version", "attempts", "tries", "crashes", "took_s", "worker", "workers", "fate"),
    ),
    "events": ("after_s", "event", "who", "what"),
    "waits": ("who", "since_s", "what"),
}
#: A number of seconds between these is a time: 1973 to 2286.
_TIME_S, _MOST_S = 1e8, 1e10


def detail_lines(details: Mapping[str, Any], resource: Resource | None = None, indent: str = "") -> Iterator[str]:
    """Yield the lines of ``details``: a line per value, texts of several lines and nested values indented below."""
    known = {one.name: one for one in resource.columns} if resource else {}
    for name, value in details.items():
        if value is None or (isinstance(value, str | list | tuple | dict) and not value):
            continue
        if isinstance(value, list) and isinstance(value[0], Mapping):
            yield f"{indent}{name}:"
            yield from (f"{indent}  {line}" for line in _table(name, value))
        elif isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from detail_lines(value, None, f"{indent}  ")
        elif isinstance(value, str) and "\n" in value.strip():
            yield f"{indent}{name}:"
            yield from (f"{indent}  {line}" for line in value.strip().splitlines())
        elif not isinstance(value, str) or value.strip():
            is_cell = name in known and known[name].kind not in ("last_line", "excerpt")
            yield f"{indent}{name}: {known[name].cell(details) if is_cell else _text(name, value)}"


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    readable = [row for row in rows if "unreadable" not in row]
    fields = dict.fromkeys(field for row in readable for field in row)
    columns = [field for field in _NESTED.get(name, fields) if field in fields]
    if readable:
        yield from aligned([{field: _text(field, row.get(field)) for field in columns} for row in readable], columns)
    yield from (str(row["unreadable"]) for row in rows if "unreadable" in row)


def _text(name: str, value: Any) -> str:
    if (name == "at" or name.endswith("_s")) and isinstance(value, int | float) and _TIME_S < value < _MOST_S:
        return datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if name in ("version", "oldest", "newest", "staleness") and value == -1:
        return ""  # none
    return "" if value is None else text_of(value)
