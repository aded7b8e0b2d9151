"""Find the run that a command inspects."""

import shlex
from pathlib import Path

from penstock.errors import ConfigError, ProtocolError, QueueUnavailable
from penstock.names import Lane
from penstock.records.codec import name_shown
from penstock.text import format_exc


class RunIsOver(QueueUnavailable):
    """The Redis of ``penstock run`` ended with the run."""


class RunUnknown(ConfigError):
    """Redis answers, but has no such run."""


class Target:
    """The run that a command inspects. Raises ConfigError if it is not found, or has another schema.

    Args:
        timeout_s: longest wait for one answer of its Redis; None: the default of all parts.
    """

    def __init__(self, run: str | None, url: str | None, directory: Path, *, timeout_s: float | None = None) -> None:
        from redis.exceptions import ResponseError

        from penstock.protocol import scripts
        from penstock.records.keys import Keys
        from penstock.redis.connect import TIMEOUT_S, connect
        from penstock.redis.server import read_address
        from penstock.text import redact

        name = run or newest_run(directory)
        self.keys = Keys(name)
        given, url = url, url or read_address(directory / name)
        if url is None:
            raise ConfigError(f"No Redis is known for run {name!r}: give --redis URL, or --directory of its folder.")
        self.url = url
        try:
            self.client = connect(url, timeout_s=timeout_s or TIMEOUT_S)
        except QueueUnavailable as exc:
            raise (_with_its_run(directory / name) if given is None else None) or exc from None
        keys = self.keys
        # Parts still publish their presence if Redis lost everything else.
        shown = (keys.workers, keys.parts, keys.trainers)
        if not self.client.exists(keys.jobs(Lane.TRAIN), keys.subs, keys.source, keys.clock, *shown):
            raise RunUnknown(f"Redis at {redact(url)} knows no run {name!r}: correct --run, --redis or --directory.")
        try:
            scripts.run(self.client, scripts.check_schema(self.keys))
        except ResponseError as exc:
            raise ProtocolError(f"The schema of run {name!r} cannot be read from Redis: {format_exc(exc)}.") from exc

    def models(self) -> list[str]:
        return [name_shown(k[8:]) for k in self.client.hkeys(self.keys.clock) if k.startswith(b"version:")]

    def subs(self) -> list[str]:
        fields = self.client.hkeys(self.keys.subs)
        return sorted(name_shown(field[4:]) for field in fields if field.startswith(b"sub:"))


def _with_its_run(folder: Path) -> RunIsOver | None:
    """Return an error if the Redis of ``penstock run`` ended with the run, with advice how to inspect it; else None."""
    from penstock.redis.saved_config import CONFIG_FILE
    from penstock.system.run_folder import RunFolder

    run = RunFolder(folder)
    record = run.record()
    if record is None or run.is_held() or not run.redis.is_dir():
        return None
    config = shlex.quote(str(folder / CONFIG_FILE))
    return RunIsOver(
        f"Run {folder.name} is over ({record.state}), and its Redis ended with it: `penstock redis --config {config} "
        f"--redis.url=null` serves what it left; the files of the run are in {folder}."
    )


def newest_run(directory: Path) -> str:
    """Return the name of the run that was started last. Raises ConfigError if there is none."""
    found = run_folders(directory, "redis.json")
    if not found:
        raise ConfigError(f"There is no run under {directory}: name one with --run, and its --redis or --directory.")
    return found[0].name


def run_folders(directory: Path, *marks: str) -> list[Path]:
    """Return folders of runs, identified by one of these files, newest first; unreadable ones are skipped.

    Blocks for the disk.
    """
    found = []
    for path in directory.glob("*"):
        times = [time for mark in marks if (time := _written_s(path / mark)) is not None]
        if times and path.suffix != ".prev":
            found.append((-max(times), path.name))
    return [directory / name for _, name in sorted(found)]


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
