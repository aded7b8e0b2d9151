"""A run that goes on while it is measured: an engine kept full, a trainer that takes batches, and windows of time.

    jobs, more than the engine takes ──> worker ──> buffer ──> trainer: tensors, commit, checkpoint, batch by batch
                                            └── what is committed, counted from mark to mark

Answers have one length and their starts are spread over the time that one takes, so that they end evenly and a window
counts nearly what was drawn in it. What the engine itself says of its tokens is read from its log beside it.
"""

import os
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_run import DATASET, admit
from benchmarks.engine_overhead import GROUP, Load, Penstock
from benchmarks.penstock_path import cpu_s_of, cpu_s_of_redis
from penstock.errors import WaitTimeout
from penstock.records.job import Job

#: Between two looks at what is committed.
LOOK_S = 0.02
#: Longest wait for a commit, and for a batch.
STILL_S = 120.0

_DECODED = re.compile(r"Decode batch.*#running-req: (\d+).*gen throughput \(token/s\): ([\d.]+)")


class Reader(threading.Thread):
    """Trains nothing: batches to tensors, commit, a checkpoint after each, so that groups retire all the time."""

    def __init__(self, penstock: Penstock, new_tokens: int) -> None:
        super().__init__(name="reader", daemon=True)
        self._penstock, self._new_tokens = penstock, new_tokens
        self._stopping = threading.Event()
        #: Samples that were tensors, and those of another length than asked for.
        self.samples = self.odd = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.take()
        except BaseException as exc:
            self.failure = exc

    def take(self) -> None:
        """One batch, if there is one within a second. For one thread at a time."""
        trainer = self._penstock.trainer
        with suppress(WaitTimeout):
            batch = trainer.next(timeout=1.0)
            lengths = batch.padded()["generated"].sum(dim=1)
            trainer.commit(batch)
            trainer.state_dict()
            trainer.checkpointed()
            self.odd += int((lengths != self._new_tokens).sum())
            self.samples += len(batch)

    def stop(self) -> None:
        """Take no more batches. Blocks until the last one is checkpointed, a second or two."""
        self._stopping.set()
        self.join(timeout=STILL_S)

    def check(self) -> None:
        """Raise what it failed of, if it did."""
        if self.failure is not None:
            raise self.failure


