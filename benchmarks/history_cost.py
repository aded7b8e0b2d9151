"""What a history costs a run: samples/s that a real engine draws with one, over those without.

One SGLang server with random weights, one run that never stands still (``benchmarks.steady``), and its history turned
on and off in turns of seconds, A B B A: what drifts, warms up or grows does so for both.

    history   ``penstock recorder`` keeps a row of each sample that is done with, tokens included
    without   the run keeps none: verbs write nothing for it, groups that are done with are swept at once. The recorder
              is stopped (SIGSTOP), so that it takes nothing, and goes on where it was in the next turn

Groups retire all the time, since the trainer checkpoints after each batch, so the recorder works within the windows
and not behind them. A run of the benchmark counts only if in the end the files have a row of each sample that retired
while the history was on, and none was given up; how many wait for the recorder at the end of a window is told.

``ratio``: geometric mean of the ratios of the pairs, with its 95 % interval; ``tokens_ratio``: the same of the tokens
that the engine itself says it drew, which does not wait for answers to end and so spreads less. ``null``: neighbours of
one leg, the later over the earlier: what this method shows where nothing was changed.

    python -m benchmarks.history_cost --json FILE
    python -m benchmarks.history_cost --device cuda --hidden 896 --layers 24 --heads 14 --kv-heads 2 --mlp 4864 \\
        --vocab 151936 --dtype bfloat16 --concurrency 512 --new-tokens 256 --budget-s 285 --json FILE

It ends within ``--budget-s`` of its start, the engine's included; the file is written after each pair of windows.
"""

import math
import os
import signal
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Report, execute, leave, median, redis_server, spread, versions
from benchmarks.engine import RunningEngine
from benchmarks.engine_overhead import GROUP, Load, Penstock, running_penstock
from benchmarks.options import Concurrency, Device, EngineArgs, EngineEnv, EnginePython, JsonFile, PromptTokens, served
from benchmarks.paired import interval, null_ratios, pair_ratios, turns
from benchmarks.random_model import Shape
from benchmarks.steady import DecodeLog, Reader, Steady, Window
from penstock.history.reader import HistoryReader
from penstock.redis.connect import connect
from penstock.system.run_folder import RunFolder

LEGS = ("without", "history")
#: Longest wait for the rows of what retired, and what is kept of the budget for it and for the end of all parts.
RECORDED_TIMEOUT_S = 60.0
END_S = 12.0
#: More pairs than this resolve nothing more.
MAX_PAIRS = 200


class HistorySwitch:
    """Turns the history of a live run on and off, and counts what retired while it was on."""

    def __init__(self, penstock: Penstock) -> None:
        self._penstock = penstock
        self._pid = penstock.pids["recorder"]
        #: Groups that are to have rows, of the times that are over.
        self._over = 0
        self._since: int | None = self._retired()

    def turn(self, is_on: bool) -> None:
        """Returns at once; what waits for the recorder when it is turned off waits until it is on again."""
        if is_on == (self._since is not None):
            return
        config = self._penstock.config.history
        if is_on:
            self._since = self._write(backlog=config.backlog)
            os.kill(self._pid, signal.SIGCONT)
        else:
            os.kill(self._pid, signal.SIGSTOP)
            self._over += self._write(backlog=None) - (self._since or 0)
            self._since = None

    @property
    def groups(self) -> int:
        """Groups that have retired while it was on."""
        return self._over + (self._retired() - self._since if self._since is not None else 0)

    def _write(self, backlog: int | None) -> int:
        """Set what says that the run keeps a history; groups that had retired at that instant."""
        keys = self._penstock.trainer.keys
        pipe = self._penstock.control.client.pipeline(transaction=True)
        if backlog is None:
            pipe.hdel(keys.history, "backlog")
        else:
            pipe.hset(keys.history, mapping={"backlog": backlog})
        pipe.hget(keys.counters, "retired")
        return int(pipe.execute()[1] or 0)

    def _retired(self) -> int:
        return int(self._penstock.control.client.hget(self._penstock.trainer.keys.counters, "retired") or 0)


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
    concurrency: Concurrency = 64,
    prompt_tokens: PromptTokens = 32,
    new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 64,
    batch_groups: Annotated[int, typer.Option(help="Groups of a batch; a checkpoint after each.")] = 8,
    window_s: Annotated[float, typer.Option(help="Length of a window.")] = 6.0,
    margin_s: Annotated[float, typer.Option(help="Between a turn of the switch and its window.")] = 1.0,
    max_pairs: Annotated[int, typer.Option(help="Pairs of windows; fewer where the budget ends before.")] = MAX_PAIRS,
    budget_s: Annotated[float, typer.Option(help="It ends within so much of its start.")] = 240.0,
    hidden: Annotated[int, typer.Option(help="Shape of the model, as in a Qwen2 config.")] = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    mlp: int = 768,
    vocab: int = 4096,
    dtype: str = "float32",
) -> None:
    """Samples/s with a history over samples/s without one, of the same run."""
    end_s = time.monotonic() + budget_s
    signal.signal(signal.SIGTERM, leave)
    shape = Shape(hidden, layers, heads, kv_heads, mlp, vocab, max(4096, prompt_tokens + new_tokens + 8), dtype)
    load = Load(0, concurrency, prompt_tokens, new_tokens)
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        engine = stack.enter_context(
            served(shape, device, concurrency, engine_python, engine_arg, engine_env, more={"decode-log-interval": 10})
        )
        made = Making(load, shape, versions(connect(url), sglang=engine.sglang), json_file)
        measure(made, url, engine, batch_groups, (window_s, margin_s), end_s, max_pairs)
    made.report().show()


