"""Shell completion of ids, for the run named on the command line, or the newest.

Each completion is fast and bounded, and silent on errors: the user is typing, and the command itself reports them.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

#: Most ids offered, time limit of a scan, and of an answer of Redis.
MOST, LOOK_S, ANSWER_S = 100, 0.5, 0.5

#: Maps the command line so far and the unfinished word to its completions.
Completion = Callable[[typer.Context, str], list[str]]


def runs(context: typer.Context, begun: str) -> list[str]:
    """Return runs under --directory, newest first."""
    from penstock.console.cli.target import run_folders

    return _begun(begun, (path.name for path in run_folders(_directory(context), "run.json", "redis.json")))


def _directory(context: typer.Context) -> Path:
    return Path(context.params.get("directory") or "runs")


def _begun(begun: str, words: Iterable[str]) -> list[str]:
    until = time.monotonic() + LOOK_S
    found: dict[str, None] = {}
    for word in words:
        if word.startswith(begun) and word.isprintable():
            found[word] = None
        if len(found) >= MOST or time.monotonic() > until:
            break
    return list(found)


def _silent(complete: Completion) -> Completion:
    """Wrap a completion: offer nothing if a run, its Redis or its files cannot be read; bugs still raise."""

    def silent(context: typer.Context, begun: str) -> list[str]:
        from redis.exceptions import RedisError

        from penstock.errors import PenstockError

        try:
            return complete(context, begun)
        except (PenstockError, RedisError, OSError):
            return []

    return silent


def _of_run(read: Callable[[Any, str], Iterable[str]]) -> Completion:
    """Complete with the result of ``read`` on the run's Redis."""

    def complete(context: typer.Context, begun: str) -> list[str]:
        from penstock.console.cli.target import Target

        asked = context.params
        target = Target(asked.get("run"), asked.get("redis"), _directory(context), timeout_s=ANSWER_S)
        return _begun(begun, read(target, begun))

    return _silent(complete)


def _jobs(target: Any, begun: str) -> Iterable[str]:
    from penstock.redis.commands import scan_keys

    prefix = target.keys.group("")
    return (key.removeprefix(prefix) for key in scan_keys(target.client, prefix + begun))


def _payload_servers(target: Any, begun: str) -> Iterable[str]:
    from penstock.payloads.servers import read

    return sorted(read(target.client, target.keys).servers)


def _batches(target: Any, begun: str) -> Iterable[str]:
    from penstock.protocol.subs import list_subscriptions

    rows = list_subscriptions(target.client, target.keys)
    newest = max((int(row["cut"]) for row in rows if isinstance(row.get("cut"), int)), default=0)
    return map(str, range(newest, 0, -1))


def _ids(name: str, *fields: str) -> Completion:
    """Complete with these fields of a resource's rows."""

    def read(target: Any, begun: str) -> Iterable[str]:
        from penstock.console.resources import RESOURCES

        rows = RESOURCES[name].rows(target.client, target.keys)
        return (str(row[field]) for row in rows for field in fields)

    return _of_run(read)


jobs = _of_run(_jobs)
buried = _ids("dead", "job")
workers = _ids("workers", "name", "started_as")
subscriptions = _of_run(lambda target, begun: target.subs())
payload_servers = _of_run(_payload_servers)
batches = _of_run(_batches)


@_silent
def samples(context: typer.Context, begun: str) -> list[str]:
    """Return the latest samples of the run's history; needs no Redis."""
    from penstock.console.cli.target import newest_run
    from penstock.console.read.samples import open_samples
    from penstock.history.filters import Filters, Sort

    directory = _directory(context)
    reader = open_samples(directory / (context.params.get("run") or newest_run(directory)))
    job = begun.rpartition("/")[0] if begun.count("/") == 3 else ""
    page = reader.rows(Filters(job=job), Sort.RECORDED, 10 * MOST, "", ascending=False)
    return _begun(begun, (row.id for row in page.rows))
