"""Read rows of an Arrow table one at a time."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.sources.rows import BadLine, digest_of_file
from penstock.system.extras import check_installed
from penstock.text import format_exc


class ArrowRows:
    """Rows of a table, which may be memory-mapped, with the columns that a dataset uses.

    Times are truncated to microseconds, the resolution of Python's.

    Args:
        table: a ``pyarrow.Table``.
        digest: digest of the table's content.
        first: number of the table's first row in the dataset.

    Raises:
        ConfigError: the table has two columns of one of these names.
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
        """Return a column and the type to which its values are cast, or None."""
        if (times := table.schema.names.count(name)) > 1:
            raise ConfigError(
                f"{self._where}: it has {times} columns named {name!r}, which is ambiguous: remove all but one."
            )
        column = table.column(name)
        kind = _python_type(column.type)
        return column, None if kind.equals(column.type) else kind

    def _value(self, name: str, index: int) -> Any:
        import pyarrow

        column, kind = self._columns[name]
        try:
            value = column.slice(index, 1)
            (found,) = (value if kind is None else value.cast(kind, safe=False)).to_pylist()
        # Text that is not UTF-8, times outside Python's range, unknown time zones.
        except (ValueError, OverflowError, LookupError, pyarrow.ArrowException) as exc:
            raise BadLine(
                f"{self._where}, line {self._first + index + 1}: column {name!r} cannot be read ({format_exc(exc)})."
            ) from exc
        return found


def named(config: DatasetConfig) -> Iterable[str]:
    """Return the names of the columns that prompts are made from."""
    texts = (config.input_key, config.label_key, config.metadata_key, config.answer_key, config.tools_key)
    keys = (*texts, config.image_key)
    return dict.fromkeys(key for key in keys if key is not None)


def validate_offsets(table: Any) -> None:
    """Raise ArrowException if an offset of a row is invalid; reading such a row would crash the process.

    pyarrow does not validate memory-mapped files. Text that is not UTF-8 is accepted, since it affects only its row.
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


def _python_field(field: Any) -> Any:
    return field.with_type(_python_type(field.type))


def _python_type(kind: Any) -> Any:
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
        return pa.struct([_python_field(field) for field in kind])
    return pa.list_(_python_field(kind.value_field)) if types.is_list(kind) else kind


#: Rows per batch of the Arrow file.
_BATCH = 16384


def open_parquet(path: Path, config: DatasetConfig) -> ArrowRows:
    """Open a parquet file through an unnamed Arrow file. Blocks for one pass over it.

    Row groups of parquet are too large to decode for one row. The Arrow file is memory-mapped, so that only parts that
    are read use memory.

    Raises:
        ConfigError: the file cannot be read, has a duplicate column, or the disk is too full for the Arrow file.
    """
    dataset = config.name
    check_installed("pyarrow", f"dataset {dataset}: parquet")
    import pyarrow

    try:
        with tempfile.NamedTemporaryFile(prefix="penstock-", suffix=".arrow") as file:
            _write_arrow(path, dataset, file.name)
            # The mapping stays valid after the file is unlinked.
            table = pyarrow.ipc.open_stream(pyarrow.memory_map(file.name)).read_all()
    except (OSError, pyarrow.ArrowException) as exc:
        raise ConfigError(
            f"dataset {dataset}: unpacking {path} into {tempfile.gettempdir()} failed ({exc}): free disk space there, "
            "or set TMPDIR to another folder."
        ) from exc
    return ArrowRows(table, config, digest_of_file(path))


def _write_arrow(path: Path, dataset: str, to: str) -> None:
    import pyarrow

    schema, batches = _read(path, dataset)
    with pyarrow.ipc.new_stream(to, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _read(path: Path, dataset: str) -> tuple[Any, Iterator[Any]]:
    """Return the schema of a parquet file, and its batches."""
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        try:
            yield from file.iter_batches(batch_size=_BATCH)
        except (OSError, ValueError, pyarrow.ArrowException) as exc:
            raise _unreadable(path, dataset, exc) from exc

    try:
        file = pyarrow.parquet.ParquetFile(path)
        return file.schema_arrow, batches()
    except (OSError, ValueError, pyarrow.ArrowException) as exc:
        raise _unreadable(path, dataset, exc) from exc


def _unreadable(path: Path, dataset: str, exc: Exception) -> ConfigError:
    return ConfigError(f"dataset {dataset}: {path} cannot be read as parquet ({exc}); correct the path or the file.")
