"""Rows of an Arrow table, one at a time."""

from collections.abc import Iterable
from typing import Any

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.sources.rows import BadLine
from penstock.text import format_exc


class ArrowRows:
    """Rows of a table that may be a memory-mapped file, with the columns that a dataset names.

    Times are truncated to microseconds, the resolution of Python's.

    Args:
        table: a ``pyarrow.Table``.
        digest: digest of the table's content.
        first: number of the table's first row in the dataset.

    Raises:
        ConfigError: the table has one of these columns twice.
    """

    def __init__(self, table: Any, config: DatasetConfig, digest: str, first: int = 0) -> None:
        self._where, self._digest, self._first = f"dataset {config.name}", digest, first
        self._columns = {name: self._column(table, name) for name in named(config) if name in table.schema.names}
        self._len = int(table.num_rows)
        self.num_bytes = int(table.nbytes)

    def __len__(self) -> int:
        return self._len

    def digest(self) -> str:
        return self._digest

    def row(self, index: int) -> dict[str, Any]:
        return {name: self._value(name, index) for name in self._columns}

    def _column(self, table: Any, name: str) -> tuple[Any, Any]:
        """Return a column, and the type as which its values are read."""
        if (times := table.schema.names.count(name)) > 1:
            raise ConfigError(
                f"{self._where}: it has {times} columns named {name!r}, and which one is meant is not known: leave one."
            )
        column = table.column(name)
        held = _held_type(column.type)
        return column, None if held.equals(column.type) else held

    def _value(self, name: str, index: int) -> Any:
        import pyarrow

        column, held = self._columns[name]
        try:
            value = column.slice(index, 1)
            (found,) = (value if held is None else value.cast(held, safe=False)).to_pylist()
        # Text that is not UTF-8, times out of Python's range, unknown time zones.
        except (ValueError, OverflowError, LookupError, pyarrow.ArrowException) as exc:
            raise BadLine(
                f"{self._where}, line {self._first + index + 1}: its {name!r} cannot be read ({format_exc(exc)})."
            ) from exc
        return found


def named(config: DatasetConfig) -> Iterable[str]:
    """Return the columns that are used for a prompt."""
    texts = (config.input_key, config.label_key, config.metadata_key, config.answer_key, config.tools_key)
    keys = (*texts, config.image_key)
    return dict.fromkeys(key for key in keys if key is not None)


def check_whole(table: Any) -> None:
    """Raise ArrowException if an offset of a row is invalid: reading that row would crash the process.

    Memory-mapped files are not validated by pyarrow. Text that is not UTF-8 affects only its own row.
    """
    import pyarrow

    try:
        table.validate(full=True)
    except pyarrow.ArrowException:
        for column in table.columns:
            for chunk in column.chunks:
                chunk.view(_as_bytes(chunk.type)).validate(full=True)


def _as_bytes(kind: Any) -> Any:
    """Return ``kind`` with bytes instead of text."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_string(kind):
        return pa.binary()
    if types.is_large_string(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        field = kind.value_field.with_type(_as_bytes(kind.value_type))
        return pa.list_(field) if types.is_list(kind) else pa.large_list(field)
    return kind


def _held_field(field: Any) -> Any:
    return field.with_type(_held_type(field.type))


def _held_type(kind: Any) -> Any:
    """Return ``kind`` with microseconds instead of nanoseconds.

    pyarrow converts nanoseconds differently if pandas is installed: to its own types, or with an error.
    """
    import pyarrow as pa
    from pyarrow import types

    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", tz=kind.tz)
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_struct(kind):
        return pa.struct([_held_field(field) for field in kind])
    return pa.list_(_held_field(kind.value_field)) if types.is_list(kind) else kind
