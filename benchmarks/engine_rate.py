"""Tokens per second of one engine: through the complete path of penstock, over what raw clients reach.

Both legs use the same engine process, prompts, response lengths, sampling and logprobs, and take turns:

    raw        closed-loop client processes that keep ``--concurrency`` requests running
    penstock   dataset -> producer -> gate -> worker -> buffer -> trainer, with a surplus of prompts; the trainer turns
               each batch into tensors, commits it, and then ticks or publishes (``--publish TRANSPORT``)

The rate of a leg is what the engine's decode log reports in the counted span, so unfinished answers count in both.
Workloads: ``tail`` (of 16 prompts 8 have answers of 128 tokens, 4 of 256, 2 of 512, one of 1,024, one of 3,072),
``flat`` (512 tokens each), ``short`` (50 tokens each); ``ignore_eos`` makes the lengths exact. ``--source NAME=DIR``
measures the penstock of another checkout too, on the same engine, so that the effect of one change is visible; behind
DIR, ``,bound=1`` or another setting applies to that leg alone.

    python -m benchmarks.engine_rate --json FILE
    python -m benchmarks.engine_rate --device cuda --shape 0.5b --concurrency 256 --batch-groups 32 --json FILE
    python -m benchmarks.engine_rate --device cuda --shape 0.5b --publish nccl --engine-env CUDA_VISIBLE_DEVICES=1
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Report, execute, median, redis_server, versions
from benchmarks.engine import RunningEngine
from benchmarks.gpu_model import SHAPES
from benchmarks.options import Concurrency, Device, EngineArgs, EngineEnv, EnginePython, JsonFile, ShapeName, served
from benchmarks.paired import interval
from benchmarks.raw_clients import GROUP, raw_clients
from benchmarks.steady import DecodeLog
from penstock.redis.connect import connect

#: Workload -> response lengths of successive prompts, in tokens.
WORKLOADS: dict[str, tuple[int, ...]] = {
    "tail": (128, 256, 128, 512, 128, 256, 128, 1024, 128, 256, 128, 512, 128, 256, 128, 3072),
    "flat": (512,),
    "short": (50,),
}
LOG_S = 0.05
LEG_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a measurement; both legs read the same ones."""

    workload: str
    concurrency: int
    prompt_tokens: int
    bound: int
    batch_groups: int
    apply: str
    #: Transport of a publication per batch; "" ticks instead.
    publish: str
    device: str
    warm_s: float
    window_s: float
    scale: float = 1.0

    @property
    def lengths(self) -> list[int]:
        """Response lengths of successive prompts, in tokens."""
        return [max(1, round(length * self.scale)) for length in WORKLOADS[self.workload]]

    def prompt(self, index: int) -> str:
        """A prompt of ``prompt_tokens`` characters, each one token; no two are equal."""
        return f"{index:0{self.prompt_tokens}d}"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkout of penstock and the settings of its leg."""

    directory: Path
    plan: Plan

    @classmethod
    def parse(cls, value: str, plan: Plan) -> "Source":
        """Read ``DIR[,bound=N][,apply=POLICY][,publish=TRANSPORT]``. SystemExit if it names no checkout or setting."""
        directory, *settings = value.split(",")
        if not (Path(directory) / "penstock").is_dir():
            raise SystemExit(f"--source: {directory} is not a checkout of penstock; write NAME=DIR.")
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in ("bound", "apply", "publish"):
                raise SystemExit(f"--source: {name!r} is not one of bound, apply and publish.")
            change: dict[str, Any] = {name: int(text) if name == "bound" else text}
            plan = replace(plan, **change)
        return cls(Path(directory), plan)


@dataclass(frozen=True, slots=True)
class Span:
    """The counted span of one leg."""

    source: str
    seconds: float
    tokens_per_s: float
    running_mean: float
    #: Running requests of the engine, about once per second.
    running: list[int]
    #: Process -> CPU seconds per second of the span.
    cores: dict[str, float]
    #: Further figures of a penstock leg, of the batches that were published in the span.
    path: dict[str, float]


class LogThread(threading.Thread):
    """Reads the engine's decode log all the time, so that each line has the time at which it was written."""

    def __init__(self, log: DecodeLog) -> None:
        super().__init__(name="decode-log", daemon=True)
        self._log, self._stopping = log, threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(LOG_S):
            self._log.read()

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def processor_s(folder: Path) -> dict[int, tuple[str, float]]:
    """Return process id -> name and CPU seconds so far, by this process's children and by the engine in ``folder``."""
    tick, parents, found = os.sysconf("SC_CLK_TCK"), dict[int, int](), dict[int, tuple[str, float]]()
    roots = {os.getpid()}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(process.name)
        parents[pid] = int(fields[1])
        if str(folder) in words:
            roots.add(pid)
        if name := _process_name(words):
            found[pid] = name, (int(fields[11]) + int(fields[12])) / tick
    return {pid: one for pid, one in found.items() if _descends(pid, parents, roots)}


def _descends(pid: int, parents: Mapping[int, int], roots: Set[int]) -> bool:
    while pid in parents and pid not in roots:
        pid = parents[pid]
    return pid in roots


