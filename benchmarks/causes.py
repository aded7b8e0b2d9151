"""What may cost an engine tokens while a trainer publishes, one at a time, each by the code that publishes.

nothing      the trainer sleeps
pause        the engine is held still for a moment, and nothing else happens
gather       every tensor is copied on the trainer's own device
pcie         every tensor is copied into pinned memory of the host, as publish() copies it (on a CPU: into memory)
cores        a folder is written from that copy: hashes, files, what is read back; no device takes part
folder       a folder is written from the model itself: the way from the device through pageable memory is in it
send         a version is sent from a copy that was there, and gets no folder
behind       a version is published as a run does it: copy, send, and its folder behind them
first        a version is published with its folder first
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import patched
from benchmarks.engine_overhead import Penstock
from penstock.consumers.weights import write
from penstock.consumers.weights.copies import Arena, Copy
from penstock.consumers.weights.sender import TransferFailed
from penstock.consumers.weights.sources import State, buckets
from penstock.errors import WaitTimeout
from penstock.protocol.engine_http import fetch
from penstock.protocol.presence import read_workers

#: All there are, in the order of a round.
LEGS = ("nothing", "pause", "gather", "pcie", "cores", "folder", "send", "behind", "first")
SETTLED_S = 60.0
_BUCKET_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an event, on the monotonic clock."""

    name: str
    begin_s: float
    end_s: float


class Causes:
    """Brings about one cause at a time in a run; each blocks until it is over. Use it from the trainer's thread.

    Args:
        folder: for folders of weights that are no versions.
        pause_s: how long ``pause`` holds the engine.
    """

    def __init__(self, penstock: Penstock, model: Any, folder: Path, pause_s: float) -> None:
        self._penstock, self._model, self._folder, self._pause_s = penstock, model, folder, pause_s
        trainer = penstock.trainer
        self._trainer, self._publisher = trainer, trainer.publisher
        self._config = write.require_config(Path(trainer.config.model.path))
        self._arena = Arena()
        self._written = 0
        #: Of the event that is on, or was the last.
        self.spans: list[Span] = []
        #: Seconds that ``publish`` blocked in it, and the pauses that were not the worker's.
        self.blocked_s: float | None = None
        self.pauses: list[tuple[float, float]] = []
        self._copy = self._arena.take(State(model), self._config)
        self._all: dict[str, Callable[[], None]] = {
            "nothing": lambda: time.sleep(pause_s),
            "pause": self._pause,
            "gather": self._gather,
            "pcie": self._to_host,
            "cores": lambda: self._write(self._copy),
            "folder": lambda: self._write(State(self._model)),
            "send": self._send,
            "behind": self._behind,
            "first": self._first,
        }

    def has(self, name: str) -> bool:
        """Whether there is such a leg in this run: nothing is sent by disk."""
        return name in self._all and (name != "send" or self._publisher.sender is not None)

    def bring(self, name: str) -> None:
        """Let it happen. Blocks until it is over. RuntimeError where a version went another way than it should."""
        self.spans, self.pauses, self.blocked_s = [], [], None
        self._all[name]()

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            with self._span(name):
                return work(*args, **more)

        return timed

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.spans.append(Span(name, began_s, time.monotonic()))

    def _pause(self) -> None:
        url, began_s = self._penstock.config.engine.url, time.monotonic()
        _post(f"{url}/pause_generation", {"mode": "in_place"})
        time.sleep(self._pause_s)
        _post(f"{url}/continue_generation", {})
        self.pauses.append((began_s, time.monotonic()))

    def _gather(self) -> None:
        with self._span("gather"):
            for bucket in buckets(State(self._model), self._config, _BUCKET_BYTES):
                _ = [tensor.clone() for _, tensor in bucket]
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    def _to_host(self) -> None:
        with self._span("copy"):
            self._copy = self._arena.take(State(self._model), self._config)

    def _write(self, source: "Copy | State") -> None:
        self._written += 1
        with self._span("folder"):
            write.write_weights(source, self._trainer.config.model.path, self._folder, self._written, keep=1)

    def _send(self) -> None:
        writer = self._publisher.writer
        # The next version has a folder of its own: the writer leaves out what lies between.
        with patched(writer, copy=lambda source: self._copy, put=lambda version, copy: None):
            self._publish()

    def _behind(self) -> None:
        writer = self._publisher.writer
        with patched(writer, copy=self._timed("copy", writer.copy), _write=self._timed("folder", writer._write)):
            self._publish()
            writer.rest()

    def _first(self) -> None:
        publisher = self._publisher
        writer = publisher.writer
        folder = self._timed("folder", writer.write_folder)
        with patched(publisher, _sends_first=lambda: False), patched(writer, write_folder=folder):
            self._publish()

    def _step(self) -> None:
        """Change one tensor, as an engine adopts weights that it has already without any transfer."""
        with torch.no_grad():
            next(iter(self._model.parameters())).neg_()

    def _publish(self) -> None:
        publisher = self._publisher
        publisher.last = None
        self._step()
        began_s = time.monotonic()
        version = self._trainer.publish(self._model)
        ended_s = time.monotonic()
        self.blocked_s = ended_s - began_s
        if (sent := publisher.last) is not None:
            self.spans.append(Span("send", ended_s - sent.send_s, ended_s))
            self.spans.append(Span("wait", ended_s - sent.send_s - sent.wait_s, ended_s - sent.send_s))
            if sent.failure or not sent.workers:
                raise TransferFailed(f"version {version} went by disk: {sent.failure or 'nobody was ready'}")
        self._loaded(version)

    def _loaded(self, version: int) -> None:
        """Wait until the engine has it."""
        until_s = time.monotonic() + SETTLED_S
        client, keys = self._penstock.control.client, self._trainer.keys
        while all(one.version != version for one in read_workers(client, keys)):
            if time.monotonic() > until_s:
                raise WaitTimeout(f"No engine had version {version} in {SETTLED_S:g} s.")
            time.sleep(0.05)


def _post(url: str, body: dict[str, Any]) -> None:
    fetch(url, json.dumps(body).encode(), timeout_s=SETTLED_S)
