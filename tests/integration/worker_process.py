"""``penstock worker`` as a process that tests signal and kill."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from tests.integration.processes import kept_by
from tests.integration.saved import saved
from tests.integration.worker_play import until


class WorkerProcess:
    """``penstock worker`` as a process of its own."""

    def __init__(self, config: Config, folder: Path, name: str, python: Sequence[str] = ("-m", "penstock.cli")) -> None:
        path = saved(config, folder / f"{name}.yaml")
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *python, "worker", "--config", str(path), "--name", name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: int) -> None:
        """Send a signal; one that stops or continues it to the process that works, which its keeper outlives."""
        if number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(self.pid, number)
        else:
            self.process.send_signal(number)

    @property
    def pid(self) -> int:
        """Pid of the process that works; of the one that was started until it is there."""
        return kept_by(self.process.pid)[1] or self.process.pid

    async def exit_code(self) -> int:
        return int(await until(lambda: self.process.poll() is not None, self.text()) and self.process.returncode)

    def text(self) -> str:
        return self.log.read_text()


Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[WorkerProcess] = []

    def make(config: Config, name: str = "w", **over: Any) -> WorkerProcess:
        started.append(WorkerProcess(config, tmp_path, name, **over))
        return started[-1]

    yield make
    for worker in started:
        with contextlib.suppress(ProcessLookupError):
            worker.signal(signal.SIGCONT)
        worker.process.kill()
        worker.process.wait()
