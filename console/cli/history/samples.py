"""``penstock samples``: show answers of the policy, their rewards, and what became of them."""

import time
from typing import Annotated, Any

import typer

from penstock.console.cli import completion
from penstock.console.cli.confirm import DIRECTORY, FolderOption, JsonOption, RunArgument, UrlOption, many
from penstock.console.cli.history.filters import (
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
    with_where,
)
from penstock.console.cli.lists import WhereOption
from penstock.console.terminal import print_json, say, table
from penstock.errors import ConfigError

samples_app = typer.Typer(help="Samples: prompts, answers, rewards, and what became of them.")

#: Rows shown by default, and characters of a text in a list.
SHOWN, EXCERPT = 20, 60
COLUMNS = ("id", "reward", "version", "tokens", "fate", "prompt", "answer")
SORTS = ("recorded", "reward", "version", "length")

SortOption = Annotated[
    str, typer.Option("--sort", metavar="FIELD", help=f"By {', '.join(SORTS)}; -FIELD: the greatest first.")
]


@samples_app.command("ls")
def samples_ls(
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
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
    sort: SortOption = "-recorded",
    best: Annotated[bool, typer.Option("--best", help="The highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="Most rows shown.")] = SHOWN,
    after: Annotated[str, typer.Option("--after", metavar="PLACE", help="Continue after the end of a list.")] = "",
    count: Annotated[bool, typer.Option("--count", help="Say how many there are, and show none.")] = False,
) -> None:
    """List samples with prompt, answer, reward, version and fate; latest first."""
    from penstock.console.read.samples import listed
    from penstock.history.filters import Sort

    filters = filters_of(job, prompt, text, version, batch, sub, least, most, fate, dataset, lane, status)
    filters = with_where(filters, where or ())
    if best or worst:
        if best and worst:
            raise ConfigError("--best shows the highest rewards first and --worst the lowest: give one of them.")
        sort = "-reward" if best else "reward"
    if sort.removeprefix("-") not in SORTS:
        raise ConfigError(f"invalid --sort {sort!r}: choose from {', '.join(SORTS)}, or -FIELD for the greatest first.")
    found = open_run(run, redis, directory)
    if count:
        number = found.samples.count(filters)
        print_json(number) if as_json else say(many(number, "sample"))
        found.tell_problems()
        return
    ascending = not sort.startswith("-")
    page = found.samples.rows(filters, Sort(sort.removeprefix("-")), limit, after, ascending=ascending)
    if as_json:
        print_json([listed(row) for row in page.rows])
    else:
        table([_in_words(listed(row)) for row in page.rows], COLUMNS, "samples")
    if page.next:
        say(f"more: --sort={sort} --after={page.next}", err=True)
    found.tell_problems()


@samples_app.command("show")
def samples_show(
    sample: Annotated[str, typer.Argument(help="Its id, DATASET/EPOCH/LINE/K.", autocompletion=completion.samples)],
    run: RunArgument = None,
    redis: UrlOption = None,
    directory: FolderOption = DIRECTORY,
    as_json: JsonOption = False,
    tokens: Annotated[bool, typer.Option(help="With a line per generated token.")] = True,
) -> None:
    """Show a sample: texts, reward and its entries, times, batches, and tokens with logprob, version and loss mask."""
    from penstock.console.read.samples import shown, token_rows, turn_rows
    from penstock.history.row import key_of

    key_of(sample)
    found = open_run(run, redis, directory)
    row = found.samples.row(sample)
    if row is None:
        found.tell_problems()
        raise ConfigError(
            f"Run {found.folder.name} has no sample {sample!r}; `penstock samples ls` lists those that it has."
        )
    whole = shown(row, found.samples.uses(sample)) | {"turns": turn_rows(found.folder, row)}
    if as_json:
        print_json(whole)
    else:
        _show(whole)
        if tokens:
            table(
                token_rows(found.folder, row),
                ["at", "token", "text", "logprob", "version", "loss"],
                "generated tokens",
            )
    found.tell_problems()


def _show(whole: dict[str, Any]) -> None:
    fate = _fate(whole)
    say(f"sample {whole['id']}: reward {_number(whole['reward'])}, {fate}, {whole['status'] or 'no status'}")
    versions = f"version{'' if whole['oldest'] == whole['newest'] else 's'} {_versions(whole)}"
    say(
        f"lane {whole['lane']}, {versions}, {many(whole['prompt_length'], 'prompt token')}, "
        f"{whole['num_generated']} generated, {many(whole['num_turns'], 'turn')}, "
        f"ended by {whole['finish_reason'] or 'nothing'}"
    )
    say(f"worker {whole['worker'] or '-'}, {troubles(whole['attempts'], whole['crashes'])}")
    is_episode = len(whole["turns"]) > 1
    for name in ("prompt", *([] if is_episode else ["answer"]), "label"):
        say(f"\n{name}:")
        say(whole[name] or "(not kept)")
    for turn in whole["turns"] if is_episode else ():
        say(f"\n{_turn(turn)}:")
        say("(no tokenizer found)" if turn["text"] is None else turn["text"])
    say("")
    if entries := [{"name": name, "value": value} for name, value in whole["reward_info"].items()]:
        table(entries, ["name", "value"], "reward")
    table(_times(whole), ["event", "at", "after_s"], "times")
    table(whole["uses"], ["subscription", "batch", "version", "staleness", "loss_tokens"], "batches")


def _turn(turn: dict[str, Any]) -> str:
    if turn["versions"] is None:
        return f"{turn['by']}, {many(turn['tokens'], 'token')}"
    oldest, newest = turn["versions"]
    version = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    return f"{turn['by']}, {many(turn['tokens'], 'token')} ({turn['loss_tokens']} with loss), {version}"


def troubles(tries: int, crashes: int) -> str:
    """Format the number of a job's failures."""
    return f"{tries} failed {'try' if tries == 1 else 'tries'}, {crashes} {'crash' if crashes == 1 else 'crashes'}"


def _times(whole: dict[str, Any]) -> list[dict[str, Any]]:
    from penstock.history.row import TIMES

    known = [(name.removesuffix("_s"), whole[name]) for name in TIMES if whole[name]]
    first = min((at for _, at in known), default=0.0)
    return [{"event": name, "at": clock(at), "after_s": round(at - first, 3)} for name, at in known]


def clock(at: float) -> str:
    """Format Unix seconds as a time of day in UTC; an invalid one as a number."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    except (OverflowError, ValueError, OSError):
        return str(at)


def _in_words(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "reward": row["reward"],
        "version": _versions(row),
        "tokens": row["num_generated"],
        "fate": _fate(row),
        "prompt": excerpt(row["prompt"]),
        "answer": excerpt(row["answer"]),
    }


def _versions(row: dict[str, Any]) -> str:
    return str(row["newest"]) if row["oldest"] == row["newest"] else f"{row['oldest']}-{row['newest']}"


def _fate(row: dict[str, Any]) -> str:
    if not row["fate"]:
        return f"({row['reason'] or 'open'})"
    return f"{row['fate']} ({row['reason']})" if row["reason"] else str(row["fate"])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def excerpt(text: str) -> str:
    """Return the beginning of a text, on one line, without terminal control characters."""
    from penstock.text import printable

    line = printable(" ".join(text[: 4 * EXCERPT].split()))
    return line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…"
