"""Rows of Hugging Face ``datasets``: a folder of save_to_disk, a folder of files that it reads, or a name."""

import os
import tempfile
from itertools import chain
from typing import Any

import xxhash

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import ArrowRows, check_whole
from penstock.producer.sources.hub_files import by_row
from penstock.producer.sources.hub_splits import is_saved, one_split
from penstock.producer.sources.rows import Rows
from penstock.system.extras import check_installed
from penstock.text import format_exc

#: Rows per batch of an Arrow file.
_BATCH = 16384


def open_hub(name: str, config: DatasetConfig) -> Rows:
    """Open a folder or a name. Blocks for reading its bytes twice; a name that is not a local folder is downloaded.

    The first pass validates the offsets of all rows, which takes a third of the second pass (35 ms for a million rows
    of 265 MB in the page cache). Images and sounds are bytes and paths, not decoded.

    Raises:
        ConfigError: it does not exist, cannot be read, is damaged, has no such split, or a column twice.
    """
    check_installed("datasets", f"dataset {config.name}: path hf:{name}")
    try:
        table = one_split(_load(name, config), config).data.table
    except ConfigError as exc:
        rows = None if _is_of_the_machine(exc) or is_saved(name) else _by_row(name, config)
        if rows is None:
            raise
        return rows
    _check_whole(table, name, config)
    return ArrowRows(table, config, _digest(table))


def _by_row(name: str, config: DatasetConfig) -> Rows | None:
    """Open local files row by row that the library refuses as a whole; None if that is not possible.

    Blocks for writing them to an unnamed temporary file.
    """
    import datasets
    import pyarrow

    try:
        builder = datasets.load_dataset_builder(name)
    except Exception:  # the library has reported its error before
        return None
    if (found := by_row(builder, config)) is None or not all(map(os.path.isfile, found[1])):
        return None
    reader, _ = found
    try:
        with tempfile.NamedTemporaryFile(prefix="penstock-", suffix=".arrow") as spooled:
            tables = reader.opened(0, _BATCH)
            first = next(tables)
            with pyarrow.ipc.new_stream(spooled.name, first.schema) as writer:
                for table in chain([first], tables):
                    writer.write_table(table)
            # The mapping stays valid when the name is deleted.
            table = pyarrow.ipc.open_stream(pyarrow.memory_map(spooled.name)).read_all()
            _check_whole(table, name, config)
    except StopIteration:
        return None
    except (OSError, ValueError, pyarrow.ArrowException) as exc:
        raise ConfigError(
            f"dataset {config.name}: files of {name} are unpacked into {tempfile.gettempdir()}, which failed "
            f"({format_exc(exc)}): correct them, or make room there."
        ) from exc
    return reader.rows(table, config, _digest(table), 0)


def _is_of_the_machine(exc: BaseException) -> bool:
    """Return whether an error comes from a disk or a network: without it the library might read the same rows."""
    cause = exc.__cause__
    return cause is not None and (isinstance(cause, OSError) or _is_of_the_machine(cause))


def _load(name: str, config: DatasetConfig) -> Any:
    import datasets

    try:
        if is_saved(name):
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, split=config.split)
    except Exception as exc:  # the library raises what its files and its network do
        raise ConfigError(
            f"dataset {config.name}: {name} cannot be read by datasets ({format_exc(exc)}): correct its "
            "path or its split."
        ) from exc


def _check_whole(table: Any, name: str, config: DatasetConfig) -> None:
    """Raise ConfigError if reading a row would crash the process."""
    import pyarrow

    try:
        check_whole(table)
    except pyarrow.ArrowException as exc:
        raise ConfigError(
            f"dataset {config.name}: {name} is damaged ({format_exc(exc)}): save or download it again."
        ) from exc


def _digest(table: Any) -> str:
    """Return the digest of the rows' content."""
    digest = xxhash.xxh3_128()
    for batch in table.to_batches():
        digest.update(batch.serialize())
    return digest.hexdigest()
