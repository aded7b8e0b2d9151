"""Validation of sources before a run, in a separate process, since imports of user code are permanent.

``python -m penstock.producer.sources.validate`` reads a list of datasets from stdin, as YAML, which has the dates that
a configuration may pass to a class; exit code 2 and a sentence on stderr if one cannot be opened, or its rows cannot
be used.
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
    """Validate datasets: open them, read the rows of their digest, and make the first prompt. Blocks for their code.

    Returns whether that took at most ``limit_s``.

    Raises:
        ConfigError: one cannot be opened, or one of these rows cannot be used.
    """
    question = yaml.safe_dump([one.model_dump() for one in datasets])
    try:
        refusal = ask_apart("penstock.producer.sources.validate", question, limit_s, "reading the data")
    except TimeoutError:
        return False
    if refusal:
        raise ConfigError(refusal)
    return True


def look_at(config: DatasetConfig) -> None:
    """Open a dataset, and read its first rows. Raises ConfigError."""
    dataset = Dataset(config, Template(lambda messages, **_: str(messages)))
    dataset.rows.digest()
    mixture_of([dataset], 0).place(0)
    dataset.take(0)


def look_at_all() -> None:
    """Validate the datasets in stdin. Raises ConfigError."""
    for values in yaml.safe_load(sys.stdin):
        look_at(DatasetConfig.model_validate(values))


if __name__ == "__main__":
    answer_apart(look_at_all)