def _process_name(words: str) -> str:
    for mark, name in (
        ("sglang::scheduler", "scheduler"), ("sglang::detokenizer", "detokenizer"),
        ("sglang.launch_server", "tokenizer"), ("penstock.cli worker", "worker"), ("penstock.cli buffer", "buffer"),
        ("penstock.cli producer", "producer"), ("rate_leg.py", "trainer"), ("redis-server", "redis"),
        ("valkey-server", "redis"),
    ):  # fmt: skip
        if mark in words:
            return name
    return ""


def measure(source: str, engine: RunningEngine, log: DecodeLog, plan: Plan) -> Span:
    """Count one span, after the warm-up of the leg that runs. Blocks."""
    time.sleep(plan.warm_s)
    begin_s, before = time.monotonic(), processor_s(engine.folder)
    time.sleep(plan.window_s)
    end_s, after = time.monotonic(), processor_s(engine.folder)
    rate, running_mean = log.between(begin_s, end_s)
    by_second = {int(at_s - begin_s): many for at_s, many, _ in log.lines if begin_s <= at_s < end_s}
    seconds = end_s - begin_s
    cores: dict[str, float] = {}
    for pid, (name, spent_s) in after.items():
        cores[name] = cores.get(name, 0.0) + (spent_s - before.get(pid, (name, 0.0))[1]) / seconds
    return Span(source, seconds, rate, running_mean, list(by_second.values()), cores, {})


def raw_leg(engine: RunningEngine, log: DecodeLog, plan: Plan, prompts: Sequence[list[int]]) -> Span:
    """Measure the raw clients. Blocks."""
    with raw_clients(engine.url, prompts, plan.lengths, plan.concurrency):
        return measure("raw", engine, log, plan)


