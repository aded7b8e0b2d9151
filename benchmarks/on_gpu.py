"""Several benchmarks on a machine that is rented for minutes: in order of importance, one start of an engine for many.

A part is SHAPE/NAME or SHAPE/NAME:SECONDS, at most so long. Parts of one shape that stand together share their engine
and their trainer's model. Each writes ``NAME.json`` as its legs end; one that fails, or whose time is over, is told of,
and the next one has an engine of its own. Nothing is begun when ``--budget-s`` is over, the start of the first engine
included; a part that stands still then is broken off.

    timeline   all causes, and publishing with the folder behind twice a round; its publications go into publish.json
    publish    these two legs alone, 21 with the folder behind and 7 with it first
    versions   leg versions of ``benchmarks.deltas``
    tokens     leg tokens of it

One GPU, the trainer on the engine's. A start of the engine takes 60 to 170 s, a round 42 s, 10 rounds 420 s:

    timeout -k 10 590 python -m benchmarks.on_gpu 1.5b/timeline --device cuda --transport cuda_ipc --concurrency 512 \\
        --new-tokens 512 --engine-arg mem-fraction-static=0.3 --out DIR

The same: a start, 350 s, and 150 s where there is time for them:

    timeout -k 10 590 python -m benchmarks.on_gpu 1.5b/versions,1.5b/tokens --device cuda --concurrency 256 \\
        --new-tokens 256 --groups 192 --engine-arg mem-fraction-static=0.3 --out DIR

Two GPUs, the engine on the second: a start, 260 s for 6 rounds, another start of 60 s, and 150 s:

    timeout -k 10 590 python -m benchmarks.on_gpu 1.5b/timeline:260,0.5b/publish --device cuda --transport nccl \\
        --concurrency 256 --new-tokens 256 --engine-env CUDA_VISIBLE_DEVICES=1 --out DIR
"""

import itertools
import math
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from benchmarks.causes import LEGS
from benchmarks.common import execute, leave, redis_server
from benchmarks.deltas import Deltas
from benchmarks.engine import RunningEngine
from benchmarks.engine_overhead import Load
from benchmarks.gpu_model import SHAPES
from benchmarks.options import (
    Concurrency,
    Device,
    EngineArgs,
    EngineEnv,
    EnginePython,
    PromptTokens,
    served,
)
from benchmarks.publish import Publishing
from benchmarks.timeline import Timeline
from benchmarks.weights import load_model

NAMES = ("publish", "timeline", "versions", "tokens")
#: Between the end of a part's time, when it begins nothing any more, and its being broken off.
GRACE_S = 20.0


class OutOfTime(BaseException):
    """A part stands still. No error that anybody on the way handles."""


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark on one shape."""

    shape: str
    name: str
    most_s: float = math.inf

    @classmethod
    def of(cls, text: str) -> "Part":
        """SHAPE/NAME or SHAPE/NAME:SECONDS; SystemExit where it is neither."""
        shape, _, rest = text.partition("/")
        name, _, most = rest.partition(":")
        if shape not in SHAPES or name not in NAMES or not (most.isdecimal() or not most):
            raise SystemExit(
                f"{text!r} is no part: write SHAPE/NAME or SHAPE/NAME:SECONDS, of {', '.join(SHAPES)} and "
                f"{', '.join(NAMES)}."
            )
        return cls(shape, name, float(most or math.inf))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all parts have in common."""

    load: Load
    device: str
    transport: str
    out: Path
    publications: int
    rounds: int
    num_versions: int


