"""``penstock export``: write samples of a run to files for other programs."""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.console.cli.command import Answer, many
from penstock.console.cli.history.filters import Run, Wanted
from penstock.errors import ConfigError
from penstock.system.extras import check_installed


def check_new(path: Path) -> None:
    """Raise ConfigError if ``path`` exists already, or its folder does not."""
    if path.exists():
        raise ConfigError(f"{path} exists already: name another one.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written, for there is no folder {path.parent}: make it, or name another.")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Wrap the writing of ``path``. Raises ConfigError for errors of the disk or missing permissions."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be written ({exc.strerror or exc}): make room for it, or name another place."
        ) from exc


class Format(StrEnum):
    """Format of an export."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    #: A folder for ``datasets.load_dataset``: a parquet file per lane, which is a split.
    DATASETS = "datasets"


def export(
    out: Annotated[Path, typer.Argument(metavar="PATH", help="File that is written; a folder for datasets.")],
    wanted: Wanted,
    found: Run,
    answer: Answer,
    format_: Annotated[Format, typer.Option("--format", help="jsonl, parquet or datasets.")] = Format.JSONL,
    tokens: Annotated[bool, typer.Option(help="With tokens, logprobs, versions and masks.")] = True,
) -> None:
    """Write samples to files, in the order in which they were recorded."""
    from penstock.console.progress import Steps
    from penstock.console.read.export import write_datasets, write_jsonl, write_parquet

    if format_ is not Format.JSONL:
        check_installed("pyarrow", f"--format {format_}")
    filters = wanted.filters()
    check_new(out)
    write = {Format.JSONL: write_jsonl, Format.PARQUET: write_parquet, Format.DATASETS: write_datasets}[format_]
    with writing(out), Steps("exporting samples", found.samples.count(filters), hidden=answer.as_json) as steps:
        number = write(found.samples, filters, out, arrays=tokens, at=steps.at)
    words = f"{many(number, 'sample')} {'is' if number == 1 else 'are'} in {out}"
    answer.tell(words, {"path": str(out), "samples": number})
    found.tell_problems()
