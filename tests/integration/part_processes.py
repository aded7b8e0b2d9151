"""``penstock producer``, ``buffer``, ``worker`` and ``trainer`` as processes that tests signal and kill."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config import Config
from tests.integration.processes import kept_by
from tests.integration.saved import saved


class PartProcess:
    """One part of a run as a process of its own; its log is ``FOLDER/NAME.log``."""

    def __init__(self, part: str, config: Config, folder: Path, name: str) -> None:
        path = saved(config, folder / f"{name}.yaml")
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "penstock.cli", part, "--config", str(path)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--name", name] if part == "worker" else command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP to the process that works."""
        os.kill(self._working, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._working, signal.SIGCONT)

    @property
    def _working(self) -> int:
        return kept_by(self.process.pid)[1] or self.process.pid

    def kill(self) -> None:
        """``kill -9``, of a process that was stopped too; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        return self.log.read_text()


StartPart = Callable[..., PartProcess]


@pytest.fixture
def start_part(tmp_path: Path) -> Iterator[StartPart]:
    """``start_part(PART, config, NAME)``: whatever it started is killed at the end of the test."""
    started: list[PartProcess] = []

    def make(part: str, config: Config, name: str = "") -> PartProcess:
        started.append(PartProcess(part, config, tmp_path, name or part))
        return started[-1]

    yield make
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            one.signal(signal.SIGCONT)
        one.kill()
        print(f"--- {one.log.name}\n{one.text()}")  # shown where the test failed
