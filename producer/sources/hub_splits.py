"""Content of a path for Hugging Face ``datasets``: saved folders, and splits."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config import DatasetConfig
from penstock.errors import ConfigError

#: Files of which save_to_disk writes one.
_SAVED = ("state.json", "dataset_dict.json")


def is_saved(name: str) -> bool:
    """Return whether it is a folder that save_to_disk wrote."""
    return any(Path(name, file).is_file() for file in _SAVED)


def one_split(found: Any, config: DatasetConfig) -> Any:
    """Return the dataset of the configured split, or of the only one."""
    import datasets

    if not isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):
        return found
    return found[one_of(map(str, found), config)]


def one_of(names: Iterable[str], config: DatasetConfig) -> str:
    """Return the name of the configured split, or the only one."""
    splits = sorted(names)
    if config.split is None and len(splits) == 1:
        return splits[0]
    if config.split not in splits:
        raise ConfigError(
            f"dataset {config.name}: it has the splits {', '.join(splits)}, and its split is {config.split}: name one."
        )
    return config.split


@contextmanager
def without_torch() -> Iterator[None]:
    """Make the library skip its support for torch's loaders, whose import takes seconds and hundreds of MB."""
    import datasets

    before = datasets.config.TORCH_AVAILABLE
    datasets.config.TORCH_AVAILABLE = False
    try:
        yield
    finally:
        datasets.config.TORCH_AVAILABLE = before
