"""``penstock run``: run all parts on this machine, as child processes, until the trainer has finished.

    prepare ──> Redis ──> buffer, recorder, trainer, producer, workers or fleet ──> the trainer exits 0
                                                    └─> workers and producer, buffer, recorder, report, Redis

Parts in ``without`` are started by others, for example a custom trainer; the run then continues until it is stopped.

A child that dies is restarted with back-off; our own Redis is restarted on its port if it dies. Ctrl-C (or SIGTERM)
stops everything within seconds, and a second one kills it; a stopped run can be resumed.
"""

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

from rich.console import Console

from penstock.config import Config
from penstock.config.load import save_resolved, secret_environment, without_settings
from penstock.console.launch.children import FINISHING, LAST, SERVING, kill_children, stop_children
from penstock.console.launch.live import Live
from penstock.console.launch.metrics import RunMetrics
from penstock.console.launch.notify import check_notify, message, notify
from penstock.console.launch.observer import Observer
from penstock.console.launch.own_redis import OwnRedis
from penstock.console.launch.placement import Placement, place
from penstock.console.launch.preflight import check, check_data, check_ports
from penstock.console.launch.run_parts import check_parts, parts_of, prepare_logged
from penstock.consumers.grpo.rows import read_rows
from penstock.errors import EXIT_ERROR, EXIT_INTERRUPT, EXIT_PIPE, ConfigError, QueueUnavailable
from penstock.hooks.user_imports import check_user_code
from penstock.metrics.gpu_load import visible_gpus
from penstock.payloads.servers import read
from penstock.payloads.store import open_store
from penstock.protocol import user_failures
from penstock.protocol.scripts import check_schema, run, span
from penstock.records.keys import Keys
from penstock.redis.commands import Client, delete_keys, holds_keys
from penstock.redis.saved_config import CONFIG_FILE
from penstock.redis.server import with_url, write_address
from penstock.system import log_files
from penstock.system.disk import until_room
from penstock.system.logs import formatter
from penstock.system.processes import Child, python_command, python_environment
from penstock.system.run_folder import RunFolder, RunRecord
from penstock.system.stop import Stop
from penstock.text import redact

log = logging.getLogger(__name__)


def clear_keys(config: Config, client: Client, live: Live) -> None:
    """Delete all keys of the run, on the servers that the configuration names. Blocks."""
    keys, stores = Keys(config.run), config.redis.payload_servers
    # Redis only names further servers; do not delete on the strength of that.
    for name in sorted(read(client, keys).servers.keys() - stores):
        live.event(
            f"payload server {name} is not in redis.payload_servers, so the old run's payloads there remain: delete "
            f"them manually, or name it there for `--fresh`"
        )
    for url in stores.values():
        with contextlib.closing(open_store(url)) as store:
            store.check()
            store.delete(keys.prefix)
    delete_keys(client, keys.prefix)


def refuse_another_run(config: Config, client: Client) -> None:
    """Raise ConfigError if Redis holds a run of this name that the run's folder does not know."""
    if holds_keys(client, Keys(config.run).prefix):
        raise ConfigError(
            f"Redis already holds a run {config.run}, and {config.run_dir} does not: "
            "choose another --run=NAME, or delete it with --fresh."
        )


#: Packages whose log records belong to the launcher.
LOGGERS = ("penstock",)


@contextlib.contextmanager
def launcher_log(folder: RunFolder, live: Live, config: Config) -> Iterator[None]:
    """Write the log while the context lasts."""
    file = logging.FileHandler(folder.logs / "launcher.log")
    file.setFormatter(formatter("launcher", config.run, config.logs.format))
    handlers, loggers = [file, _Events(live)], [logging.getLogger(name) for name in LOGGERS]
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
    """Show warnings as events of the live view."""

    def __init__(self, live: Live) -> None:
        super().__init__(logging.WARNING)
        self.live = live

    def emit(self, record: logging.LogRecord) -> None:
        self.live.event(record.getMessage())


Choice = Literal["resume", "fresh"] | None

#: Seconds between two checks of the children.
TICK_S = 0.1

#: Time limit of a failed run's trainer to finish its step and checkpoint, in multiples of its last step.
LONGER = 2.0

#: Seconds between two snapshots.
LOOK_EVERY_S = 1.0


