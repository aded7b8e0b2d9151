"""Processes that a fleet keeps on this machine: restarted when they die, not when they were asked to end."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.workers.fleet.launcher import ProcessState, Spec
from penstock.workers.fleet.local import LocalProcess
from tests.integration.processes import open_pidfds, wait_gone

#: Starts a process in a session of its own, names both, and lasts.
SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(1000)
"""


def kept(tmp_path: Path, code: str) -> LocalProcess:
    command = (sys.executable, "-c", code)
    return LocalProcess(Spec("e", "engine", "127.0.0.1", str(tmp_path / "logs" / "e.log"), command))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_server_that_is_asked_to_end_is_not_restarted_and_leaves_nothing(tmp_path: Path) -> None:
    server, log = kept(tmp_path, SERVER), tmp_path / "logs" / "e.log"
    until(lambda: len(log.read_text().split()) == 2)
    assert server.look().state == ProcessState.RUNNING
    gone = open_pidfds([int(pid) for pid in log.read_text().split()])
    server.terminate()
    until(lambda: server.look().state == ProcessState.ENDED)
    assert wait_gone(gone, 10) == []
    assert (server.look().state, server.look().starts) == (ProcessState.ENDED, 1)
    server.bounce()
    assert (server.look().state, server.look().starts) == (ProcessState.RUNNING, 2)
    server.kill()
    assert server.look().state == ProcessState.ENDED


def test_a_server_that_dies_is_restarted_and_its_last_lines_are_shown(tmp_path: Path) -> None:
    server = kept(tmp_path, "print('no memory', flush=True); raise SystemExit(3)")
    until(lambda: server.look().starts >= 2)
    assert server.look().why == "ended by exit code 3: no memory"
    server.kill()


def test_a_server_that_ends_by_itself_is_restarted_though_its_code_is_0(tmp_path: Path) -> None:
    """As SGLang's does after a SIGTERM of somebody else."""
    server = kept(tmp_path, "print('bye', flush=True)")
    until(lambda: bool(server.look().why))
    assert server.look().state == ProcessState.RESTARTING
    until(lambda: server.look().starts >= 2)
    server.kill()


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    missing = Spec("e", "engine", "127.0.0.1", str(tmp_path / "e.log"), (os.path.join("no", "such"),))
    server = LocalProcess(missing)
    until(lambda: bool(server.look().why))
    assert "cannot start no/such" in server.look().why
    server.kill()
