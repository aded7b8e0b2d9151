"""Read rows with Hugging Face ``datasets``: a folder of save_to_disk, a folder of data files, or a name on the Hub."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from penstock.config import DatasetConfig
from penstock.config.data import STREAM_WINDOW
from penstock.config.reading.dataset_path import parse_path
from penstock.config.reading.hub import fetch_dataset
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import ArrowRows, validate_offsets
from penstock.producer.sources.rows import Rows
from penstock.producer.sources.stream import Open, Stream
from penstock.system.extras import check_installed
from penstock.text import format_exc

#: Number of bytes at each end of a file that its digest covers.
_DIGESTED_BYTES = 1 << 16


#: Files of which save_to_disk writes exactly one.
_SAVED = ("state.json", "dataset_dict.json")


def _is_open_saved(name: str) -> bool:
    """Return whether ``name`` is a folder written by save_to_disk."""
    return any(Path(name, file).is_file() for file in _SAVED)


def _one_split(found: Any, config: DatasetConfig) -> Any:
    """Return the dataset of the configured split, or of the only split."""
    import datasets

    if not isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):
        return found
    splits = sorted(map(str, found))
    split = splits[0] if config.split is None and len(splits) == 1 else config.split
    if split not in splits:
        raise ConfigError(
            f"dataset {config.name}: split is {split}, but it has {', '.join(splits)}: set split to one of them."
        )
    return found[split]


@contextmanager
def _without_torch() -> Iterator[None]:
    """Disable the library's support for torch, whose import takes seconds and hundreds of MB."""
    import datasets

    before = datasets.config.TORCH_AVAILABLE
    datasets.config.TORCH_AVAILABLE = False
    try:
        yield
    finally:
        datasets.config.TORCH_AVAILABLE = before


def open_stream(name: str, config: DatasetConfig) -> Stream:
    """Open a folder or a name as a stream. Blocks for listing its files, and for reading 128 KiB of each local one.

    The digest covers the names of local files in order, their lengths and both ends of each; of remote files the
    addresses, which contain the revision.

    Raises:
        ConfigError: it does not exist, cannot be read, or has no such split.
    """
    check_installed("datasets", f"dataset {config.name}: path hf:{name}")
    try:
        opened, files = _open_saved(name, config) if _is_open_saved(name) else _open_built(name, config)
        here = [file for file in files if os.path.isfile(file)]
        digest, stamps = _stream_digest(files, Path(name)), _stamps(here)
    except ConfigError:
        raise
    except Exception as exc:  # the library passes on any error of its files and the network
        raise ConfigError(
            f"dataset {config.name}: {name} cannot be read by datasets ({format_exc(exc)}): correct the dataset's path "
            "or split."
        ) from exc

    def is_same() -> bool:
        return _stamps(here) == stamps

    _, first, _ = parse_path(config.path)
    return Stream(opened, config, digest, is_same, first, STREAM_WINDOW)


def _open_saved(name: str, config: DatasetConfig) -> tuple[Open, list[str]]:
    """Open a folder of save_to_disk, memory-mapped; return a function that reads it, and its files."""
    import datasets

    found = _one_split(datasets.load_from_disk(name), config)
    table = found.data.table

    def opened(first: int, num_rows: int) -> Iterator[Any]:
        return (table.slice(at, num_rows) for at in range(first, table.num_rows, num_rows))

    return opened, [file["filename"] for file in found.cache_files]


def _open_built(name: str, config: DatasetConfig) -> tuple[Open, list[str]]:
    """Open a folder of data files or a name; return a function that reads it, and its files or their addresses."""
    import datasets

    builder = datasets.load_dataset_builder(name)
    with _without_torch():
        found = _one_split(builder.as_streaming_dataset(), config).with_format("arrow")
    splits = {str(split): list(map(str, files)) for split, files in (builder.config.data_files or {}).items()}

    def opened(first: int, num_rows: int) -> Iterator[Any]:
        with _without_torch():
            rest = found.skip(first) if first else found
        return iter(rest.iter(batch_size=num_rows))

    return opened, splits[config.split or next(iter(splits))]


def _stream_digest(files: Iterable[str], folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for file in files:
        if not os.path.isfile(file):
            digest.update(json.dumps(file).encode())
            continue
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(json.dumps([os.path.relpath(file, folder), size]).encode())
            digest.update(opened.read(_DIGESTED_BYTES))
            opened.seek(max(0, size - _DIGESTED_BYTES))
            digest.update(opened.read(_DIGESTED_BYTES))
    return digest.hexdigest()


def _stamps(files: Iterable[str]) -> list[tuple[int, int, int]]:
    """Return (inode, size, mtime) of each file, which change if the file does. Raises OSError."""
    return [(found.st_ino, found.st_size, found.st_mtime_ns) for found in map(os.stat, files)]


def open_hub(name: str, config: DatasetConfig) -> Rows:
    """Open a folder or a name. Blocks for reading the data twice, and for downloading a name that is no local folder.

    The first pass validates the offsets of all rows, and takes a third of the second (35 ms for a million cached
    rows of 265 MB). Images and audio are not decoded: they are bytes and paths.

    Raises:
        ConfigError: it does not exist, cannot be read, is damaged, or lacks the split, or a column is duplicated.
    """
    check_installed("datasets", f"dataset {config.name}: path hf:{name}")
    if not Path(name).is_dir():
        name = fetch_dataset(name, f"dataset {config.name}")
    table = _one_split(_load(name, config), config).data.table
    _validate(table, name, config)
    return ArrowRows(table, config, _digest(table))


def _load(name: str, config: DatasetConfig) -> Any:
    import datasets

    try:
        if _is_open_saved(name):
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, split=config.split)
    except Exception as exc:  # the library passes on any error of its files and the network
        raise ConfigError(
            f"dataset {config.name}: {name} cannot be read by datasets ({format_exc(exc)}): correct the dataset's path "
            "or split."
        ) from exc


def _validate(table: Any, name: str, config: DatasetConfig) -> None:
    """Raise ConfigError if the table is damaged; reading a damaged row would crash the process."""
    import pyarrow

    try:
        validate_offsets(table)
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
