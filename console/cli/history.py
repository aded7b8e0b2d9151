"""Options that select a run and its samples; and ``penstock export``, which writes them to files."""

import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli.command import Answer, WhereOption, add_kind, many
from penstock.console.cli.target import Target, newest_run, run_of
from penstock.console.selection import parts_of
from penstock.console.terminal import say
from penstock.errors import ConfigError, QueueUnavailable
from penstock.names import check_name
from penstock.system.extras import check_installed
from penstock.system.run_folder import RunFolder

if TYPE_CHECKING:
    from penstock.history.filters import Filters
    from penstock.history.reader import HistoryReader
    from penstock.records.keys import Keys
    from penstock.redis.commands import Client


def _text(name: str, metavar: str, about: str) -> Any:
    return Annotated[str, typer.Option(name, metavar=metavar, help=about)]


DatasetOption = Annotated[str, typer.Option("--dataset", metavar="NAME", help="Of this dataset.")]
LaneOption = Annotated[str, typer.Option("--lane", help="train, eval or score.")]
_FATES = "trained, masked, evaluated, scored, filtered, dropped, evicted, payload_lost, buried or cancelled."
#: By field of ``Filters``.
_OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "job": (_text("--job", "JOB", "Samples of this job."), ""),
    "prompt": (_text("--prompt", "WORDS", "Whose prompt has these words; or the id of a job."), ""),
    "text": (_text("--text", "WORDS", 'Whose answer, or prompt, has these words; begin*, "as it stands".'), ""),
    "version": (Annotated[int | None, typer.Option(min=0, help="With tokens of this version.")], None),
    "batch": (Annotated[int | None, typer.Option(min=0, help="In this batch.")], None),
    "subscription": (_text("--sub", "NAME", "In batches of this subscription."), ""),
    "least_reward": (Annotated[float | None, typer.Option("--min-reward", help="With at least this reward.")], None),
    "most_reward": (Annotated[float | None, typer.Option("--max-reward", help="With at most this reward.")], None),
    "fate": (_text("--fate", "FATE", _FATES), ""),
    "dataset": (DatasetOption, ""),
    "lane": (LaneOption, ""),
    "status": (_text("--status", "STATUS", "completed, truncated, aborted or given."), ""),
    "where": (WhereOption, None),
}  # fmt: skip
#: Conditions that ``--where`` supports for samples: field and relation -> filter.
_ASKED: Mapping[tuple[str, str], str] = {
    **{(name, "="): name for name in ("job", "version", "batch", "fate", "dataset", "lane", "status")},
    ("sub", "="): "subscription",
    ("prompt", "~"): "prompt",
    ("answer", "~"): "text",
    **{("reward", relation): "" for relation in ("=", ">=", "<=", ">", "<")},
}


class Wanted:
    """The samples that the options of a command select."""

    def __init__(self, where: Sequence[str] | None, **given: Any) -> None:
        self._where, self._given = where or (), given

    def filters(self) -> "Filters":
        """Return the filters. Raises ConfigError."""
        from penstock.history.filters import Filters
        from penstock.history.row import Fate, place_of

        filters = Filters(**self._given)
        if filters.prompt and not filters.job and place_of(filters.prompt)[2] >= 0:
            filters = replace(filters, job=filters.prompt, prompt="")
        for text in self._where:
            filters = _narrowed(filters, text)
        if filters.fate and filters.fate not in set(Fate):
            raise ConfigError(f"invalid fate {filters.fate!r}: choose from {', '.join(Fate)}.")
        return filters


def _narrowed(filters: "Filters", text: str) -> "Filters":
    """Add a condition of ``--where``. Raises ConfigError for conditions that samples do not support."""
    name, relation, value = parts_of(text)
    if (name, relation) not in _ASKED:
        fields = ", ".join(f"{one}{how}" for one, how in _ASKED)
        raise ConfigError(f"invalid --where {text!r}: samples can be filtered by {fields}.")
    if name == "reward":
        return _by_reward(filters, text, relation, value)
    field = _ASKED[name, relation]
    if getattr(filters, field) not in (None, ""):
        raise ConfigError(f"--where {text!r}: {name} is asked for already; give it once.")
    if field in ("version", "batch") and not re.fullmatch("[0-9]{1,18}", value):
        raise ConfigError(f"--where {text!r}: give a number from 0.")
    given: Any = int(value) if field in ("version", "batch") else value
    return replace(filters, **{field: given})


def _by_reward(filters: "Filters", text: str, relation: str, value: str) -> "Filters":
    """Add a bound on the reward."""
    try:
        bound = float(value)
    except ValueError:
        raise ConfigError(f"--where {text!r}: give a number.") from None
    at = {">": math.nextafter(bound, math.inf), "<": math.nextafter(bound, -math.inf)}.get(relation, bound)
    least, most = filters.least_reward, filters.most_reward
    if relation in ("=", ">", ">="):
        least = at if least is None else max(least, at)
    if relation in ("=", "<", "<="):
        most = at if most is None else min(most, at)
    return replace(filters, least_reward=least, most_reward=most)


@dataclass(frozen=True, slots=True)
class Run:
    """A run whose samples are read."""

    folder: Path
    samples: "HistoryReader"
    #: Its Redis, if that answers.
    target: Target | None = None

    @property
    def live(self) -> "tuple[Client, Keys] | None":
        return (self.target.client, self.target.keys) if self.target is not None else None

    def end_s(self, latest_s: float) -> float:
        """Return the end of the run (Unix seconds): now, or the latest recorded time of a run that is over."""
        return time.time() if self.target is not None and not self.target.is_copy else latest_s

    def with_rest(self) -> "Run":
        """Return the run with the samples that its Redis left when it ended; itself if there are none. Blocks."""
        from penstock.console.read.samples import open_samples

        if self.target is not None:
            return self
        try:
            target = Target(self.folder.name, None, self.folder.parent, copies=True)
        except (ConfigError, QueueUnavailable):
            return self
        return Run(self.folder, open_samples(self.folder, (target.client, target.keys)), target)

    def tell_problems(self) -> None:
        """Print what was skipped, and whether nothing is recorded."""
        for problem in self.samples.problems:
            say(problem, err=True)
        if not self.samples.is_there:
            say(
                f"Run {self.folder.name} has no history in {self.folder} yet: its recorder writes one of groups that "
                "are done with (history.enabled).",
                err=True,
            )


def open_run(run: str | None, redis: str | None, directory: Path, config: Path | None = None) -> Run:
    """Return the run and its samples: those of its history, and of its Redis, if that answers. Blocks.

    Raises:
        ConfigError: no such run.
        QueueUnavailable: it has no history, and its Redis does not answer.
    """
    from penstock.console.read.samples import open_samples

    run, url, directory = run_of(run, redis, directory, config)
    folder = directory / check_name("--run", run or newest_run(directory))
    has_history = RunFolder(folder).history.is_dir()
    if has_history and url is None and RunFolder(folder).is_over():
        return Run(folder, open_samples(folder))
    try:
        target = Target(folder.name, url, directory, copies=True)
    except (ConfigError, QueueUnavailable) as exc:
        if not has_history or url is not None:
            raise
        say(f"Only what is in the history is shown: {exc}", err=True)
        return Run(folder, open_samples(folder))
    return Run(folder, open_samples(folder, (target.client, target.keys)), target)


add_kind(Run, {}, open_run, of_run=True)
add_kind(Wanted, _OPTIONS, Wanted)


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
