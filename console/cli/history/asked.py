"""Options that select a run and its samples, shared by the commands about a history."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.console.cli import completion
from penstock.console.cli.target import Target, newest_run
from penstock.console.terminal import say
from penstock.errors import ConfigError, QueueUnavailable
from penstock.names import check_name
from penstock.system.run_folder import RunFolder

if TYPE_CHECKING:
    from penstock.history.filters import Filters
    from penstock.history.reader import HistoryReader
    from penstock.protocol.keys import Keys
    from penstock.redis.commands import Client

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
