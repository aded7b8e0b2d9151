"""Looks at sources of a user's own before a run, in a process of its own: what is imported stays, and may do anything.

``python -m producer.sources.looking`` reads a list of datasets from stdin, as YAML, which has the dates that a
configuration may hand to a class; exit code 2 and a sentence on stderr where one cannot be opened, or rows of it cannot
be used.
"""

import os
import subprocess
import sys
from collections.abc import Iterable

import yaml

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.system.processes import python_command, python_environment
from penstock.words import printable, said
from producer.dataset import Dataset
from producer.prompt import Template
from producer.weighted import mixture_of


def check_sources(datasets: Iterable[DatasetConfig], limit_s: float) -> bool:
    """Whether the datasets were looked at within ``limit_s``: opened, those rows read that tell them from others, and
    the first prompt made. Blocks for what their code does.

    Raises:
        ConfigError: one cannot be opened, or a row of these cannot be used.
    """
    try:
        done = subprocess.run(
            python_command("producer.sources.looking"),
            env=python_environment(os.environ),
            input=yaml.safe_dump([one.model_dump() for one in datasets]),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(lines[-1] if lines else f"reading the data ended with exit code {done.returncode}.")
    return True


def look_at(config: DatasetConfig) -> None:
    """Open a dataset, and read what is read of it first. Raises ConfigError."""
    dataset = Dataset(config, Template(lambda messages, **_: str(messages)))
    dataset.rows.digest()
    mixture_of([dataset], 0).place(0)
    dataset.take(0)


def main() -> int:
    """See the module."""
    # As parts do: last, so that it hides nothing of ours.
    sys.path.append(os.getcwd())
    try:
        for values in yaml.safe_load(sys.stdin):
            look_at(DatasetConfig.model_validate(values))
    except ConfigError as exc:
        print(printable(" ".join(str(exc).split())), file=sys.stderr)
        return 2
    except BaseException as exc:
        print(printable(" ".join(said(exc).split())), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # What a module left running must not hold up whoever waits for this.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
