"""Rows of Hugging Face ``datasets``: a folder of save_to_disk, a folder of files that it reads, or a name."""

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
from penstock.producer.sources.arrow_rows import ArrowRows, check_whole
from penstock.producer.sources.rows import Rows
from penstock.producer.sources.stream import Open, Stream
from penstock.system.extras import check_installed
from penstock.text import format_exc

#: Bytes at either end of a file that its digest covers.
_LOOKED_AT = 1 << 16


#: Files of which save_to_disk writes one.
_SAVED = ("state.json", "dataset_dict.json")


def _is_saved(name: str) -> bool:
    """Return whether it is a folder that save_to_disk wrote."""
    return any(Path(name, file).is_file() for file in _SAVED)


def _one_split(found: Any, config: DatasetConfig) -> Any:
    """Return the dataset of the configured split, or of the only one."""
    import datasets

    if not isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):
        return found
    splits = sorted(map(str, found))
    split = splits[0] if config.split is None and len(splits) == 1 else config.split
    if split not in splits:
        raise ConfigError(
            f"dataset {config.name}: it has the splits {', '.join(splits)}, and its split is {split}: name one."
        )
    return found[split]


@contextmanager
def _without_torch() -> Iterator[None]:
    """Make the library skip its support for torch's loaders, whose import takes seconds and hundreds of MB."""
    import datasets

    before = datasets.config.TORCH_AVAILABLE
    datasets.config.TORCH_AVAILABLE = False
    try:
        yield
    finally:
        datasets.config.TORCH_AVAILABLE = before


def open_stream(name: str, config: DatasetConfig) -> Stream:
    """Open a folder or a name as a stream. Blocks for finding its files, and for 128 KiB of each local one.

    The digest covers the names of these files in their order, and of each local one its length and its two ends; of
    remote files their addresses, which contain the revision.

    Raises:
        ConfigError: it does not exist, cannot be read, or has no such split.
    """
    check_installed("datasets", f"dataset {config.name}: path hf:{name}")
    try:
        opened, files = _saved(name, config) if _is_saved(name) else _built(name, config)
        here = [file for file in files if os.path.isfile(file)]
        digest, stamps = _stream_digest(files, Path(name)), _stamps(here)
    except ConfigError:
        raise
    except Exception as exc:  # the library raises what its files and its network do
        raise ConfigError(
            f"dataset {config.name}: {name} cannot be read by datasets ({format_exc(exc)}): correct its "
            "path or its split."
        ) from exc

    def is_same() -> bool:
        return _stamps(here) == stamps

    _, first, _ = parse_path(config.path)
    return Stream(opened, config, digest, is_same, first, STREAM_WINDOW)


def _saved(name: str, config: DatasetConfig) -> tuple[Open, list[str]]:
    """Open a folder of save_to_disk, mapped into memory; return how it is read, and its files."""
    import datasets

    found = _one_split(datasets.load_from_disk(name), config)
    table = found.data.table

    def opened(first: int, num_rows: int) -> Iterator[Any]:
        return (table.slice(at, num_rows) for at in range(first, table.num_rows, num_rows))

    return opened, [file["filename"] for file in found.cache_files]


def _built(name: str, config: DatasetConfig) -> tuple[Open, list[str]]:
    """Open a folder of files, or a name, by the library; return how it is read, and these files or their
    addresses."""
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
            digest.update(opened.read(_LOOKED_AT))
            opened.seek(max(0, size - _LOOKED_AT))
            digest.update(opened.read(_LOOKED_AT))
    return digest.hexdigest()


def _stamps(files: Iterable[str]) -> list[tuple[int, int, int]]:
    """Return values that change when a file does. Raises OSError."""
    return [(found.st_ino, found.st_size, found.st_mtime_ns) for found in map(os.stat, files)]


def open_hub(name: str, config: DatasetConfig) -> Rows:
    """Open a folder or a name. Blocks for reading its bytes twice; a name that is not a local folder is downloaded.

    The first pass validates the offsets of all rows, which takes a third of the second pass (35 ms for a million rows
    of 265 MB in the page cache). Images and sounds are bytes and paths, not decoded.

    Raises:
        ConfigError: it does not exist, cannot be read, is damaged, has no such split, or a column twice.
    """
    check_installed("datasets", f"dataset {config.name}: path hf:{name}")
    if not Path(name).is_dir():
        name = fetch_dataset(name, f"dataset {config.name}")
    table = _one_split(_load(name, config), config).data.table
    _check_whole(table, name, config)
    return ArrowRows(table, config, _digest(table))


def _load(name: str, config: DatasetConfig) -> Any:
    import datasets

    try:
        if _is_saved(name):
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
