"""Options that select a run and its samples, shared by the commands about a history."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.console.cli import completion
from penstock.console.cli.lists import parts_of
from penstock.console.cli.target import Target, newest_run
from penstock.console.terminal import say
from penstock.errors import ConfigError, QueueUnavailable
from penstock.names import check_name
from penstock.system.run_folder import RunFolder

if TYPE_CHECKING:
    from penstock.history.filters import Filters
    from penstock.history.reader import HistoryReader
    from penstock.records.keys import Keys
    from penstock.redis.commands import Client

#: Conditions that ``--where`` supports for samples: field and relation -> filter.
_ASKED: Mapping[tuple[str, str], str] = {
    **{(name, "="): name for name in ("job", "version", "batch", "fate", "dataset", "lane", "status")},
    ("sub", "="): "subscription",
    ("prompt", "~"): "prompt",
    ("answer", "~"): "text",
    **{("reward", relation): "" for relation in ("=", ">=", "<=", ">", "<")},
}


def with_where(filters: "Filters", where: Iterable[str]) -> "Filters":
    """Add conditions of ``--where`` to ``filters``. Raises ConfigError for conditions that samples do not support."""
    for text in where:
        name, relation, value = parts_of(text)
        if (name, relation) not in _ASKED:
            raise ConfigError(
                f"--where {text!r}: samples are looked for by {', '.join(f'{one}{how}' for one, how in _ASKED)}."
            )
        if name == "reward":
            filters = _by_reward(filters, text, relation, value)
            continue
        field = _ASKED[name, relation]
        if getattr(filters, field) not in (None, ""):
            raise ConfigError(f"--where {text!r}: {name} is asked for already; give it once.")
        given: Any = _as_number(text, value) if field in ("version", "batch") else value
        filters = replace(filters, **{field: given})
    if filters.fate and filters.fate not in _fates():
        raise ConfigError(f"invalid --where fate={filters.fate}: choose from {', '.join(_fates())}.")
    return filters


def _fates() -> list[str]:
    from penstock.history.row import Fate

    return list(Fate)


def _as_number(text: str, value: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", value):
        raise ConfigError(f"--where {text!r}: give a number from 0.")
    return int(value)


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


JobOption = Annotated[
    str, typer.Option("--job", metavar="JOB", help="Samples of this job.", autocompletion=completion.jobs)
]
PromptOption = Annotated[
    str, typer.Option("--prompt", metavar="WORDS", help="Whose prompt has these words; or the id of a job.")
]
TextOption = Annotated[
    str,
    typer.Option("--text", metavar="WORDS", help='Whose answer, or prompt, has these words; begin*, "as it stands".'),
]
VersionOption = Annotated[int | None, typer.Option("--version", min=0, help="With tokens of this version.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch", min=0, help="That were in this batch.", autocompletion=completion.batches)
]
SubOption = Annotated[
    str,
    typer.Option(
        "--sub",
        metavar="NAME",
        help="That were in batches of this subscription.",
        autocompletion=completion.subscriptions,
    ),
]
LeastOption = Annotated[float | None, typer.Option("--min-reward", help="With a reward of at least so much.")]
MostOption = Annotated[float | None, typer.Option("--max-reward", help="With a reward of at most so much.")]
FateOption = Annotated[
    str,
    typer.Option(
        "--fate",
        help="trained, masked, evaluated, scored, filtered, dropped, evicted, payload_lost, buried or cancelled.",
    ),
]
DatasetOption = Annotated[str, typer.Option("--dataset", metavar="NAME", help="Of this dataset.")]
LaneOption = Annotated[str, typer.Option("--lane", help="train, eval or score.")]
StatusOption = Annotated[str, typer.Option("--status", help="completed, truncated, aborted or given.")]


@dataclass(frozen=True, slots=True)
class Run:
    """A run whose samples are read."""

    folder: Path
    samples: "HistoryReader"
    #: Its Redis, if that answers.
    live: "tuple[Client, Keys] | None" = None

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


def open_run(run: str | None, url: str | None, directory: Path) -> Run:
    """Return the run and its samples: those of its history, and of its Redis, if that answers. Blocks.

    Raises:
        ConfigError: no such run.
        QueueUnavailable: it has no history, and its Redis does not answer.
    """
    from penstock.console.read.samples import open_samples

    folder = directory / check_name("--run", run or newest_run(directory))
    there = RunFolder(folder).history.is_dir()
    if there and url is None and _is_over(folder):
        return Run(folder, open_samples(folder))
    try:
        target = Target(folder.name, url, directory)
    except (ConfigError, QueueUnavailable) as exc:
        if not there or url is not None:
            raise
        say(f"Only what is in the history is shown: {exc}", err=True)
        return Run(folder, open_samples(folder))
    live = target.client, target.keys
    return Run(folder, open_samples(folder, live), live)


def _is_over(folder: Path) -> bool:
    """Return whether ``penstock run`` has ended it, and its Redis with it."""
    kept = RunFolder(folder)
    record = kept.record()
    return record is not None and not kept.is_held() and kept.redis.is_dir()


def filters_of(
    job: str,
    prompt: str,
    text: str,
    version: int | None,
    batch: int | None,
    sub: str,
    least: float | None,
    most: float | None,
    fate: str,
    dataset: str,
    lane: str,
    status: str,
) -> "Filters":
    """Return the filters that the options select. Raises ConfigError."""
    from penstock.history.filters import Filters
    from penstock.history.row import Fate, place_of

    if fate and fate not in list(Fate):
        raise ConfigError(f"invalid --fate {fate!r}: choose from {', '.join(Fate)}.")
    if prompt and not job and place_of(prompt)[2] >= 0:
        job, prompt = prompt, ""
    return Filters(job, prompt, text, version, batch, sub, least, most, fate, dataset, lane, status)
