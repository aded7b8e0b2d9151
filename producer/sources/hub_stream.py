"""Hugging Face ``datasets`` as a stream: nothing is unpacked, downloaded or scanned before it is needed."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from penstock.config import DatasetConfig
from penstock.config.data import STREAM_WINDOW
from penstock.config.reading.dataset_path import parse_path
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import ArrowRows
from penstock.producer.sources.hub_files import by_row, files_of
from penstock.producer.sources.hub_splits import is_saved, one_split, without_torch
from penstock.producer.sources.stream import Reader, Stream
from penstock.system.extras import check_installed
from penstock.text import format_exc

#: Bytes at either end of a file that its digest covers.
_LOOKED_AT = 1 << 16


def open_stream(name: str, config: DatasetConfig) -> Stream:
    """Open a folder or a name as a stream. Blocks for finding its files, and for 128 KiB of each local one.

    The digest covers the names of these files in their order, and of each local one its length and its two ends; of
    remote files their addresses, which contain the revision.

    Raises:
        ConfigError: it does not exist, cannot be read, or has no such split.
    """
    check_installed("datasets", f"dataset {config.name}: path hf:{name}")
    try:
        reader, files = _saved(name, config) if is_saved(name) else _built(name, config)
        here = [file for file in files if os.path.isfile(file)]
        digest, stamps = _digest(files, Path(name)), _stamps(here)
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
    return Stream(reader, config, digest, is_same, first, config.shuffle_window or STREAM_WINDOW)


def _saved(name: str, config: DatasetConfig) -> tuple[Reader, list[str]]:
    """Open a folder of save_to_disk, mapped into memory; return its reader and files."""
    import datasets

    found = one_split(datasets.load_from_disk(name), config)
    table = found.data.table

    def opened(first: int, num_rows: int) -> Iterator[Any]:
        return (table.slice(at, num_rows) for at in range(first, table.num_rows, num_rows))

    return Reader(opened, ArrowRows), [file["filename"] for file in found.cache_files]


def _built(name: str, config: DatasetConfig) -> tuple[Reader, list[str]]:
    """Open a folder of files, or a name, by the library; return its reader, and these files or their addresses."""
    import datasets

    builder = datasets.load_dataset_builder(name)
    if (found_by_row := by_row(builder, config)) is not None:
        return found_by_row
    with without_torch():
        found = one_split(builder.as_streaming_dataset(), config).with_format("arrow")
    splits = files_of(builder)

    def opened(first: int, num_rows: int) -> Iterator[Any]:
        with without_torch():
            rest = found.skip(first) if first else found
        return iter(rest.iter(batch_size=num_rows))

    return Reader(opened, ArrowRows), splits[config.split or next(iter(splits))]


def _digest(files: Iterable[str], folder: Path) -> str:
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
