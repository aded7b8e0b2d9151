"""Parts that a zygote forks (zygote.py), as the supervisor has processes that it starts itself."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.system.keeper import die_with
from tests.chaos.cluster.processes import runs
from tests.chaos.cluster.zygote import MESSAGE_BYTES

#: What parts import, and what they import late. A source need not have all of it.
IMPORTS = (
    "penstock.console.cli.main", "penstock.console.launch.trainable",
    "penstock.config.load",
    "penstock.config.reading.mistakes", "penstock.config.reading.mistakes", "penstock.config.reading.yaml_file",
    "penstock.redis.server", "penstock.producer.main", "penstock.buffer.main", "penstock.workers.main",
    "penstock.consumers.trainer",
    "penstock.consumers.history.main", "penstock.consumers.weights.publisher",
    "transformers.models.auto.tokenization_auto", "numpy.random", "safetensors.torch",
    "tests.chaos.parts.law", "tests.integration.fake_engine",
)  # fmt: skip
#: Longest start of a zygote, which imports all that parts need; the machine may be slow.
START_S = 1500.0
#: Between two looks at a process that was killed.
LOOK_S = 0.01


class Process(Protocol):
    """What a supervisor needs of a process: as ``subprocess.Popen`` has it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class Zygote:
    """Started with the first part, by the thread that asks for it, and gone with that. Not thread-safe.

    Args:
        folder: working directory of all parts.
        environment: what it imports under.
        log: takes what it says of itself.
        imports: modules that it imports, where they are there.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], log: Path, imports: Sequence[str] = IMPORTS
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._log = log
        self._imports = imports
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> "Forked":
        """A process of ``python -m argv...``. Blocks until it is there. Raises OSError where the zygote died."""
        pid = self.ask({"argv": list(argv), "environment": dict(environment), "log": str(log)})
        return Forked(self, int(pid))

    def ask(self, message: dict[str, Any]) -> Any:
        """The answer to a message. Blocks; OSError where the zygote died."""
        control = self._control or self._start()
        control.send(json.dumps(message).encode())
        return json.loads(self._answer(control))

    def end(self) -> None:
        """It ends, and with it what it forked."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()

    def _start(self) -> socket.socket:
        control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(START_S)
        for one in (control, its):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
        with its, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.cluster.zygote", *self._imports],
                cwd=self._folder,
                env=dict(self._environment),
                stdin=its,
                stdout=log,
                stderr=log,
                preexec_fn=die_with(),
            )
        self._answer(control)
        self._control = control
        return control

    def _answer(self, control: socket.socket) -> bytes:
        answer = control.recv(MESSAGE_BYTES)
        if not answer:
            raise ConnectionResetError(f"the zygote has died; its log is {self._log}")
        return answer


class Forked:
    """A process that a zygote forked; reaped by ``poll``, so that its pid is its own until then."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote = zygote
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, minus the signal of one that was killed; None while it runs."""
        if self.returncode is None and not runs(self.pid):
            self.returncode = self._zygote.ask({"wait": self.pid})
        return self.returncode

    def kill(self) -> None:
        """SIGKILL. Raises ProcessLookupError where it was reaped."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Block until it is over; its exit code."""
        while (code := self.poll()) is None:
            time.sleep(LOOK_S)
        return code
