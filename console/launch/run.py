"""``penstock run``: everything of a run on this machine, as child processes, until the trainer is done.

    prepare ──> Redis ──> buffer, trainer, producer, workers or fleet ──> the trainer exits 0
                                                    └─> workers and producer, buffer, report, Redis

Parts that are left out (``without``) are for others to start: a trainer of one's own, say; the run then goes on until
it is stopped.

A child that dies is started again with back-off; a Redis of our own that dies is started again on its port. Ctrl-C
(or SIGTERM) stops everything within seconds, and a second one kills it; a run that was stopped can go on.
"""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

from rich.console import Console

from console.launch.live import Live
from console.launch.observer import Observer
from console.launch.placement import Placement, place
from console.launch.preflight import check, check_data
from console.launch.run_parts import check_parts, parts_of
from penstock.addresses import is_folder
from penstock.config import Config
from penstock.config.load import redact, save_resolved, secret_environment, without_settings
from penstock.errors import ConfigError, QueueUnavailable
from penstock.logs import FORMAT
from penstock.payloads.folder import PayloadFolder
from penstock.payloads.servers import read
from penstock.protocol import user_failures
from penstock.protocol.keys import Keys
from penstock.protocol.scripts import run, span
from penstock.redis.connect import connect
from penstock.redis.saved_config import CONFIG_FILE
from penstock.redis.server import RedisServer, delete_run, holds_run, kept_password, with_url, write_address
from penstock.system.disk import has_room, until_room
from penstock.system.gpus import visible_gpus
from penstock.system.processes import MAX_DEATHS, Child, last_lines, python_command, python_environment
from penstock.system.run_folder import Record, RunFolder
from penstock.system.stop import Stop
from penstock.system.user_imports import check_user_code

Choice = Literal["resume", "fresh"] | None

#: Between two looks at the children.
TICK_S = 0.1

#: Between two snapshots.
LOOK_EVERY_S = 1.0

#: Longest wait for the end of a child after SIGTERM, beside a worker's own drain.
STOP_S = 10.0

#: After Ctrl-C workers get a second SIGTERM so late: hand back what is partial, do not drain on.
HURRY_S = 2.0

#: Parts that end by themselves only when they are told to; workers that drain need both.
SERVING = ("buffer", "verifiers")

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPT, EXIT_PIPE = 0, 1, 130, 141

log = logging.getLogger(__name__)


class _Stopped(Exception):
    """Ctrl-C while something was being started."""


def launch(
    config: Config,
    choice: Choice = None,
    console: Console | None = None,
    *,
    without: Collection[str] = (),
    gpus: Sequence[str] | None = None,
) -> int:
    """Run to the end and return the exit code: 0 finished, 1 failed, 130 stopped. Blocks.

    Args:
        without: parts that are not started (``run_parts.py``); without the trainer it goes on until stopped.
        gpus: names of the GPUs of this machine; None: those that are found.

    Raises:
        ConfigError, QueueUnavailable: it could not start; nothing of it is left behind.
    """
    check_parts(without)
    placement = place(config, visible_gpus() if gpus is None else gpus, without)
    folder, stop = RunFolder(config.run_dir), Stop()
    # A reader that left (``| head``) stops the run as a closed terminal does.
    live = Live(config, console, on_closed=stop.press)
    with folder.held():
        check(config, trains="trainer" not in without)
        resume = _decide(choice, folder, live.console)
        clear = choice == "fresh" or (not resume and folder.record() is not None)
        with stop.installed():
            folder.make(resume=resume)
            return _launch(_Run(config, folder, stop, live, placement, without), clear=clear, resume=resume)


def _launch(run: "_Run", *, clear: bool, resume: bool) -> int:
    with _logging(run.folder, run.live):
        try:
            run.start(clear=clear, resume=resume)
        except _Stopped:
            run.abandon()
            return EXIT_PIPE if run.live.closed else EXIT_INTERRUPT
        except BaseException:
            run.abandon()
            raise
        return run.to_the_end()