class Making:
    """The figures as they come."""

    def __init__(self, load: Load, shape: Shape, seen_versions: dict[str, str], json_file: Path | None) -> None:
        self.load, self.shape, self.seen_versions, self.json_file = load, shape, seen_versions, json_file
        self.windows: list[Window] = []
        #: What was found out behind the windows; empty while it goes on, or where it was cut off.
        self.checked: dict[str, int] = {}

    def take(self, window: Window) -> None:
        """Tell of a window, and keep all there are where a pair is whole."""
        self.windows.append(window)
        typer.echo(
            f"window {len(self.windows)}, {window.leg}: {window.samples_per_s:,.1f} samples/s, "
            f"{window.tokens_per_s:,.0f} tokens/s of the engine with {window.running:.0f} at once, {window.waiting} "
            "groups wait for the recorder",
            err=True,
        )
        if len(self.windows) % 2 == 0:
            self.report().write(self.json_file)

    def report(self) -> Report:
        return report(self)


def measure(
    made: Making, url: str, engine: RunningEngine, batch_groups: int, lengths: tuple[float, float], end_s: float,
    max_pairs: int,
) -> None:  # fmt: skip
    """Windows until the budget ends, and what must hold behind them. Blocks. RuntimeError: the figures are void."""
    window_s, margin_s = lengths
    load = made.load
    with (
        running_penstock(url, engine, load, batch_groups, history=True) as penstock,
        closing(DecodeLog(engine.folder / "engine-bench.log")) as log,
    ):
        switch = HistorySwitch(penstock)
        reader = Reader(penstock, load.new_tokens)
        reader.start()
        steady = Steady(penstock, load, reader, log, surplus=load.concurrency // GROUP)
        try:
            steady.warm_up(2 * load.concurrency)
            for place, leg in enumerate(turns(LEGS, max_pairs)):
                if place % 2 == 0 and time.monotonic() + 2 * (window_s + margin_s) + END_S > end_s:
                    break
                switch.turn(leg == "history")
                steady.go_on(margin_s)
                made.take(steady.window(leg, window_s))
        finally:
            # A process that is stopped does not hear SIGTERM, and the reader's trainer ends with the run.
            switch.turn(True)
            reader.stop()
        if not made.windows:
            raise SystemExit("The budget ended before the first pair of windows; give more by --budget-s.")
        made.checked = checked(steady, switch)
        # Before its processes end, which may take as long as the budget has left.
        made.report().write(made.json_file)


def checked(steady: Steady, switch: HistorySwitch) -> dict[str, int]:
    """What was trained and what has rows, once all is recorded. Blocks. RuntimeError where they differ."""
    penstock, reader = steady.penstock, steady.reader
    reader.check()
    client, keys = penstock.control.client, penstock.trainer.keys
    until_s = time.monotonic() + RECORDED_TIMEOUT_S
    while True:
        retired = int(client.hget(keys.counters, "retired") or 0)
        if GROUP * retired == reader.samples and not client.zcard(keys.unrecorded):
            break
        if time.monotonic() > until_s:
            raise RuntimeError(f"{retired} groups of {reader.samples} samples retired; the figures are void.")
        time.sleep(0.1)
    wanted, found, given_up = GROUP * switch.groups, _rows(penstock), client.hget(keys.counters, "unrecorded")
    at_first = steady.load.concurrency
    if found != wanted or given_up or reader.odd > at_first:
        raise RuntimeError(
            f"The history has {found} rows of {wanted} samples, {int(given_up or 0)} groups were given up, and "
            f"{reader.odd - at_first} answers were of another length; the figures are void."
        )
    return {"trained_samples": reader.samples, "recorded_samples": found, "admitted_samples": GROUP * steady.admitted}


def _rows(penstock: Penstock) -> int:
    with closing(HistoryReader(RunFolder(penstock.config.run_dir).history)) as reader:
        return reader.count()


def report(made: Making) -> Report:
    """Ratios of the pairs with their intervals, and both legs' rates and processor time."""
    windows = made.windows
    named = [window.leg for window in windows]
    samples, tokens = [one.samples_per_s for one in windows], [one.tokens_per_s for one in windows]
    keys: dict[str, Any] = {"pairs": len(windows) // 2}
    notes = []
    for name, rates in (("", samples), ("tokens_", tokens)):
        if not all(rates) or len(rates) < 2:
            continue
        ratio, null = interval(pair_ratios(rates, named, "history")), interval(null_ratios(rates, named))
        for key, found in ((f"{name}ratio", ratio), (f"{name}null", null)):
            keys |= {key: found.ratio, f"{key}_low": _told(found.low), f"{key}_high": _told(found.high)}
        what = "tokens of the engine" if name else "samples"
        notes.append(f"History over without, by {what}: {ratio}; neighbours of one leg: {null}.")
    if not made.checked:
        notes.append("Cut off: not checked against the rows of the history.")
    return Report(
        title=f"cost of a history: answers of {made.load.new_tokens} tokens, {made.load.concurrency} at once, a model "
        f"of {made.shape.num_parameters / 1e6:.1f} M parameters",
        columns={
            "leg": "leg", "windows": "windows", "samples_per_s": "samples/s", "spread": "spread",
            "tokens_per_s": "tokens/s", "tokens_spread": "spread", "running": "at once", "waiting": "groups wait",
        },
        rows=[_row(leg, [one for one in windows if one.leg == leg]) for leg in LEGS if leg in named],
        keys=keys | made.checked,
        versions=made.seen_versions,
        more={"windows": [asdict(one) for one in windows]},
        notes=notes + _cpu_notes(windows),
    )  # fmt: skip


def _told(value: float) -> float | None:
    """JSON has no nan."""
    return None if math.isnan(value) else value


def _row(leg: str, windows: list[Window]) -> dict[str, Any]:
    samples, tokens = [one.samples_per_s for one in windows], [one.tokens_per_s for one in windows]
    return {
        "leg": leg,
        "windows": len(windows),
        "samples_per_s": median(samples),
        "spread": spread(samples),
        "tokens_per_s": median(tokens),
        "tokens_spread": spread(tokens) if all(tokens) else None,
        "running": median([one.running for one in windows]),
        "waiting": max(one.waiting for one in windows),
        "cpu_us": _cpu(windows),
    }


def _cpu(windows: list[Window]) -> dict[str, float]:
    """Process -> us per sample, over all windows of a leg."""
    samples = sum(one.samples for one in windows)
    return {name: sum(one.cpu_us[name] * one.samples for one in windows) / samples for name in windows[0].cpu_us}


def _cpu_notes(windows: list[Window]) -> list[str]:
    legs = {leg: of_leg for leg in LEGS if (of_leg := [one for one in windows if one.leg == leg])}
    return [
        f"CPU of leg {leg}, us per sample: {', '.join(f'{name} {value:,.0f}' for name, value in _cpu(of_leg).items())}."
        for leg, of_leg in legs.items()
    ]


if __name__ == "__main__":
    execute(main)
