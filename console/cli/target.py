"""Find the run that a command inspects: in its Redis, or, once it is over, in a copy of what its Redis left."""

import shlex
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.console.terminal import say
from penstock.errors import ConfigError, PenstockError, ProtocolError, QueueUnavailable
from penstock.names import Lane
from penstock.records.codec import name_shown
from penstock.text import format_exc

if TYPE_CHECKING:
    from penstock.redis.server import RedisServer
    from penstock.system.run_folder import RunRecord


DIRECTORY = Path("runs")


class RunIsOver(QueueUnavailable):
    """The Redis of ``penstock run`` ended with the run."""


class RunUnknown(ConfigError):
    """Redis answers, but has no such run."""


class Target:
    """The run that a command inspects. Raises ConfigError if it is not found, or has another schema.

    Args:
        timeout_s: longest wait for one answer of its Redis; None: the default of all parts.
        copies: whether to serve a copy of the data of a run that is over.
    """

    def __init__(
        self, run: str | None, url: str | None, directory: Path, *, timeout_s: float | None = None, copies: bool = False
    ) -> None:
        from redis.exceptions import ResponseError

        from penstock.protocol import scripts
        from penstock.records.keys import Keys
        from penstock.redis.connect import TIMEOUT_S, connect
        from penstock.redis.server import read_address
        from penstock.text import redact

        name = run or newest_run(directory)
        #: Whether the run is over, and this is a copy of its data.
        self.is_copy = False
        self.keys = Keys(name)
        given, url = url, url or read_address(directory / name)
        if url is None:
            raise ConfigError(f"No Redis is known for run {name!r}: give --redis URL, or --directory of its folder.")
        try:
            self.client = connect(url, timeout_s=timeout_s or TIMEOUT_S)
        except QueueUnavailable:
            over = _record_if_over(directory / name) if given is None else None
            if over is None:
                raise
            url = _serve_copy(self, directory / name, over) if copies else None
            if url is None:
                raise _advice(directory / name, over) from None
            self.client, self.is_copy = connect(url), True
        self.url = url
        keys = self.keys
        # Parts still publish their presence if Redis lost everything else.
        shown = (keys.workers, keys.parts, keys.trainers)
        if not self.client.exists(keys.jobs(Lane.TRAIN), keys.subs, keys.source, keys.clock, *shown):
            raise RunUnknown(f"Redis at {redact(url)} knows no run {name!r}: correct --run, --redis or --directory.")
        try:
            scripts.run(self.client, scripts.check_schema(self.keys))
        except ResponseError as exc:
            raise ProtocolError(f"The schema of run {name!r} cannot be read from Redis: {format_exc(exc)}.") from exc

    @classmethod
    def named(cls, run: str | None, redis: str | None, directory: Path, config: Path | None) -> Self:
        """Return the run that the options of a command name."""
        return cls(*run_of(run, redis, directory, config), copies=cls is Target)

    def models(self) -> list[str]:
        return [name_shown(k[8:]) for k in self.client.hkeys(self.keys.clock) if k.startswith(b"version:")]

    def subs(self) -> list[str]:
        fields = self.client.hkeys(self.keys.subs)
        return sorted(name_shown(field[4:]) for field in fields if field.startswith(b"sub:"))

    def requeue(self, jobs: Sequence[str]) -> list[str]:
        """Requeue dead-lettered jobs with all their attempts; return those that were. Blocks for a round trip each."""
        from penstock.protocol import scripts

        model = next(iter(self.models()), "policy")
        return [one for one in jobs if scripts.run(self.client, scripts.requeue(self.keys, one, model))]

    def purge(self, jobs: Sequence[str]) -> list[str]:
        """Purge dead-lettered jobs; return those that were. Blocks for a round trip each."""
        from penstock.protocol import scripts
        from penstock.records.job import JobState

        subs = self.subs()
        # A job that was requeued meanwhile is kept.
        calls = ((one, scripts.cancel(self.keys, one, subs, only=JobState.DEAD)) for one in jobs)
        return [one for one, call in calls if scripts.run(self.client, call) == JobState.DEAD]


class LiveTarget(Target):
    """The run that a command changes: one that is over is refused."""


def run_of(
    run: str | None, redis: str | None, directory: Path, config: Path | None
) -> tuple[str | None, str | None, Path]:
    """Return name, Redis and parent folder of the run; ``config``: the YAML file that has those not given."""
    if config is None:
        return run, redis, directory
    from penstock.config.load import load_config

    loaded = load_config(config, [])
    parent = loaded.run_dir.parent if directory == DIRECTORY else directory
    return run or loaded.run, redis or loaded.redis.url, parent


def _record_if_over(folder: Path) -> "RunRecord | None":
    """Return the record of a run whose Redis ended with ``penstock run``; else None."""
    from penstock.system.run_folder import RunFolder

    run = RunFolder(folder)
    return run.record() if run.is_over() else None


def _serve_copy(target: Target, folder: Path, record: "RunRecord") -> str | None:
    """Serve a copy of what the run's Redis left, until ``target`` is gone; None if that is impossible. Blocks."""
    from penstock.redis.server import RedisServer, kept_password

    left = folder / "redis"
    if not any(left.glob("appendonly*")):
        return None
    copy = Path(tempfile.mkdtemp(prefix="penstock-"))
    server: RedisServer | None = None
    try:
        shutil.copytree(left, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("lock", "*.log", "*.conf"))
        server = RedisServer(copy, password=kept_password(copy), appendfsync="always")
        url = server.start()
    except (OSError, shutil.Error, PenstockError) as exc:
        _end_copy(server, copy)
        say(f"the data of run {folder.name} cannot be served: {exc}", err=True)
        return None
    weakref.finalize(target, _end_copy, server, copy)
    why = f": {record.reason}" if record.reason else ""
    say(f"run {folder.name} is over ({record.state}{why}); this is what its Redis held at the end", err=True)
    return url


def _end_copy(server: "RedisServer | None", copy: Path) -> None:
    if server is not None:
        server.kill()
    shutil.rmtree(copy, ignore_errors=True)


def _advice(folder: Path, record: "RunRecord") -> RunIsOver:
    from penstock.redis.saved_config import CONFIG_FILE

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