def prepare(config: Config) -> None:
    """Run the configuration's ``prepare`` command, its output on ours. Blocks.

    Raises:
        ConfigError: there is none, or it failed.
    """
    if config.prepare is None:
        raise ConfigError("prepare: the configuration has no such key, so there is nothing to prepare.")
    folder = Path(config.prepare[0]).parent
    try:
        code = subprocess.run([sys.executable, *config.prepare], cwd=folder, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(f"prepare: there is no folder {folder}; correct the path, or remove the key.") from None
    if code != 0:
        raise ConfigError(f"prepare: {' '.join(config.prepare)} ended with exit code {code}; its output says why.")


def serve_redis(config: Config) -> int:
    """Run the run's own Redis server until SIGTERM or Ctrl-C; its address is left in the run's folder. Blocks.

    Raises:
        ConfigError: ``redis.url`` names another one, or the port is in use.
        QueueUnavailable: the server died.
    """
    if config.redis.url is not None:
        raise ConfigError("redis.url names a Redis that runs elsewhere: remove the key to run one here.")
    stop, server = Stop(), _server(config, RunFolder(config.run_dir))
    with stop.installed():
        try:
            write_address(config.run_dir, server.start(stopped=lambda: bool(stop)))
            log.info("Redis answers at %s; its data are in %s", server.url, server.folder)
            while not stop:
                if not server.alive():
                    raise QueueUnavailable(
                        f"The Redis server died; its log {server.log_path} ends with:\n{last_lines(server.log_path, 5)}"
                    )
                time.sleep(TICK_S)
        finally:
            server.stop()
    return EXIT_OK


def _server(config: Config, folder: RunFolder) -> RedisServer:
    return RedisServer(
        folder.redis,
        port=config.redis.port,
        password=kept_password(folder.redis),
        appendfsync=config.redis.appendfsync,
        max_memory_bytes=config.redis.max_memory_bytes,
    )


def _decide(choice: Choice, folder: RunFolder, console: Console) -> bool:
    """Whether to go on with what is in the folder. Asks only on a terminal."""
    if choice == "fresh" or (choice is None and not folder.unfinished()):
        return False
    if choice == "resume":
        if not folder.path.exists():
            raise ConfigError(f"There is no run to resume in {folder.path}: leave --resume away to start one.")
        return True
    said = f"Run {folder.path.name} in {folder.path} is unfinished"
    if console.is_terminal and sys.stdin.isatty():
        answer = console.input(f"{said}. Go on with it, or start anew? [R/n] ")
        return not answer.strip().lower().startswith("n")
    console.print(f"{said} and goes on; --fresh starts anew.", soft_wrap=True)
    return True


class _Run:
    """One start of a run, from Redis to report."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        stop: Stop,
        live: Live,
        placement: Placement,
        without: Collection[str] = (),
    ) -> None:
        self.config = config
        self.folder = folder
        self.stop = stop
        self.live = live
        self.placement = placement
        self.without = without
        self.server: RedisServer | None = None
        self.server_deaths: list[float] = []
        self.observer: Observer | None = None
        self.children: list[Child] = []
        self.record = Record("running", time.time())
        self.started = time.monotonic()
        self.next_look = 0.0
        #: True while its own Redis is down because its disk is full.
        self.waits_for_room = False

    # -- start

    def start(self, *, clear: bool, resume: bool) -> None:
        """Bring everything up; returns when all children are started. See ``launch`` for what it raises."""
        if resume and (old := self.folder.record()):
            self.record.started_s, self.record.active_s = old.started_s, old.active_s
        self._prepare()
        if self.config.prepare is not None:
            check_data(self.config)
            check_user_code(self.config)
        self._start_redis()
        self._clear_keys(clear=clear, resume=resume)
        save_resolved(self.config, self.folder.path / CONFIG_FILE)
        self.folder.write(self.record)
        environment, config = self._environment(), str(self.folder.path / CONFIG_FILE)
        for part in parts_of(self.config, self.placement, self.without):
            argv = python_command("penstock.cli", *part.command, "--config", config, *part.arguments)
            log_path = self.folder.logs / f"{part.name}.log"
            child = Child(part.name, argv, environment | part.environment, log_path)
            self.children.append(child)
            self._unless_stopped()
            child.start()
        if "trainer" in self.without:
            self.live.event(f'The trainer is yours: Trainer(run="{self.config.run}"). Ctrl-C ends the run.')

    def abandon(self) -> None:
        """After a start that failed: end what runs, and leave the folder as it was."""
        self._kill()
        if self.server is not None:
            self.server.stop()
        self.folder.undo()

    def _prepare(self) -> None:
        if self.config.prepare is None:
            return
        self.live.event(f"prepare: {Path(self.config.prepare[0]).name}")
        child = Child(
            "prepare",
            [sys.executable, *self.config.prepare],
            dict(os.environ),
            self.folder.logs / "prepare.log",
            folder=Path(self.config.prepare[0]).parent,
        )
        self.children.append(child)
        child.start()
        while not child.ended():
            self._unless_stopped()
            time.sleep(TICK_S)
        self.children.remove(child)
        if child.code != 0:
            raise ConfigError(
                f"prepare: {child.argv[1]} ended with {child.how()}, its last lines:\n{child.last_words()}"
            )
        if said := child.last_words(1):
            self.live.event(said)

    def _start_redis(self) -> None:
        if self.config.redis.url is None:
            self.server = _server(self.config, self.folder)
            try:
                url = self.server.start(stopped=lambda: bool(self.stop))
            except QueueUnavailable:
                self._unless_stopped()
                raise
        else:
            url = self.config.redis.url
        write_address(self.folder.path, url, self.config.redis.payload_servers)
        self.config = with_url(self.config)
        self.observer = Observer(self.config, self.folder, self.live)

    def _clear_keys(self, *, clear: bool, resume: bool) -> None:
        assert self.observer is not None
        assert self.config.redis.url is not None
        keys = Keys(self.config.run)
        prefix = keys.prefix
        stores = self.config.redis.payload_servers
        user_failures.forget(self.observer.client, keys)
        # The producer of this start says how long its data is, before a trainer may be told that it has ended.
        run(self.observer.client, span(keys, None))
        # What Redis names is where somebody said that payloads lie: nothing is deleted on its word.
        for name in sorted(read(self.observer.client, keys).servers.keys() - stores) if clear else []:
            self.live.event(
                f"payload server {name} is not in redis.payload_servers, so what the old run left there stays: delete "
                f"it by hand, or name it there for `--fresh`"
            )
        for url in [*stores.values(), self.config.redis.url] if clear else []:
            if is_folder(url):
                PayloadFolder(url).delete(prefix)
                continue
            with connect(url) as client:
                delete_run(client, prefix)
        if not clear and not resume and holds_run(self.observer.client, prefix):
            raise ConfigError(
                f"Redis already holds a run {self.config.run}, and {self.folder.path} does not: "
                "choose another --run=NAME, or delete it with --fresh."
            )

    def _environment(self) -> dict[str, str]:
        return python_environment({**without_settings(os.environ), **secret_environment(self.config)})

    def _unless_stopped(self) -> None:
        if self.stop:
            raise _Stopped

    # -- run

    def to_the_end(self) -> int:
        """Watch until the trainer is done, Ctrl-C, or a child that cannot be kept up; then stop everything."""
        assert self.observer is not None
        try:
            with self.live:
                reason = self._watch(self.observer)
            return self._finish(reason)
        except BaseException as exc:
            self._note_failure(exc)
            raise
        finally:
            # Whatever happened in here, nothing outlives it.
            self._kill()
            if self.server is not None:
                self.server.stop()

    def _watch(self, observer: Observer) -> str | None:
        """Returns when the run is over: None, or why it failed."""
        while not self.stop:
            for child in self.children:
                child.restart_if_due()
                if child.ended():
                    if child.name == "trainer" and child.code == 0:
                        return None
                    if child.code == 0 and child.name not in SERVING and not observer.still_shows(child.last_pid):
                        # A worker told to drain, or a producer at the end of its data.
                        log.warning("%s is done and left", child.name)
                    elif reason := child.schedule_restart():
                        return f"{reason}; its log {child.log_path} ends with:\n{child.last_words()}"
            if reason := self._keep_redis():
                return reason
            if time.monotonic() >= self.next_look:
                self.next_look = time.monotonic() + LOOK_EVERY_S
                observer.look()
                if burned := observer.too_many_died():
                    return burned
            time.sleep(TICK_S)
        return None

    def _keep_redis(self) -> str | None:
        if self.server is None or self.server.alive():
            return None
        if not has_room(self.server.folder):
            # With appendfsync always it ends rather than lose a write. The parts wait for it meanwhile.
            if not self.waits_for_room:
                log.warning("Redis ended for want of room in %s, and is started when there is some", self.server.folder)
            self.waits_for_room = True
            return None
        self.waits_for_room = False
        now = time.monotonic()
        self.server_deaths = [*(death for death in self.server_deaths if death > now - 60.0), now]
        if len(self.server_deaths) >= MAX_DEATHS:
            return f"Redis died {MAX_DEATHS} times in 60 s; its log {self.server.log_path} says why"
        log.warning("Redis died and is started again on port %d", self.server.port)
        try:
            self.server.start(stopped=lambda: bool(self.stop))
        except (ConfigError, QueueUnavailable) as exc:
            return None if self.stop else f"Redis died and could not be started again: {exc}"
        return None

    # -- end

    def _finish(self, reason: str | None) -> int:
        state: Literal["stopped", "failed", "finished"] = "failed" if reason else "stopped" if self.stop else "finished"
        done = "The trainer is done."
        if state == "finished" and self.observer is not None and self.observer.data_ended():
            done = "The data has ended (data.epochs), and the trainer is done."
        self.live.event({"failed": "The run failed; stopping.", "stopped": "Stopping."}.get(state, done))
        self._stop_children(drain=state == "finished")
        self.record.active_s += time.monotonic() - self.started
        self.record.state, self.record.reason = state, reason or ""
        if state == "finished":
            assert self.observer is not None
            until_room(partial(self.observer.report, self.record.active_s), stopped=lambda: bool(self.stop))
        until_room(partial(self.folder.write, self.record), stopped=lambda: bool(self.stop))
        if state == "failed":
            self.live.event(f"{reason}\nCorrect it and go on with --resume.")
            return EXIT_FAILED
        if state == "stopped":
            self.live.event(f"Run {self.config.run} is stopped; `penstock run ... --resume` goes on.")
            return EXIT_PIPE if self.live.closed else EXIT_INTERRUPT
        return EXIT_OK

    def _note_failure(self, exc: BaseException) -> None:
        """What ends the launcher itself is no run that still runs."""
        self.record.state, self.record.reason = "failed", redact(f"{type(exc).__name__}: {exc}")
        with contextlib.suppress(OSError):
            self.folder.write(self.record)

    def _stop_children(self, *, drain: bool) -> None:
        first = [child for child in self.children if child.name not in SERVING]
        last = [child for child in self.children if child.name in SERVING]
        limit_s = self.config.worker.drain_timeout_s + STOP_S if drain else STOP_S
        if self.config.fleet.models:
            # It ends its workers first, then what they need.
            limit_s += 2 * STOP_S
        presses = self.stop.count
        self._stop_some(first, limit_s, presses, hurry=not drain)
        self._stop_some(last, STOP_S, presses, hurry=False)

    def _stop_some(self, children: list[Child], limit_s: float, presses: int, *, hurry: bool) -> None:
        """SIGTERM, a second one to hurry, and SIGKILL after ``limit_s`` or one more Ctrl-C."""
        began = time.monotonic()
        for child in children:
            child.terminate()
        hurried = not hurry
        while any(child.alive() for child in children):
            waited_s = time.monotonic() - began
            # Ctrl-C while a finished run drains means: now.
            if not hurried and waited_s >= HURRY_S:
                hurried = True
                for child in children:
                    child.terminate()
            if self.stop.count > presses or waited_s >= limit_s:
                for child in filter(Child.alive, children):
                    log.warning("%s did not end in %.1f s and is killed", child.name, waited_s)
                    child.kill()
                return
            if self.server is not None and not self.server.alive() and not self.stop.count > presses:
                self._keep_redis()
            time.sleep(TICK_S / 2)

    def _kill(self) -> None:
        for child in self.children:
            child.kill()


@contextlib.contextmanager
def _logging(folder: RunFolder, live: Live) -> Iterator[None]:
    """The launcher's own log: all in ``launcher.log``, warnings shown as well."""
    file = logging.FileHandler(folder.logs / "launcher.log")
    file.setFormatter(logging.Formatter(FORMAT.format(part="launcher"), datefmt="%Y-%m-%d %H:%M:%S"))
    handlers, loggers = [file, _Events(live)], [logging.getLogger(name) for name in ("console", "penstock")]
    for logger, handler in product(loggers, handlers):
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, handler in product(loggers, handlers):
            logger.removeHandler(handler)
        for handler in handlers:
            handler.close()


class _Events(logging.Handler):
    """Warnings of the launcher, shown above the table."""

    def __init__(self, live: Live) -> None:
        super().__init__(logging.WARNING)
        self.live = live

    def emit(self, record: logging.LogRecord) -> None:
        self.live.event(record.getMessage())
