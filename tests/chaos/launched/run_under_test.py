"""A real `penstock run` in a process of its own, with eyes on it: pids of its parts, its steps, its batches."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import redis

from penstock.errors import QueueUnavailable
from penstock.protocol.presence import WorkerPresence
from penstock.protocol.snapshot import snapshot
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.redis.connect import connect, connect_blocking
from penstock.redis.server import SERVERS, read_address
from tests.chaos.cluster.processes import children, command_of, kept
from tests.chaos.places import ROOT

#: Longest wait for any one thing to happen; an engine's start under load is the longest of them.
PATIENCE_S = 180.0


class RunUnderTest:
    """Started on construction; ``finish`` waits for its end."""

    def __init__(self, directory: Path, *overrides: str, config: str = "examples/digits/run.yaml") -> None:
        self.directory = directory
        self.name = "chaos"
        self.folder = directory / self.name
        self._output = (directory / "output.txt").open("wb")
        command = [sys.executable, "-m", "penstock.cli", "run", config, "--fresh"]
        self.process = subprocess.Popen(
            [*command, f"--run={self.name}", f"--directory={directory}", *overrides],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self.keys = Keys(self.name)
        #: Batch -> digests seen, and jobs.
        self.digests: dict[int, set[str]] = {}
        self.jobs: dict[int, list[str]] = {}
        self._watching = threading.Event()
        self._watcher: threading.Thread | None = None
        self._client: redis.Redis | None = None

    def output(self) -> str:
        return (self.directory / "output.txt").read_text(errors="replace")

    # --- looking --------------------------------------------------------------------------------------------------

    def until(self, what: str, condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Poll until ``condition`` is true; its value. Fails when the run ends meanwhile, or never gets there."""
        deadline = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.output()[-3000:]}"
            time.sleep(0.05)

    def client(self) -> redis.Redis:
        if self._client is None:
            url = self.until("Redis to have an address", lambda: read_address(self.folder))
            self._client = self.until("Redis to answer", lambda: _try(lambda: connect(url)))
        return self._client

    def ask(self, question: Callable[[redis.Redis], Any]) -> Any:
        """Answer of Redis, or None while it does not answer."""
        return _try(lambda: question(self.client()))

    def step(self) -> int:
        """Last step that was trained."""
        path = self.folder / "steps.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        steps = [row["step"] for row in map(_json, lines) if row]
        return steps[-1] if steps else 0

    def counter(self, name: str) -> int:
        return int(self.ask(lambda client: client.hget(self.keys.counters, name)) or 0)

    def num_leased(self) -> int:
        """Jobs that workers hold now."""
        state = self.ask(lambda client: snapshot(client, self.keys)) or {}
        return sum(int(lane["leased"]) for lane in state.get("lanes", {}).values())

    def worker(self) -> WorkerPresence:
        state = self.ask(lambda client: snapshot(client, self.keys)) or {}
        return next(iter(state.get("workers", [])), WorkerPresence())

    def pid_of(self, part: str) -> int:
        """Pid of a part: producer, worker, buffer, trainer, redis or engine."""
        if part == "engine":
            return int(self.until("an engine to serve", lambda: self.worker().engine_pid))
        return int(self.until(f"{part} to run", lambda: self._child(part)))

    def working_pid(self, part: str) -> int:
        """Pid of the process that does the work of a part: a worker's is below its keeper."""
        pid = self.pid_of(part)
        return kept(pid)[-1] if part == "worker" else pid

    def _child(self, part: str) -> int:
        for child in children(self.process.pid):
            words = command_of(child)
            if (part == "redis" and any(server in words for server in SERVERS)) or f"penstock.cli {part} " in words:
                return child
        return 0

    # --- batches --------------------------------------------------------------------------------------------------

    def watch_batches(self) -> None:
        """Collect every manifest that is cut, in a thread."""
        self.client()
        self._watcher = threading.Thread(target=self._collect, daemon=True)
        self._watcher.start()

    def _collect(self) -> None:
        url = read_address(self.folder)
        assert url is not None
        last = "0-0"
        reader = connect_blocking(url, 1.0)
        while not self._watching.is_set():
            found = _try(partial(reader.xread, {self.keys.batches("actor"): last}, block=200))
            if found is None:  # asked on and on, a Redis that starts would have no processor to start on
                self._watching.wait(0.02)
            for entry, fields in found[0][1] if found else ():
                last = entry.decode()
                manifest = Manifest.from_bytes(fields[b"m"], last)
                self.digests.setdefault(manifest.n, set()).add(fields[b"dg"].decode())
                self.jobs[manifest.n] = sorted({row.job for row in manifest.samples()})

    # --- faults ---------------------------------------------------------------------------------------------------

    def kill(self, part: str) -> int:
        """SIGKILL to the process that works; returns the pid of the part that is gone with it."""
        pid = self.pid_of(part)
        os.kill(self.working_pid(part), signal.SIGKILL)
        return pid

    def freeze(self, part: str, until: Callable[[], Any], what: str) -> None:
        """SIGSTOP to the process that works until the others have noticed, then SIGCONT."""
        pid = self.working_pid(part)
        os.kill(pid, signal.SIGSTOP)
        try:
            self.until(what, until)
        finally:
            # The others may have replaced it meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # --- end ------------------------------------------------------------------------------------------------------

    def finish(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for the end; the summary."""
        code = self.process.wait(timeout_s)
        self._watching.set()
        assert code == 0, self.output()[-4000:]
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    def close(self) -> None:
        """End whatever is left."""
        self._watching.set()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._output.close()


def _try(call: Callable[[], Any]) -> Any:
    """Result of ``call``, or None while Redis is the one that is dead; anything else fails the test."""
    try:
        return call()
    except (redis.RedisError, QueueUnavailable):
        return None


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
