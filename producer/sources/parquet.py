"""Rows of a parquet file, through an unnamed Arrow file: parquet's row groups are too large to unpack for one row.

The Arrow file is mapped into memory, so that unread parts take none.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import ArrowRows
from penstock.producer.sources.rows import digest_of_file
from penstock.system.extras import check_installed

#: Rows per batch of the Arrow file.
_BATCH = 16384


def open_parquet(path: Path, config: DatasetConfig) -> ArrowRows:
    """Open a file. Blocks for one pass over it.

    Raises:
        ConfigError: it cannot be read, has a column twice, or there is no room for the Arrow file.
    """
    dataset = config.name
    check_installed("pyarrow", f"dataset {dataset}: parquet")
    import pyarrow

    try:
        with tempfile.NamedTemporaryFile(prefix="penstock-", suffix=".arrow") as spooled:
            _spool(path, dataset, spooled.name)
            # The mapping stays valid when the name is deleted.
            table = pyarrow.ipc.open_stream(pyarrow.memory_map(spooled.name)).read_all()
    except (OSError, pyarrow.ArrowException) as exc:
        raise ConfigError(
            f"dataset {dataset}: {path} is unpacked into {tempfile.gettempdir()}, which failed ({exc}): make room "
            "there, or name another folder in TMPDIR."
        ) from exc
    return ArrowRows(table, config, digest_of_file(path))


def _spool(path: Path, dataset: str, to: str) -> None:
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
    return ConfigError(f"dataset {dataset}: {path} is not a parquet file that can be read ({exc}).")
