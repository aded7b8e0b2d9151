"""``penstock export``: samples of a run as files for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from console.cli.history.asked import (
    BatchOption,
    DatasetOption,
    FateOption,
    JobOption,
    LaneOption,
    LeastOption,
    MostOption,
    PromptOption,
    StatusOption,
    SubOption,
    TextOption,
    VersionOption,
    filters_of,
    open_run,
)
from console.cli.options import DIRECTORY, FolderOption, RunArgument, UrlOption
from console.terminal import say
from penstock.errors import ConfigError
from penstock.system.extras import check_installed


class Format(StrEnum):
    """What ``export`` writes."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    #: A folder that ``datasets.load_dataset`` takes: a parquet file per lane, which is a split.
    DATASETS = "datasets"


def export(
    out: Annotated[Path, typer.Argument(metavar="PATH", help="File that is written; a folder for datasets.")],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    format_: Annotated[Format, typer.Option("--format", help="jsonl, parquet or datasets.")] = Format.JSONL,
    tokens: Annotated[bool, typer.Option(help="With tokens, logprobs, versions and masks.")] = True,
    job: JobOption = "",
    prompt: PromptOption = "",
    text: TextOption = "",
    version: VersionOption = None,
    batch: BatchOption = None,
    sub: SubOption = "",
    least: LeastOption = None,
    most: MostOption = None,
    fate: FateOption = "",
    dataset: DatasetOption = "",
    lane: LaneOption = "",
    status: StatusOption = "",
) -> None:
    """Write samples to files, in the order in which they were recorded."""
    from console.read.export import write_datasets, write_jsonl, write_parquet

    if format_ is not Format.JSONL:
        check_installed("pyarrow", f"--format {format_}")
    if out.exists():
        raise ConfigError(f"{out} is there already: name a file or folder that is not.")
    filters = filters_of(job, prompt, text, version, batch, sub, least, most, fate, dataset, lane, status)
    found = open_run(run, redis, directory)
    write = {Format.JSONL: write_jsonl, Format.PARQUET: write_parquet, Format.DATASETS: write_datasets}[format_]
    number = write(found.samples, filters, out, arrays=tokens)
    say(f"{number} samples are in {out}")
    found.tell_problems()