class DecodeLog:
    """Tokens per second as the engine tells them, every few steps, since the line before."""

    def __init__(self, file: Path) -> None:
        self._file = file.open(errors="replace")
        self._rest = ""
        #: When a line was seen (monotonic seconds), answers that were drawn at once, tokens per second up to it.
        self.lines: list[tuple[float, int, float]] = []

    def read(self) -> None:
        """Take in what was written since. Returns at once."""
        whole, _, self._rest = (self._rest + self._file.read()).rpartition("\n")
        now_s = time.monotonic()
        self.lines += [(now_s, int(found[1]), float(found[2])) for found in _DECODED.finditer(whole)]

    def between(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """Tokens per second and answers at once in this time, each line for the time that it tells of; (0, 0): none."""
        weight = tokens = running = 0.0
        for (before_s, _, _), (at_s, many, rate) in zip(self.lines, self.lines[1:], strict=False):
            part_s = max(0.0, min(at_s, end_s) - max(before_s, begin_s))
            weight, tokens, running = weight + part_s, tokens + part_s * rate, running + part_s * many
        return (tokens / weight, running / weight) if weight else (0.0, 0.0)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Mark:
    """What stood where at one instant."""

    at_s: float
    #: Samples that were committed, and those that had become tensors.
    committed: int
    trained: int
    #: Groups done with, and those that wait for the recorder.
    retired: int
    waiting: int
    #: Process -> CPU seconds so far; ``machine``: of all there are on it.
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two marks, each at a commit."""

    leg: str
    seconds: float
    samples: int
    samples_per_s: float
    #: As the engine tells it; 0 where it does not.
    tokens_per_s: float
    running: float
    #: Samples that the trainer had not taken yet at its end.
    behind: int
    #: Groups that retired meanwhile, and that waited for the recorder at its end.
    retired: int
    waiting: int
    #: Process -> CPU time it took, in us per sample.
    cpu_us: dict[str, float]


@dataclass(slots=True)
class Steady:
    """Keeps the engine of a run full, and tells its rate. Use it from one thread."""

    penstock: Penstock
    load: Load
    reader: Reader
    log: DecodeLog
    #: Jobs that wait beyond those that are drawn.
    surplus: int
    admitted: int = 0
    committed: int = 0

    def warm_up(self, samples: int) -> None:
        """Go on until so many are committed. Blocks. RuntimeError where the run stands still."""
        self._admit(self.load.concurrency // GROUP + self.surplus)
        while self.committed < samples:
            self._until_commit()

    def go_on(self, seconds: float) -> None:
        """Keep the engine full for so long. Blocks."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._look()
            time.sleep(LOOK_S)

    def window(self, leg: str, seconds: float) -> Window:
        """Measure from the next commit on to the one behind ``seconds``. Blocks."""
        begin = self._mark()
        self.go_on(seconds)
        end = self._mark()
        return self._between(leg, begin, end)

    def _mark(self) -> Mark:
        at_s = self._until_commit()
        client, keys = self.penstock.control.client, self.penstock.trainer.keys
        pipe = client.pipeline(transaction=False)
        pipe.hget(keys.counters, "retired")
        pipe.zcard(keys.unrecorded)
        retired, waiting = pipe.execute()
        cpu_s = {name: cpu_s_of(pid) for name, pid in self.penstock.pids.items()}
        cpu_s |= {"redis": cpu_s_of_redis(client), "trainer": time.process_time(), "machine": cpu_s_of_machine()}
        return Mark(at_s, self.committed, self.reader.samples, int(retired or 0), waiting, cpu_s)

    def _between(self, leg: str, begin: Mark, end: Mark) -> Window:
        seconds, samples = end.at_s - begin.at_s, end.committed - begin.committed
        tokens_per_s, running = self.log.between(begin.at_s, end.at_s)
        return Window(
            leg=leg,
            seconds=seconds,
            samples=samples,
            samples_per_s=samples / seconds,
            tokens_per_s=tokens_per_s,
            running=running,
            behind=end.committed - end.trained,
            retired=end.retired - begin.retired,
            waiting=end.waiting,
            cpu_us={name: 1e6 * (end.cpu_s[name] - begin.cpu_s[name]) / samples for name in end.cpu_s},
        )

    def _until_commit(self) -> float:
        """Wait for the next commit; when it was seen. RuntimeError where none comes."""
        before, until_s = self.committed, time.monotonic() + STILL_S
        while self._look() == before:
            if time.monotonic() > until_s:
                raise RuntimeError(f"No sample was committed for {STILL_S:g} s; the figure is void.")
            time.sleep(LOOK_S)
        return time.monotonic()

    def _look(self) -> int:
        """Samples that are committed; admits what is missing of the surplus."""
        self.reader.check()
        self.log.read()
        client, keys = self.penstock.control.client, self.penstock.trainer.keys
        self.committed = int(client.hget(keys.counters, "committed") or 0)
        open_groups = self.admitted - self.committed // GROUP
        missing = self.load.concurrency // GROUP + self.surplus - open_groups
        if missing > 0:
            self._admit(missing)
        return self.committed

    def _admit(self, count: int) -> None:
        prompts = self.load.prompts(self.admitted, count)
        jobs = [
            Job(f"{DATASET}/0/{place}", GROUP, prompt_ids=prompt, sampling=self._sampling(place))
            for place, prompt in enumerate(prompts, self.admitted)
        ]
        admit(self.penstock.control, self.penstock.config, jobs, self.admitted)
        self.admitted += count

    def _sampling(self, place: int) -> dict[str, object]:
        """Those that begin together are shorter, each by another part: from there on the engine's places are apart."""
        at_once = self.load.concurrency // GROUP
        new = self.load.new_tokens
        length = new if place >= at_once else max(1, new * (place + 1) // at_once)
        return self.load.sampling | {"max_new_tokens": length}


def cpu_s_of_machine() -> float:
    """CPU seconds that all processes of this machine have had so far, those of users and of the kernel."""
    user, nice, system = Path("/proc/stat").read_text().split(None, 4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
