"""``penstock export``: write samples of a run to files for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.console.cli.asking import many, told
from penstock.console.cli.history.asked import (
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
from penstock.console.cli.history.where import with_where
from penstock.console.cli.history.written import check_new, writing
from penstock.console.cli.lists import WhereOption
from penstock.console.cli.options import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption
from penstock.system.extras import check_installed


class Format(StrEnum):
    """Format of an export."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    #: A folder for ``datasets.load_dataset``: a parquet file per lane, which is a split.
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
    where: WhereOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write samples to files, in the order in which they were recorded."""
    from penstock.console.progress import Steps
    from penstock.console.read.export import write_datasets, write_jsonl, write_parquet

    if format_ is not Format.JSONL:
        check_installed("pyarrow", f"--format {format_}")
    filters = filters_of(job, prompt, text, version, batch, sub, least, most, fate, dataset, lane, status)
    filters = with_where(filters, where or ())
    found = open_run(run, redis, directory)
    check_new(out)
    write = {Format.JSONL: write_jsonl, Format.PARQUET: write_parquet, Format.DATASETS: write_datasets}[format_]
    with writing(out), Steps("exporting samples", found.samples.count(filters), hidden=as_json) as steps:
        number = write(found.samples, filters, out, arrays=tokens, at=steps.at)
    words = f"{many(number, 'sample')} {'is' if number == 1 else 'are'} in {out}"
    told(words, {"path": str(out), "samples": number}, as_json)
    found.tell_problems()
