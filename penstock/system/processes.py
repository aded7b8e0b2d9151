"""Child processes: own session, own log, restarted with backoff, never outliving their parent."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import EXIT_CONFIG
from penstock.system import keeper
from penstock.system.log_files import mark
from penstock.system.restarts import Restarts
from penstock.text import MAX_SAID, utf8_safe

log = logging.getLogger(__name__)

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_loopback(url: str) -> bool:
    """Return whether a URL is HTTP on this machine's loopback interface. Raises ValueError if it is invalid."""
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname in _LOOPBACK


#: More exits than this of one child within the window stop the run.
MAX_DEATHS = 5
DEATHS_WINDOW_S = 60.0
#: Shortest wait before a restart; it doubles with each exit in the window, up to the longest.
BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
#: Longest wait for a keeper to kill what it keeps.
KILL_S = 30.0


def python_command(module: str, *arguments: str) -> list[str]:
    """argv of one of our modules under our own interpreter; the current folder must not hide our packages (-P)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` changed so that ``python_command`` finds our packages, also in a checkout."""
    home = Path(__file__).resolve().parents[2]
    if home.name in ("site-packages", "dist-packages"):
        return dict(environ)
    paths = [str(home), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


class Child:
    """One named process that is kept running.

    Args:
        argv: the command.
        env: its complete environment.
        log_path: its stdout and stderr are appended to it.
        folder: its working directory; None: ours.
        kept: run it under a keeper (``penstock.system.keeper``), so that its descendants end with it too.
        parent_signal: sent by the kernel when the thread that started it ends; unused if ``kept``.
    """

    def __init__(
        self,
        name: str,
        argv: list[str],
        env: Mapping[str, str],
        log_path: Path,
        folder: Path | None = None,
        *,
        kept: bool = False,
        parent_signal: str = "SIGKILL",
    ) -> None:
        self.name = name
        self.folder = folder
        self.argv = argv
        self.env = env
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None
        #: Exit code of the last process that ended; negative: a signal.
        self.code: int | None = None
        #: Pid of that process.
        self.last_pid: int | None = None
        self.num_starts = 0
        self.restarts = Restarts(BACKOFF_S, MAX_BACKOFF_S, DEATHS_WINDOW_S)
        self._kept = kept
        self._parent_signal = parent_signal
        #: Pipe to the keeper; closing it kills the process.
        self._life = -1
        self._started_at = 0.0
        self._config_deaths = 0
        self._restart_at: float | None = None
        self._mark = mark(log_path)

    @property
    def pid(self) -> int | None:
        """Its pid, or that of its keeper."""
        return self.process.pid if self.process else None

    @property
    def age_s(self) -> float:
        """Seconds since its latest start."""
        return time.monotonic() - self._started_at

    @property
    def log_start(self) -> int:
        """Position in its log at which its latest process began."""
        return self._mark.start

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, files: Sequence[int] = ()) -> None:
        """Start it; returns at once.

        Args:
            files: file descriptors that it inherits.
        """
        self._restart_at = None
        self.num_starts += 1
        self._started_at = time.monotonic()
        self._mark = mark(self.log_path)
        pipe, argv = -1, self.argv
        if self._kept:
            pipe, self._life = os.pipe()
            argv, files = keeper.command(pipe, argv), [pipe, *files]
        try:
            with self.log_path.open("ab") as out:
                self.process = subprocess.Popen(
                    argv,
                    env=self.env,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=files,
                    preexec_fn=None if self._kept else keeper.die_with(self._parent_signal),
                )
        finally:
            if pipe >= 0:
                os.close(pipe)
        log.info("%s started, pid %d", self.name, self.process.pid)

    def ended(self) -> bool:
        """Return True once after the process ended by itself; ``code`` is its exit code."""
        if self.process is None or self.process.poll() is None:
            return False
        # Its own children, if it left any in its session.
        _kill_group(self.process.pid)
        self._note_end()
        return True

    def _note_end(self) -> None:
        assert self.process is not None
        self.code, self.last_pid, self.process = self.process.returncode, self.process.pid, None
        self.hang_up()

    def hang_up(self) -> None:
        """Have the keeper kill the process and its descendants; returns at once. May be called again."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    async def wait(self) -> None:
        """Wait until the process has ended."""
        loop = asyncio.get_running_loop()
        while self.alive():
            assert self.process is not None
            over, pidfd = asyncio.Event(), os.pidfd_open(self.process.pid)
            loop.add_reader(pidfd, over.set)
            try:
                await over.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)

    def schedule_restart(self) -> str | None:
        """Record an exit and schedule the next start; return the reason if it exited too often."""
        self.restarts.note_failure()
        self._config_deaths = self._config_deaths + 1 if self.code == EXIT_CONFIG else 0
        if self._config_deaths >= 2:
            return f"{self.name} refuses its configuration"
        if self.restarts.count >= MAX_DEATHS:
            return f"{self.name} died {self.restarts.count} times in {DEATHS_WINDOW_S:g} s, last by {self.how()}"
        wait_s = max(BACKOFF_S, self.restarts.wait_s)
        self.restart_in(wait_s)
        said = utf8_safe(self.last_words(1), MAX_SAID)
        why = f"; its log {self.log_path} ends with: {said}" if said else ""
        log.warning("%s ended by %s and is started again in %g s%s", self.name, self.how(), wait_s, why)
        return None

    def restart_in(self, wait_s: float) -> None:
        """Schedule the next start."""
        self._restart_at = time.monotonic() + wait_s

    def restart_if_due(self) -> None:
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self.start()

    def how(self) -> str:
        """Return how it ended, as text."""
        return end_text(self.code)

    def last_words(self, count: int = 12) -> str:
        """Return the last lines that its latest process wrote."""
        return self._mark.last_lines(count)

    def terminate(self) -> None:
        """Send SIGTERM, and do not restart."""
        self._restart_at = None
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            # A stopped process handles no other signal.
            self.process.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float) -> bool:
        """Send SIGTERM, and SIGKILL after ``timeout_s``; return whether it ended in time. Blocks until it is gone."""
        self.terminate()
        try:
            if self.process is not None:
                self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """Kill it and its children in its session, or all descendants if it is kept; block until it is gone."""
        self._restart_at = None
        if self.process is None:
            return
        if self._kept:
            self.hang_up()
            self.process.send_signal(signal.SIGCONT)  # a stopped keeper does nothing
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_S)
        _kill_group(self.process.pid)
        self.process.wait()
        self._note_end()


def end_text(code: int | None) -> str:
    """Return an exit code as text; negative, or above 128 as shells have it: a signal."""
    number = -code if code is not None and code < 0 else (code or 0) - 128
    return f"signal {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
