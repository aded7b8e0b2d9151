"""Parts of a run as processes of their own: ``penstock PART --config FILE``, to be killed and started again."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import Config
from tests.integration.parts import until
from tests.integration.processes import kept_by
from tests.integration.saved import saved


class PartProcess:
    """One part as a process; ``kill`` and ``start`` it as often as wanted."""

    def __init__(self, command: str, config: Config, folder: Path) -> None:
        self.command = command
        self.config_path = saved(config, folder / f"{command}.yaml")
        self.log = folder / f"{command}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._from = 0
        self.start()

    def start(self) -> None:
        """Start it anew; its log goes on."""
        name = ["--name", self.command] if self.command == "worker" else []
        command = [sys.executable, "-m", "penstock.cli", self.command, "--config", str(self.config_path), *name]
        with self.log.open("ab") as log:
            self._from = log.tell()
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def restart(self) -> None:
        self.kill()
        self.start()

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP to the process that works; a kill ends it nevertheless."""
        assert self.process is not None
        os.kill(kept_by(self.process.pid)[1] or self.process.pid, signal.SIGSTOP)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def says(self, words: str) -> bool:
        """Has its latest process said this? Fails the test where it has ended without."""
        text = self.text()
        assert words in text or self.lives, f"{self.command} ended: {text[-2000:]}"
        return words in text

    def until_says(self, words: str) -> None:
        until(lambda: self.says(words), f"{self.command} to say {words!r}")

    def text(self) -> str:
        """What its latest process said."""
        return self.log.read_bytes()[self._from :].decode()


class Parts:
    """Starts parts and kills what is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[PartProcess] = []

    def start(self, command: str, config: Config) -> PartProcess:
        self.started.append(PartProcess(command, config, self._folder))
        return self.started[-1]

    def assert_alive(self) -> None:
        for part in self.started:
            assert part.lives, f"{part.command} ended: {part.text()[-3000:]}"


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    folder = tmp_path / "parts"
    folder.mkdir()
    made = Parts(folder)
    yield made
    for part in made.started:
        with contextlib.suppress(ProcessLookupError):
            part.kill()
