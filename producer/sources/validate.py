"""Validate data sources before a run, in a subprocess, since imports of user code cannot be undone.

``python -m penstock.producer.sources.validate`` reads a list of datasets from stdin, in YAML since the
configuration may contain dates; it exits with code 2 and an error on stderr if a dataset cannot be opened or its rows
are unusable.
"""

import sys
from collections.abc import Iterable

import yaml

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.hooks.user_imports import answer_apart, ask_apart
from penstock.producer.dataset import Dataset
from penstock.producer.mixture import mixture_of
from penstock.producer.prompt import Template


def check_sources(datasets: Iterable[DatasetConfig], limit_s: float) -> bool:
    """Open datasets, compute their digests, and make their first prompts. Blocks for user code.

    Returns False if that took longer than ``limit_s``.

    Raises:
        ConfigError: a dataset cannot be opened, or one of these rows is unusable.
    """
    request = yaml.safe_dump([one.model_dump() for one in datasets])
    try:
        error = ask_apart("penstock.producer.sources.validate", request, limit_s, "reading the data")
    except TimeoutError:
        return False
    if error:
        raise ConfigError(error)
    return True


def validate(config: DatasetConfig) -> None:
    """Open a dataset and make its first prompt. Raises ConfigError."""
    dataset = Dataset(config, Template(lambda messages, **_: str(messages)))
    dataset.rows.digest()
    mixture_of([dataset], 0).place(0)
    dataset.take(0)


def validate_all() -> None:
    """Validate the datasets on stdin. Raises ConfigError."""
    for values in yaml.safe_load(sys.stdin):
        validate(DatasetConfig.model_validate(values))


if __name__ == "__main__":
    answer_apart(validate_all)
