"""Where tokens go that an update of weights costs: an engine's tokens by 50 ms, with one cause at a time.

One SGLang server, a run that never stands still (``benchmarks.steady``): its worker always has more jobs than the
engine takes, answers are of one length and their starts spread over the time of one. Each leg is a cause of
``benchmarks.causes``, from nothing at all to a whole publication. They take turns, forwards in one round and backwards
in the next. The trainer takes batches between the events and not in them.

    rest │ before: the rate │ event │ after │ rest │ ...

Tokens are counted in the worker, the millisecond they arrive (``benchmarks.watched_worker``): that asks nothing more of
the engine. Of a request 16 come at once; those of 512 requests are out of step, so that every step of the engine shows.

``lost`` is the rate of the window before, for as long as the event and the window behind it took, less what came:
``lost_in_pause`` while the engine was held still, from the request for it until it said that it goes on, and
``lost_outside`` the rest. Each is a mean over the events of a leg with a 95 % interval (Student's t). Leg ``nothing``
shows what the method finds where nothing happens.

    python -m benchmarks.timeline --json FILE
    python -m benchmarks.timeline --device cuda --shape 1.5b --transport cuda_ipc --concurrency 512 --new-tokens 512 \\
        --engine-arg mem-fraction-static=0.5 --budget-s 540 --json FILE
    python -m benchmarks.timeline --device cuda --shape 1.5b --transport nccl --concurrency 512 --new-tokens 512 \\
        --engine-env CUDA_VISIBLE_DEVICES=1 --budget-s 540 --json FILE

It ends within ``--budget-s``, the engine's start included; the file is written after each event. Of a 1.5B model an
event takes 2.5 s and its cause on a GPU: a round of the nine legs 40 s, 8 rounds 320 s, the start 60 to 170 s.
"""

import math
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.causes import LEGS, Causes
from benchmarks.common import Report, execute, median, redis_server, versions
from benchmarks.engine import RunningEngine
from benchmarks.engine_overhead import GROUP, Load, Penstock, running_penstock
from benchmarks.gpu_model import SHAPES, fast_folder
from benchmarks.options import (
    Concurrency,
    Device,
    EngineArgs,
    EngineEnv,
    EnginePython,
    FixedTokens,
    JsonFile,
    PromptTokens,
    ShapeName,
    served,
)
from benchmarks.paired import mean_interval
from benchmarks.steady import DecodeLog, Reader, Steady
from benchmarks.ticks import TICK_S, Account, Ticks, account, drawn, in_bins, mean_shares
from benchmarks.watched_worker import PAUSES, TICKS, read_pauses
from benchmarks.weights import load_model
from penstock.errors import PenstockError, WaitTimeout
from penstock.redis.connect import connect

BIN_TICKS = 50
#: Bins of a picture.
PICTURED = 120
#: Longest wait for a batch between two events.
BATCH_S = 120.0
#: What waits to be drawn is enough for so long: for the longest event and the windows around it.
RESERVE_S = 12.0
#: For so long the engine is watched for it.
RATE_S = 2.0
#: Kept of the budget for the end of all parts.
END_S = 15.0


@dataclass(frozen=True, slots=True)
class Windows:
    """Seconds of an event's surroundings."""

    rest_s: float = 0.3
    before_s: float = 1.0
    after_s: float = 1.0
    #: How long leg ``pause`` holds the engine, and leg ``nothing`` waits.
    pause_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    """One event, and the tokens around it."""

    leg: str
    #: Seconds that it took, and ``publish`` of them.
    seconds: float
    blocked_s: float | None
    account: Account
    #: Tokens of bins of 50 ms before it and from its beginning on; a bin that is not whole is left out.
    before: list[int]
    bins: list[int]
    #: Name, begin and end of its parts, seconds from its beginning; ``pause``: the engine was held still.
    spans: list[tuple[str, float, float]]
    #: Why it does not count; '' where nothing failed.
    failure: str = ""

    @property
    def counts(self) -> bool:
        """Whether nothing failed, and the engine drew before it."""
        return not self.failure and self.account.rate > 0


