"""Looks at sources of a user's own before a run, in a process of its own: what is imported stays, and may do anything.

``python -m penstock.producer.sources.looking`` reads a list of datasets from stdin, as YAML, which has the dates that a
configuration may hand to a class; exit code 2 and a sentence on stderr where one cannot be opened, or rows of it cannot
be used.
"""

import sys
from collections.abc import Iterable

import yaml

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.prompt import Template
from penstock.producer.weighted import mixture_of
from penstock.system.user_imports import answer_apart, ask_apart


def check_sources(datasets: Iterable[DatasetConfig], limit_s: float) -> bool:
    """Whether the datasets were looked at within ``limit_s``: opened, those rows read that tell them from others, and
    the first prompt made. Blocks for what their code does.

    Raises:
        ConfigError: one cannot be opened, or a row of these cannot be used.
    """
    question = yaml.safe_dump([one.model_dump() for one in datasets])
    try:
        refusal = ask_apart("penstock.producer.sources.looking", question, limit_s, "reading the data")
    except TimeoutError:
        return False
    if refusal:
        raise ConfigError(refusal)
    return True


def look_at(config: DatasetConfig) -> None:
    """Open a dataset, and read what is read of it first. Raises ConfigError."""
    dataset = Dataset(config, Template(lambda messages, **_: str(messages)))
    dataset.rows.digest()
    mixture_of([dataset], 0).place(0)
    dataset.take(0)


def look_at_all() -> None:
    """Look at those that stdin has. Raises ConfigError."""
    for values in yaml.safe_load(sys.stdin):
        look_at(DatasetConfig.model_validate(values))


if __name__ == "__main__":
    answer_apart(look_at_all)