class Parts:
    """Runs parts one after the other; some write on in what was made for a shape before."""

    def __init__(self, parts: list[Part], sizes: Sizes, end_s: float) -> None:
        self._left, self._sizes, self._end_s = parts, sizes, end_s
        self._publishing = Publishing(sizes.load, sizes.transport, sizes.out / "publish.json")
        self.failed: list[str] = []

    @property
    def shape(self) -> str:
        """Of the next part; '' where there is none, or no time for it."""
        return self._left[0].shape if self._left and time.monotonic() < self._end_s else ""

    @property
    def left(self) -> list[str]:
        """Parts that were not begun."""
        return [f"{one.shape}/{one.name}" for one in self._left]

    def on_engine(self, engine: RunningEngine) -> None:
        """All parts of its shape that come next, until one fails. Blocks."""
        shape, model = self.shape, load_model(engine.model, self._sizes.device)
        while self.shape == shape:
            if not self._one(engine, model):
                return

    def _one(self, engine: RunningEngine, model: Any) -> bool:
        part, began_s = self._left.pop(0), time.monotonic()
        what = f"{part.shape}/{part.name}"
        end_s = min(self._end_s, began_s + part.most_s)
        try:
            with broken_off(end_s + GRACE_S, what), redis_server() as url:
                self._made(part.name).measure(url, engine, model, part.shape, end_s)
        except (Exception, OutOfTime):
            self.fail(what)
            return False
        typer.echo(f"{what}: done in {time.monotonic() - began_s:.0f} s", err=True)
        return True

    def fail(self, what: str) -> None:
        """Tell of what has just been raised."""
        self.failed.append(what)
        typer.echo(f"{what} failed:\n{traceback.format_exc()}", err=True)

    def skip(self, shape: str) -> None:
        """Its engine does not start: leave its next parts out."""
        self._left = list(itertools.dropwhile(lambda one: one.shape == shape, self._left))

    def _made(self, name: str) -> Timeline | Deltas:
        sizes, file, told = self._sizes, self._sizes.out / f"{name}.json", self._publishing.take
        load, transport, device = sizes.load, sizes.transport, sizes.device
        if name == "publish":
            return self._publishing.timeline(device, sizes.publications)
        if name == "timeline":
            return Timeline(load, transport, device, file, sizes.rounds, legs=(*LEGS, "behind"), told=told)
        return Deltas(load, device, file, (name,), sizes.num_versions)


@contextmanager
def broken_off(at_s: float, what: str) -> Iterator[None]:
    """Raise OutOfTime in the block at this time of the monotonic clock; of the main thread."""

    def over(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"{what} did not end in time")

    began_s, before = time.monotonic(), signal.signal(signal.SIGALRM, over)
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, max(0.001, at_s - began_s))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        # That of a block around it goes on.
        signal.setitimer(signal.ITIMER_REAL, max(0.001, outer_s - (time.monotonic() - began_s)) if outer_s else 0.0)


def main(
    parts: Annotated[str, typer.Argument(help="Comma-separated, in order of importance: SHAPE/NAME or SHAPE/NAME:S.")],
    out: Annotated[Path, typer.Option(help="Folder for NAME.json.")] = Path("runs/bench"),
    budget_s: Annotated[float, typer.Option(help="Nothing is begun later than this.")] = 550.0,
    device: Device = "cpu",
    transport: Annotated[str, typer.Option(help="gloo, cuda_ipc, nccl, or disk.")] = "gloo",
    publications: Annotated[int, typer.Option(help="Part publish: with the folder behind.")] = 20,
    groups: Annotated[int, typer.Option(help="Part tokens: prompts of each leg, 8 answers each.")] = 96,
    rounds: Annotated[int, typer.Option(help="Part timeline: events of each leg.")] = 10,
    num_versions: Annotated[int, typer.Option("--versions", help="Part versions: how many.")] = 50,
    concurrency: Concurrency = 64,
    prompt_tokens: PromptTokens = 32,
    new_tokens: Annotated[int, typer.Option(help="Length of every answer; part tokens: mean length.")] = 64,
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
) -> None:
    """Benchmarks in order of importance, within minutes; exit code 1 when one fails or is not begun."""
    end_s = time.monotonic() + budget_s
    signal.signal(signal.SIGTERM, leave)
    load = Load(groups, concurrency, prompt_tokens, new_tokens)
    sizes = Sizes(load, device, transport, out, publications, rounds, num_versions)
    run = Parts([Part.of(text) for text in parts.split(",")], sizes, end_s)
    while shape := run.shape:
        made = replace(SHAPES[shape], dtype="bfloat16")
        try:
            with (
                broken_off(end_s + GRACE_S, f"the engine of {shape}"),
                served(made, device, concurrency, engine_python, engine_arg, engine_env) as engine,
            ):
                run.on_engine(engine)
        except (Exception, OutOfTime):
            run.fail(f"the engine of {shape}")
            run.skip(shape)
    if run.failed or run.left:
        raise SystemExit(f"Failed: {', '.join(run.failed) or '-'}; not begun: {', '.join(run.left) or '-'}.")


if __name__ == "__main__":
    execute(main)
