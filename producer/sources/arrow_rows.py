"""Rows of an Arrow table, one at a time."""

from typing import Any

from producer.sources.rows import BadLine


class ArrowRows:
    """Rows of a table, most of which may be a file mapped into memory.

    Times lose what is below a microsecond, for which Python's have no room.

    Args:
        table: a ``pyarrow.Table``.
        where: of whom errors speak.
        digest: of the table's content.
    """

    def __init__(self, table: Any, where: str, digest: str) -> None:
        self._table, self._where, self._digest = table, where, digest
        held = _held_schema(table.schema)
        self._cast_to = None if held.equals(table.schema) else held
        self.num_bytes = int(table.nbytes)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def digest(self) -> str:
        return self._digest

    def row(self, index: int) -> dict[str, Any]:
        try:
            (row,) = self._of(index).to_pylist()
        except (ValueError, OverflowError) as exc:  # text that is not UTF-8, times that Python's have no room for
            raise BadLine(f"{self._where}, line {index + 1}: it cannot be read ({exc}).") from exc
        return dict(row)

    def _of(self, index: int) -> Any:
        row = self._table.slice(index, 1)
        return row if self._cast_to is None else row.cast(self._cast_to, safe=False)


def _held_schema(schema: Any) -> Any:
    """``schema``, with microseconds in place of nanoseconds.

    What pyarrow makes of nanoseconds depends on whether pandas is installed: its own types, or an error.
    """
    import pyarrow as pa

    return pa.schema([_held_field(field) for field in schema])


def _held_field(field: Any) -> Any:
    return field.with_type(_held_type(field.type))


def _held_type(kind: Any) -> Any:
    import pyarrow as pa
    from pyarrow import types

    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_struct(kind):
        return pa.struct([_held_field(field) for field in kind])
    return pa.list_(_held_field(kind.value_field)) if types.is_list(kind) else kind
