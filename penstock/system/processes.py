"""Child processes of the launcher: own session, own log, restarted with backoff, never outliving their parent."""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import EXIT_CONFIG
from penstock.system.log_files import mark
from penstock.system.stop import pause_s
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
#: First wait before a restart; doubles with each exit in the window, up to the longest.
BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with(name: str = "SIGKILL") -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that makes the kernel send this signal to the child when its parent thread ends.

    Linux only, None elsewhere. Start such children from the main thread.
    """
    if _LIBC is None:
        return None
    libc, number, parent = _LIBC, int(signal.Signals[name]), os.getpid()

    def set_it() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        # The parent may have died before prctl.
        if os.getppid() != parent:
            os._exit(1)

    return set_it


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when the process ``parent``, which started it, ends (Linux).

    For processes not started by ``Child``, such as ranks. None: the parent by multiprocessing.
    """
    if parent is None:
        process = multiprocessing.parent_process()
        parent = os.getppid() if process is None else process.pid
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


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
    """

    def __init__(
        self, name: str, argv: list[str], env: dict[str, str], log_path: Path, folder: Path | None = None
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
        self._started_at = 0.0
        self._deaths: deque[float] = deque()
        self._config_deaths = 0
        self._restart_at: float | None = None
        self._mark = mark(log_path)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def age_s(self) -> float:
        """Seconds since its latest start."""
        return time.monotonic() - self._started_at

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it; returns at once."""
        self._restart_at = None
        self.num_starts += 1
        self._started_at = time.monotonic()
        self._mark = mark(self.log_path)
        with self.log_path.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv,
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with(),
            )
        log.info("%s started, pid %d", self.name, self.process.pid)

    def ended(self) -> bool:
        """Return True once after the process ended by itself; ``code`` is its exit code."""
        if self.process is None or self.process.poll() is None:
            return False
        self.code, group = self.process.returncode, self.process.pid
        self.last_pid = group
        self.process = None
        # Its own children, if it left any in its session.
        _kill_group(group)
        return True

    def schedule_restart(self) -> str | None:
        """Record an exit and schedule the next start; return the reason if it exited too often."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATHS_WINDOW_S:
            self._deaths.popleft()
        self._config_deaths = self._config_deaths + 1 if self.code == EXIT_CONFIG else 0
        if self._config_deaths >= 2:
            return f"{self.name} refuses its configuration"
        if len(self._deaths) >= MAX_DEATHS:
            return f"{self.name} died {len(self._deaths)} times in {DEATHS_WINDOW_S:g} s, last by {self.how()}"
        wait_s = pause_s(len(self._deaths), BACKOFF_S, MAX_BACKOFF_S)
        self._restart_at = now + wait_s
        said = utf8_safe(self.last_words(1), MAX_SAID)
        why = f"; its log {self.log_path} ends with: {said}" if said else ""
        log.warning("%s ended by %s and is started again in %g s%s", self.name, self.how(), wait_s, why)
        return None

    def restart_if_due(self) -> None:
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self.start()

    def how(self) -> str:
        """Return how it ended, as text."""
        if self.code is not None and self.code < 0:
            return f"signal {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"

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

    def kill(self) -> None:
        """Send SIGKILL to it and to its children in its session; block until it is gone."""
        self._restart_at = None
        if self.process is not None:
            _kill_group(self.process.pid)
            self.process.wait()
            self.code = self.process.returncode
            self.process = None


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