def penstock_leg(name: str, source: Source, engine: RunningEngine, log: DecodeLog) -> Span:
    """Measure the penstock of one checkout, in a new run with a new Redis. Blocks.

    Raises RuntimeError, with the end of the leg's output, if it does not serve or dies.
    """
    plan, directory = source.plan, source.directory
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary, redis_server() as url:
        folder = Path(temporary)
        settings = {
            "redis": url, "engine": engine.url, "model": str(engine.model), "folder": str(folder),
            "lengths": plan.lengths, "group": GROUP, "slots": plan.concurrency, "bound": plan.bound,
            "batch_groups": plan.batch_groups, "apply": plan.apply, "publish": plan.publish, "device": plan.device,
            "prompts": [plan.prompt(index) for index in range(4096)],
            "context": plan.prompt_tokens + max(plan.lengths) + 1,
        }  # fmt: skip
        (folder / "leg.json").write_text(json.dumps(settings))
        # -P keeps the folder of the script off the path; the parts that it starts import from the checkout.
        command = [sys.executable, "-P", str(Path(__file__).with_name("rate_leg.py").absolute()), str(folder)]
        paths = [str(directory.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with (folder / "leg.log").open("wb") as out:
            process = subprocess.Popen(command, cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT)
            try:
                _wait_until_serving(process, folder)
                span = measure(name, engine, log, plan)
                end_s = time.monotonic()
                batches = [one for one in _steps(folder) if end_s - span.seconds <= one["at_s"] < end_s]
                if process.poll() is not None or not batches:
                    raise RuntimeError(f"The leg trained {len(batches)} batches:\n{_end_of(folder)}")
            finally:
                process.terminate()
                process.wait(timeout=90)
        path = {
            "steps": float(len(batches)),
            "step_s": span.seconds / len(batches),
            "trained_tokens_per_s": sum(batch["tokens"] for batch in batches) / span.seconds,
            "samples_per_s": sum(batch["samples"] for batch in batches) / span.seconds,
            "wait_s_p50": median([batch["wait_s"] for batch in batches]),
            "publish_s_p50": median([batch["publish_s"] for batch in batches]),
            "staleness_max": float(max(batch["staleness_max"] for batch in batches)),
        }
        return Span(span.source, span.seconds, span.tokens_per_s, span.running_mean, span.running, span.cores, path)


def _wait_until_serving(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline_s = time.monotonic() + LEG_TIMEOUT_S
    while not (folder / "serving").exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"The penstock leg did not start:\n{_end_of(folder)}")
        time.sleep(0.1)


def _end_of(folder: Path) -> str:
    logs = [folder / "leg.log", *sorted(folder.glob("*/*.log"))]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs if log.exists())


def _steps(folder: Path) -> list[dict[str, Any]]:
    file = folder / "batches.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def token_ids(engine: RunningEngine, plan: Plan) -> list[list[int]]:
    """The same prompts as token ids, for clients that send ids as a worker does."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine.model / "tokenizer.json"))
    return [tokenizer.encode(plan.prompt(index)).ids for index in range(4096)]


def sources_of(arguments: Sequence[str], plan: Plan) -> dict[str, Source]:
    """Name -> checkout; without arguments, this checkout as ``penstock``."""
    found = {name: Source.parse(value, plan) for name, _, value in (one.partition("=") for one in arguments)}
    return found or {"penstock": Source(Path(__file__).parents[1], plan)}


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shape: ShapeName = "tiny",
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "tail",
    scale: Annotated[float, typer.Option(help="Factor on all response lengths.")] = 1.0,
    concurrency: Concurrency = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Length of every prompt.")] = 32,
    bound: Annotated[int, typer.Option(help="staleness.bound; on_expiry is wait.")] = 8,
    batch_groups: Annotated[int, typer.Option(help="Groups of 8 samples per batch.")] = 8,
    apply: Annotated[str, typer.Option(help="worker.apply.")] = "in_place",
    publish: Annotated[str, typer.Option(help="Transport of a publication per batch; empty: ticks.")] = "",
    rounds: Annotated[int, typer.Option(help="Rounds of all legs.")] = 2,
    warm_s: Annotated[float, typer.Option(help="Seconds of a leg before its counted span.")] = 20.0,
    window_s: Annotated[float, typer.Option(help="Seconds of a counted span.")] = 40.0,
    budget_s: Annotated[float, typer.Option(help="No round begins after this many seconds.")] = 3600.0,
    raw: Annotated[bool, typer.Option(help="Measure the raw clients too.")] = True,
    source: Annotated[list[str] | None, typer.Option(help="NAME=DIR[,SETTING=VALUE] of a checkout; repeat.")] = None,
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
) -> None:
    """The engine's rate through penstock over the rate of raw clients."""
    end_s = time.monotonic() + budget_s
    plan = Plan(
        workload, concurrency, prompt_tokens, bound, batch_groups, apply, publish, device, warm_s, window_s, scale
    )
    sources = sources_of(source or [], plan)
    spans: list[Span] = []
    more = {"decode-log-interval": 10}
    with served(SHAPES[shape], device, concurrency, engine_python, engine_arg, engine_env, more=more) as engine:
        prompts = token_ids(engine, plan)
        with closing(DecodeLog(engine.folder / "engine-bench.log")) as log:
            thread = LogThread(log)
            thread.start()
            try:
                for turn in range(rounds):
                    for name in [*(["raw"] if raw else []), *sources]:
                        if turn and time.monotonic() + plan.warm_s + plan.window_s > end_s:
                            break
                        is_raw = name == "raw"
                        span = (
                            raw_leg(engine, log, plan, prompts) if is_raw
                            else penstock_leg(name, sources[name], engine, log)
                        )  # fmt: skip
                        spans.append(span)
                        typer.echo(f"round {turn + 1}, {name}: {span.tokens_per_s:,.0f} tokens/s {span.path}", err=True)
                        report(spans, plan, shape, engine.sglang).write(json_file)
            finally:
                thread.stop()
        report(spans, plan, shape, engine.sglang).finish(json_file)


def report(spans: Sequence[Span], plan: Plan, shape: str, sglang: str) -> Report:
    """One row per leg; the ratio of each source to the raw leg of its round."""
    with redis_server() as url:
        seen = versions(connect(url), sglang=sglang)
    names = list(dict.fromkeys(span.source for span in spans))
    rates = {name: [span.tokens_per_s for span in spans if span.source == name] for name in names}
    ratios = {
        name: [ours / raw for ours, raw in zip(rates[name], rates["raw"], strict=False)]
        for name in names
        if name != "raw" and "raw" in rates
    }
    rows = [
        {
            "leg": name,
            "tokens_per_s": median(rates[name]),
            "ratio": str(interval(ratios[name])) if ratios.get(name) else None,
            "running": median([span.running_mean for span in spans if span.source == name]),
            "worker": median([span.cores.get("worker", 0.0) for span in spans if span.source == name]),
            "tokenizer": median([span.cores.get("tokenizer", 0.0) for span in spans if span.source == name]),
            "samples_per_s": _median_of(spans, name, "samples_per_s"),
            "step_s": _median_of(spans, name, "step_s"),
        }
        for name in names
    ]
    updates = f"publications by {plan.publish}" if plan.publish else "ticks"
    return Report(
        title=f"engine rate: {plan.workload}, {shape}, {plan.concurrency} requests at once, bound {plan.bound}, "
        f"batches of {plan.batch_groups} groups, {plan.apply}, {updates}",
        columns={
            "leg": "leg", "tokens_per_s": "tokens/s", "ratio": "over raw [95 %]", "running": "running",
            "worker": "worker cores", "tokenizer": "tokenizer cores", "samples_per_s": "samples/s", "step_s": "s/step",
        },
        rows=rows,
        keys={"engine_share": {name: interval(found).ratio for name, found in ratios.items() if found}},
        more={"spans": [_as_map(span) for span in spans]},
        versions=seen,
    )  # fmt: skip


def _median_of(spans: Sequence[Span], name: str, key: str) -> float | None:
    values = [span.path[key] for span in spans if span.source == name and key in span.path]
    return median(values) if values else None


def _as_map(span: Span) -> dict[str, Any]:
    return {name: getattr(span, name) for name in Span.__slots__}


if __name__ == "__main__":
    execute(main)