class _Stopped(Exception):
    """Ctrl-C during the start."""


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
        without: parts that are not started (``run_parts.py``); without the trainer the run continues until stopped.
        gpus: names of the GPUs of this machine; None: discover them.

    Raises:
        ConfigError, QueueUnavailable: the start failed; nothing is left behind.
    """
    check_parts(without)
    placement = place(config, visible_gpus() if gpus is None else gpus, without)
    folder, stop = RunFolder(config.run_dir), Stop()
    # A reader that exits (``| head``) stops the run like a closed terminal.
    live = Live(config, console, on_closed=stop.press)
    check_notify(config)
    check_ports(config)
    with folder.held():
        check(config, without=without)
        resume = _decide(choice, folder, live.console)
        clear = choice == "fresh" or (not resume and folder.record() is not None)
        with stop.installed():
            folder.make(resume=resume)
            return _launch(_Run(config, folder, stop, live, placement, without), clear=clear, resume=resume)


def _launch(run: "_Run", *, clear: bool, resume: bool) -> int:
    with launcher_log(run.folder, run.live, run.config):
        try:
            run.start(clear=clear, resume=resume)
        except _Stopped:
            run.abandon()
            return EXIT_PIPE if run.live.closed else EXIT_INTERRUPT
        except BaseException:
            run.abandon()
            raise
        return run.to_the_end()


def _decide(choice: Choice, folder: RunFolder, console: Console) -> bool:
    """Return whether to resume what is in the folder. Asks on a terminal only."""
    if choice == "fresh" or (choice is None and not folder.unfinished()):
        return False
    if choice == "resume":
        if not folder.path.exists():
            raise ConfigError(f"There is no run to resume in {folder.path}: start one without --resume.")
        return True
    said = f"Run {folder.path.name} in {folder.path} is unfinished"
    if console.is_terminal and sys.stdin.isatty():
        answer = console.input(f"{said}. Resume it, or start over? [R/n] ")
        return not answer.strip().lower().startswith("n")
    console.print(f"{said} and is resumed; --fresh starts over.", soft_wrap=True)
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
        self.server: OwnRedis | None = None
        self.observer: Observer | None = None
        self.metrics: RunMetrics | None = None
        self.children: list[Child] = []
        self.record = RunRecord("running", time.time())
        self.started = time.monotonic()
        self.next_look = self.next_log_look = 0.0

    def start(self, *, clear: bool, resume: bool) -> None:
        """Start everything; return when all children are started. Raises the errors of ``launch``."""
        if resume and (old := self.folder.record()):
            self.record.started_s, self.record.active_s = old.started_s, old.active_s
        self._prepare()
        if self.config.prepare is not None:
            check_data(self.config)
            check_user_code(self.config)
        self._start_redis()
        self._start_on_keys(clear=clear, resume=resume)
        save_resolved(self.config, self.folder.path / CONFIG_FILE)
        self.folder.write(self.record)
        synced = self.folder.redis if self.server and self.config.redis.appendfsync == "everysec" else None
        self.metrics = RunMetrics(self.config, self.folder.path, self.children, synced)
        self._start_parts()
        if "trainer" in self.without:
            self.live.event(f'The trainer is yours: Trainer(run="{self.config.run}"). Ctrl-C ends the run.')

    def abandon(self) -> None:
        """After a failed start, end what runs and leave the folder as it was."""
        kill_children(self.children)
        self._close_metrics()
        if self.server is not None:
            self.server.stop()
        self.folder.undo()

    def _prepare(self) -> None:
        if self.config.prepare is None:
            return
        script, *arguments = self.config.prepare
        self.live.event(f"prepare: {Path(script).name}")
        if said := prepare_logged(script, arguments, self.folder.logs / "prepare.log", self._unless_stopped):
            self.live.event(said)

    def _start_redis(self) -> None:
        if self.config.redis.url is None:
            self.server = OwnRedis(self.config, self.folder, self.stop)
            try:
                url = self.server.start()
            except QueueUnavailable:
                self._unless_stopped()
                raise
        else:
            url = self.config.redis.url
        write_address(self.folder.path, url, self.config.redis.payload_servers)
        self.config = with_url(self.config)
        self.observer = Observer(self.config, self.folder, self.live)

    def _start_on_keys(self, *, clear: bool, resume: bool) -> None:
        assert self.observer is not None
        client, keys = self.observer.client, Keys(self.config.run)
        if clear:
            clear_keys(self.config, client, self.live)
        elif not resume:
            refuse_another_run(self.config, client)
        run(client, check_schema(keys))
        user_failures.forget(client, keys)
        # The producer of this start reports the size of its data before a trainer may learn that it has ended.
        run(client, span(keys, None))

    def _start_parts(self) -> None:
        environment, config = self._environment(), str(self.folder.path / CONFIG_FILE)
        for part in parts_of(self.config, self.placement, self.without):
            argv = python_command("penstock.cli", *part.command, "--config", config, *part.arguments)
            log_path = self.folder.logs / f"{part.name}.log"
            child = Child(part.name, argv, environment | part.environment, log_path)
            self.children.append(child)
            self._unless_stopped()
            child.start()

    def _environment(self) -> dict[str, str]:
        return python_environment({**without_settings(os.environ), **secret_environment(self.config)})

    def _unless_stopped(self) -> None:
        if self.stop:
            raise _Stopped

    def to_the_end(self) -> int:
        """Watch until the trainer has finished, Ctrl-C, or a child cannot be kept up; then stop everything."""
        assert self.observer is not None
        try:
            with self.live:
                reason = self._watch(self.observer)
            return self._finish(reason)
        except BaseException as exc:
            self._note_failure(exc)
            raise
        finally:
            # Whatever happened above, no child may outlive the launcher.
            kill_children(self.children)
            self._close_metrics()
            if self.server is not None:
                self.server.stop()

    def _close_metrics(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def _watch(self, observer: Observer) -> str | None:
        """Watch until the run is over; return None, or why it failed."""
        while not self.stop:
            for child in self.children:
                child.restart_if_due()
                if child.ended():
                    if child.name == "trainer" and child.code == 0:
                        return None
                    if child.code == 0 and child.name not in SERVING and not observer.still_shows(child.last_pid):
                        # A worker that was told to drain, or a producer at the end of its data.
                        log.warning("%s is done and left", child.name)
                    elif reason := child.schedule_restart():
                        if child.name in LAST:
                            # The run does not depend on it: missing recordings are counted.
                            log.warning("%s; continuing without it. Its log: %s", reason, child.log_path)
                            continue
                        return f"{reason}; its log {child.log_path} ends with:\n{child.last_words()}"
            if reason := self._keep_redis():
                return reason
            if time.monotonic() >= self.next_look:
                self.next_look = time.monotonic() + LOOK_EVERY_S
                observer.look()
                if self.metrics is not None:
                    self.metrics.look(observer.client)
                if burned := observer.too_many_died():
                    return burned
            self._bound_logs()
            time.sleep(TICK_S)
        return None

    def _bound_logs(self) -> None:
        if time.monotonic() >= self.next_log_look:
            self.next_log_look = time.monotonic() + log_files.LOOK_EVERY_S
            limits = self.config.logs
            log_files.bound(self.folder.log_files(), limits.max_bytes)

    def _keep_redis(self) -> str | None:
        return None if self.server is None else self.server.keep_up()

    def _finish(self, reason: str | None) -> int:
        state: Literal["stopped", "failed", "finished"] = "failed" if reason else "stopped" if self.stop else "finished"
        done = "The trainer is done."
        if state == "finished" and self.observer is not None and self.observer.data_ended():
            done = "The data has ended (data.epochs), and the trainer is done."
        self.live.event({"failed": "The run failed; stopping.", "stopped": self._stopping()}.get(state, done))
        # A failed run may be unattended, so nothing would press Ctrl-C: limit the wait.
        finish_s = math.inf if state == "stopped" else LONGER * (self._last_step_s() or 0.0)
        stop_children(
            self.children,
            self.config,
            self.stop,
            drain=state == "finished",
            meanwhile=self._keep_redis,
            finish_s=finish_s,
        )
        self.record.active_s += time.monotonic() - self.started
        self.record.state, self.record.reason = state, reason or ""
        if state == "finished":
            assert self.observer is not None
            until_room(partial(self.observer.report, self.record.active_s), stopped=lambda: bool(self.stop))
        until_room(partial(self.folder.write, self.record), stopped=lambda: bool(self.stop))
        code = self._say_end(state, reason)
        self._tell_end()
        return code

    def _stopping(self) -> str:
        """Return what a stop waits for, and how long that may take."""
        if not any(child.name == FINISHING and child.alive() for child in self.children):
            return "Stopping."
        step_s = self._last_step_s()
        about = "" if step_s is None else f"; its last step took {step_s:.0f} s"
        return f"Stopping: the trainer finishes its step and writes a checkpoint{about}. Ctrl-C again kills it."

    def _last_step_s(self) -> float | None:
        """Return the seconds of the trainer's last step and publication; None before the first."""
        steps = read_rows(self.folder.path).steps
        return sum(float(steps[-1].get(key) or 0) for key in ("step_s", "publish_s")) if steps else None

    def _say_end(self, state: str, reason: str | None) -> int:
        """Print how the run ended; return the exit code."""
        if state == "failed":
            self.live.event(f"{reason}\nCorrect it and continue with --resume.")
            return EXIT_ERROR
        if state == "stopped":
            self.live.event(f"Run {self.config.run} is stopped; `penstock run ... --resume` continues it.")
            return EXIT_PIPE if self.live.closed else EXIT_INTERRUPT
        return 0

    def _tell_end(self) -> None:
        summary = self.observer.summary if self.observer is not None else {}
        notify(self.config.notify, message(self.config, self.record, summary))

    def _note_failure(self, exc: BaseException) -> None:
        """Record the failure of the launcher, so that its run does not count as running."""
        self.record.state, self.record.reason = "failed", redact(f"{type(exc).__name__}: {exc}")
        with contextlib.suppress(OSError):
            self.folder.write(self.record)
        self._tell_end()