@dataclass(slots=True)
class Timeline:
    """The figures as they come."""

    load: Load
    transport: str
    device: str
    json_file: Path | None
    rounds: int = 8
    windows: Windows = field(default_factory=Windows)
    #: Legs of a round, some of them several times.
    legs: tuple[str, ...] = LEGS
    #: Called after each event.
    told: Callable[["Timeline"], None] = lambda timeline: None
    shape: str = "tiny"
    seen: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    #: Tokens that were heard, and of samples that were committed; none before the end.
    checked: dict[str, int] = field(default_factory=dict)

    def measure(self, url: str, engine: RunningEngine, model: Any, shape: str, end_s: float = math.inf) -> None:
        """Events in turns until ``rounds`` or the budget end; written after each. Blocks.

        Args:
            end_s: no event is begun that would not end by then, on the monotonic clock, if it took as long as others.

        Raises:
            RuntimeError: the engine stands still, and the events before stand; or tokens were lost on their way into
                the file, and the figures are void.
        """
        self.shape, self.seen = shape, versions(connect(url), sglang=engine.sglang)
        with self._running(url, engine, model) as (penstock, ticks, folder):
            causes = Causes(penstock, model, folder / "written", self.windows.pause_s)
            with closing(DecodeLog(engine.folder / "engine-bench.log")) as log:
                steady = Steady(penstock, self.load, Reader(penstock, self.load.new_tokens), log, surplus=self._surplus)
                steady.warm_up(2 * self.load.concurrency)
                for name in ("first", "behind", "behind"):  # layouts, groups, memory for copies
                    self._rest(steady)
                    causes.bring(name)
                self._reserve(steady, ticks)
                self._rounds(steady, causes, ticks, folder, end_s)
                self._check(steady, ticks)
        self.write()
        self.report().show()

    @property
    def _surplus(self) -> int:
        """Groups that wait beyond those that are drawn: nobody admits more while a trainer publishes."""
        return 2 * self.load.concurrency // GROUP

    def _reserve(self, steady: Steady, ticks: Ticks) -> None:
        """Have as much wait as the engine draws in an event; for want of jobs it would stand idle."""
        before = ticks.total()
        steady.go_on(RATE_S)
        rate = (ticks.total() - before) / RATE_S
        steady.surplus = max(steady.surplus, math.ceil(RESERVE_S * rate / (self.load.new_tokens * GROUP)))

    @contextmanager
    def _running(self, url: str, engine: RunningEngine, model: Any) -> Iterator[tuple[Penstock, Ticks, Path]]:
        run = f"timeline-{secrets.token_hex(3)}"
        weights, folder = fast_folder(engine.folder / "weights") / run, engine.folder / run
        folder.mkdir()
        sections: dict[str, dict[str, Any]] = {
            "worker": {"apply": "in_place", "drain_timeout_s": 0.0},
            "staleness": {"mode": "async", "bound": 1_000},
            "trainer": {
                "transport": self.transport,
                "device": self.device,
                "weights_dir": str(weights),
                "keep_versions": 2,
                "folder_first": False,
            },
        }
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, weights, ignore_errors=True)
            ticks = stack.enter_context(closing(Ticks.make(folder / TICKS, 4000.0)))
            (folder / PAUSES).touch()
            (weights / "written").mkdir(parents=True)
            (folder / "written").symlink_to(weights / "written")
            penstock = stack.enter_context(
                running_penstock(
                    url, engine, self.load, self.load.concurrency // GROUP // 4 or 1, run=run, model=model,
                    sections=sections, worker=("benchmarks.watched_worker", str(folder)),
                )
            )  # fmt: skip
            yield penstock, ticks, folder

    def _rounds(self, steady: Steady, causes: Causes, ticks: Ticks, folder: Path, end_s: float) -> None:
        names = [name for name in self.legs if causes.has(name)]
        longest_s: dict[str, float] = {}
        for turn in range(self.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                began_s = time.monotonic()
                if began_s + longest_s.get(name, 0.0) + END_S > end_s:
                    return
                self.take(self._event(name, steady, causes, ticks, folder))
                longest_s[name] = max(longest_s.get(name, 0.0), time.monotonic() - began_s)

    def _event(self, name: str, steady: Steady, causes: Causes, ticks: Ticks, folder: Path) -> Event:
        self._rest(steady)
        first_s = time.monotonic()
        steady.go_on(self.windows.before_s)
        begin_s, failure = time.monotonic(), ""
        try:
            causes.bring(name)
        except PenstockError as exc:
            failure = str(exc)
        over_s = time.monotonic()
        steady.go_on(self.windows.after_s)
        first, begin, end = ticks.at(first_s), ticks.at(begin_s), ticks.at(time.monotonic())
        pauses = [*read_pauses(folder), *causes.pauses]
        counts = ticks.between(first, end)
        found = account(counts, begin - first, [(ticks.at(a) - first, ticks.at(b) - first) for a, b in pauses])
        before, bins = in_bins(counts, begin - first, BIN_TICKS)
        parts = [(one.name, one.begin_s - begin_s, one.end_s - begin_s) for one in causes.spans]
        parts += [("pause", a - begin_s, b - begin_s) for a, b in pauses if a >= begin_s]
        return Event(name, over_s - begin_s, causes.blocked_s, found, before, bins, parts, failure)

    def _rest(self, steady: Steady) -> None:
        """Let the trainer take the batches that are there, one at least: a publication is of what was trained.

        None is asked for that is not there: it would be cut for the version before.
        """
        until_s, taken = time.monotonic() + BATCH_S, 0
        steady.go_on(self.windows.rest_s)
        client, trainer = steady.penstock.control.client, steady.penstock.trainer
        while True:
            whole = int(client.hget(trainer.keys.counters, "completed") or 0)
            if whole >= (trainer.position + 1) * trainer.config.trainer.batch_groups:
                steady.reader.take()
                taken += 1
            elif taken:
                return
            else:
                steady.go_on(0.02)
            if time.monotonic() > until_s:
                raise WaitTimeout(f"The trainer did not come to the end of the batches in {BATCH_S:g} s.")

    def take(self, event: Event) -> None:
        """Keep an event and tell of it. RuntimeError where no token came in it."""
        self.events.append(event)
        one = event.account
        typer.echo(
            f"event {len(self.events)}, {event.leg}: {event.seconds:.2f} s, {one.rate:,.0f} tokens/s before, "
            f"{one.lost_in_pause:,.0f} lost in {one.pause_s:.3f} s of pause, {one.lost_outside:,.0f} outside"
            + ("" if event.counts else f"; does not count: {event.failure or 'no token came before it'}"),
            err=True,
        )
        self.write()
        if not one.tokens:
            raise RuntimeError(f"No token came for {one.seconds:.1f} s: the engine stands still.")

    def _check(self, steady: Steady, ticks: Ticks) -> None:
        """Every token of a committed sample was heard, and none twice."""
        committed, new = steady.committed - self.load.concurrency, self.load.new_tokens
        least, most = committed * new, GROUP * steady.admitted * new
        heard = ticks.total()
        if not least <= heard <= most:
            raise RuntimeError(f"{heard} tokens were heard, of {least} that were committed; the figures are void.")
        self.checked = {"tokens_heard": heard, "tokens_committed_at_least": max(0, least)}

    def write(self) -> None:
        """What there is, and tell who else keeps it."""
        self.report().write(self.json_file)
        self.told(self)

    def report(self) -> Report:
        """What each leg lost, in the pause and outside of it."""
        rows, pictures = [], []
        for leg in dict.fromkeys(event.leg for event in self.events):
            of_leg = [event for event in self.events if event.leg == leg and event.counts]
            if of_leg:
                rows.append(row_of(leg, of_leg, sum(event.leg == leg for event in self.events)))
                pictures.append(f"{leg:>8} {drawn(rows[-1]['timeline'][:PICTURED])}")
        rates = [event.account.rate for event in self.events]
        figures = (
            "lost",
            "lost_in_pause",
            "lost_outside",
            "lost_outside_low",
            "lost_outside_high",
            "blocked_s",
            "send_s",
        )
        return Report(
            title=f"tokens around updates: a model of {SHAPES[self.shape].num_parameters / 1e6:.1f} M parameters by "
            f"{self.transport}, {self.load.concurrency} answers of {self.load.new_tokens} tokens at once",
            columns={
                "leg": "leg", "events": "events", "seconds": "event s", "pause_s": "pause s",
                "lost_in_pause": "lost in pause", "lost_outside": "lost outside", "lost_outside_low": "low",
                "lost_outside_high": "high", "lost_outside_s": "outside, in s", "blocked_s": "blocked s",
                "send_s": "send s",
            },
            rows=rows,
            keys={"rate": median(rates) if rates else None}
            | {name: {row["leg"]: row[name] for row in rows if row[name] is not None} for name in figures}
            | self.checked,
            versions=self.seen,
            more={"windows": asdict(self.windows), "events": [asdict(event) for event in self.events]},
            notes=[
                "lost: means of the events of a leg, 95 % intervals; outside, in s: over the rate before.",
                f"Bins of {BIN_TICKS * TICK_S * 1000:.0f} ms from the beginning of an event on, over the rate before:",
                *pictures,
            ],
        )  # fmt: skip


def row_of(leg: str, events: list[Event], tried: int) -> dict[str, Any]:
    """The figures of a leg, of the events that count."""
    accounts = [event.account for event in events]
    row: dict[str, Any] = {"leg": leg, "events": len(events), "failed": tried - len(events)}
    for name in ("lost", "lost_in_pause", "lost_outside"):
        mean, low, high = mean_interval([getattr(one, name) for one in accounts])
        row |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    sent = [end - begin for event in events for name, begin, end in event.spans if name == "send"]
    blocked = [event.blocked_s for event in events if event.blocked_s is not None]
    rate = sum(one.rate for one in accounts) / len(accounts)
    spans = {name: [e - b for event in events for n, b, e in event.spans if n == name] for name in _names(events)}
    return row | {
        "seconds": median([event.seconds for event in events]),
        "pause_s": median([one.pause_s for one in accounts]),
        "rate": rate,
        "lost_outside_s": row["lost_outside"] / rate if rate else None,
        "blocked_s": median(blocked) if blocked else None,
        "send_s": median(sent) if sent else None,
        "spans_s": {name: median(values) for name, values in spans.items()},
        "timeline": mean_shares([(event.bins, event.account.rate * BIN_TICKS * TICK_S) for event in events]),
    }


def _names(events: list[Event]) -> list[str]:
    return list(dict.fromkeys(name for event in events for name, _, _ in event.spans))


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shape: ShapeName = "tiny",
    transport: Annotated[str, typer.Option(help="gloo, cuda_ipc, nccl, or disk.")] = "gloo",
    legs: Annotated[str, typer.Option(help="Of a round, comma-separated; one may come twice.")] = ",".join(LEGS),
    rounds: Annotated[int, typer.Option(help="Events of each leg; fewer where the budget ends before.")] = 8,
    budget_s: Annotated[float, typer.Option(help="It ends within so much of its start.")] = 540.0,
    concurrency: Concurrency = 64,
    prompt_tokens: PromptTokens = 32,
    new_tokens: FixedTokens = 64,
    rest_s: Annotated[float, typer.Option(help="Between two events, where the trainer takes batches.")] = 0.3,
    before_s: Annotated[float, typer.Option(help="Window before an event, which gives the rate.")] = 1.0,
    after_s: Annotated[float, typer.Option(help="Window behind an event.")] = 1.0,
    pause_s: Annotated[float, typer.Option(help="How long leg pause holds the engine.")] = 0.1,
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
) -> None:
    """Tokens that an update of weights costs, in the pause and outside of it, by cause."""
    end_s = time.monotonic() + budget_s
    load, windows = Load(0, concurrency, prompt_tokens, new_tokens), Windows(rest_s, before_s, after_s, pause_s)
    wanted = tuple(legs.split(","))
    if unknown := set(wanted) - set(LEGS):
        raise SystemExit(f"There is no leg {min(unknown)!r}; choose from {', '.join(LEGS)}.")
    made = Timeline(load, transport, device, json_file, rounds, windows, wanted)
    with (
        redis_server() as url,
        served(SHAPES[shape], device, concurrency, engine_python, engine_arg, engine_env) as engine,
    ):
        made.measure(url, engine, load_model(engine.model, device), shape, end_s)


if __name__ == "__main__":
    execute(main)
