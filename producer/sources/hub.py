"""Rows of Hugging Face ``datasets``: a folder that save_to_disk made, a folder of files that it reads, or a name."""

from pathlib import Path
from typing import Any

import xxhash

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.words import said
from producer.sources.arrow_rows import ArrowRows

#: Files of which save_to_disk makes one or the other.
_SAVED = ("state.json", "dataset_dict.json")


def open_hub(name: str, config: DatasetConfig) -> ArrowRows:
    """Rows of a folder or a name. Blocks for reading its bytes twice; a name that is no folder here is downloaded.

    The first time is the check: where rows begin and end is looked at for all of them, which takes a third of the
    second time (35 ms for a million rows of 265 MB that the kernel has in its cache). Images and sounds are bytes and
    paths, not decoded.

    Raises:
        ConfigError: it is not there, cannot be read, is damaged, has no such split, or a column twice.
    """
    check_installed("datasets", f"dataset {config.name}: path hf:{name}")
    table = one_split(_load(name, config), config).data.table
    _check_whole(table, name, config)
    return ArrowRows(table, config, _digest(table))


def _load(name: str, config: DatasetConfig) -> Any:
    import datasets

    try:
        if is_saved(name):
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, split=config.split)
    except Exception as exc:  # the library raises what its files and its network do
        raise ConfigError(
            f"dataset {config.name}: {name} cannot be read by datasets ({said(exc)}): correct its path or its split."
        ) from exc


def is_saved(name: str) -> bool:
    """Whether it is a folder that save_to_disk wrote."""
    return any(Path(name, file).is_file() for file in _SAVED)


def _check_whole(table: Any, name: str, config: DatasetConfig) -> None:
    """Raise ConfigError where what a row's place says is not so: reading such a row would end the process by a signal.

    The library maps the file into memory and believes it.
    """
    import pyarrow

    try:
        table.validate(full=True)
    except pyarrow.ArrowException as exc:
        raise ConfigError(
            f"dataset {config.name}: {name} is damaged ({said(exc)}): save or download it again."
        ) from exc


def one_split(found: Any, config: DatasetConfig) -> Any:
    """The dataset that is meant: the split that is named, or the only one."""
    import datasets

    if not isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):
        return found
    splits = sorted(map(str, found))
    if config.split is None and len(splits) == 1:
        return found[splits[0]]
    if config.split not in splits:
        raise ConfigError(
            f"dataset {config.name}: it has the splits {', '.join(splits)}, and its split is {config.split}: name one."
        )
    return found[config.split]


def _digest(table: Any) -> str:
    """Of what the rows hold."""
    digest = xxhash.xxh3_128()
    for batch in table.to_batches():
        digest.update(batch.serialize())
    return digest.hexdigest()
