"""Show a running run: a line that refreshes on a terminal, else one every few seconds."""

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live as RichLive
from rich.text import Text

from penstock.config import Config
from penstock.console.read.why import Chain, chains
from penstock.console.terminal import Terminal, duration
from penstock.protocol.snapshot import jobs_to_train, main_trainer
from penstock.text import printable, redact

#: Seconds between two plain lines, and between two equal ones.
LINE_EVERY_S = 5.0
SAME_EVERY_S = 60.0
#: Shorter waits are not shown.
WAIT_SHOWN_S = 1.0
#: Seconds of recent steps from which the remaining time is estimated.
PACE_S = 120.0
#: Waits shown in a plain line, longest first.
WAITS_SHOWN = 2


class Live:
    """Shows snapshots (``penstock.protocol.snapshot``); absent keys show as a dash. A context manager around the run.

    Args:
        on_closed: called once when the reader of the output exits.
    """

    def __init__(
        self,
        config: Config,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.console = console or Terminal(on_closed=self._close)
        #: Whether the reader of the output has exited (``| head``); nothing is shown from then on.
        self.closed = False
        self._on_closed = on_closed
        self._clock = clock
        self._started = clock()
        self._step: Any = None
        #: Number of steps that the trainer will make; 0: unknown.
        self._total: int = config.trainer.steps
        #: Times at which steps were reached, within ``PACE_S``.
        self._steps: deque[tuple[float, int]] = deque()
        self._last_line = float("-inf")
        self._last_news = ""
        # Refreshed by update() only: no second thread beside the one that starts children.
        self._live = RichLive(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def event(self, text: str) -> None:
        """Print one permanent line."""
        self.console.print(Text(printable(redact(text))), soft_wrap=True)

    def update(self, snapshot: dict[str, Any], evaluation: dict[str, Any] | None = None) -> None:
        """Show the newest state; ``evaluation`` is the last row of ``eval.jsonl``. Returns at once."""
        # A custom loop's number of steps is unknown: trainer.steps is the reference trainer's.
        self._total = main_trainer(snapshot).get("total_steps", self.config.trainer.steps)
        self._note_step(snapshot)
        if self._live is not None:
            self._live.update(Text(printable(self.line(snapshot, evaluation))), refresh=True)
            return
        waited_s, news = self._clock() - self._last_line, self._news(snapshot, evaluation)
        if waited_s >= (SAME_EVERY_S if news == self._last_news else LINE_EVERY_S):
            self._last_line, self._last_news = self._clock(), news
            self.event(self.line(snapshot, evaluation))

    def _close(self) -> None:
        self.closed = True
        self._on_closed()

    def _news(self, snapshot: dict[str, Any], evaluation: dict[str, Any] | None) -> str:
        """Return the part of a line that does not change with time alone."""
        waits = [f"{wait.get('who')} {wait.get('what')}" for wait in _notable(snapshot)]
        return f"{self._figures(snapshot, evaluation)} {sorted(waits)}"

    def line(self, snapshot: dict[str, Any], evaluation: dict[str, Any] | None = None) -> str:
        """Return one line with the most important figures."""
        parts = [f"{name} {value}" for name, value in self._figures(snapshot, evaluation)]
        parts += [f"left {left}"] if (left := self._left()) else []
        return f"[{_clock_text(self._clock() - self._started)}] " + "  ".join(parts) + _waits_line(snapshot)

    def _note_step(self, snapshot: dict[str, Any]) -> None:
        step = _step_of(snapshot)
        before, self._step = self._step, step
        if not isinstance(step, int) or not isinstance(before, int) or step == before:
            return
        if step < before:
            self._steps.clear()  # it went back to a checkpoint
        self._steps.append((self._clock(), step))
        while len(self._steps) > 2 and self._steps[-1][0] - self._steps[0][0] > PACE_S:
            self._steps.popleft()

    def _left(self) -> str:
        """Return the estimated time for the remaining steps; '' if unknown."""
        if len(self._steps) < 2:
            return ""
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        left = max(0, self._total - last)
        return duration(left * (ended - began) / (last - first)) if left else ""

    def _figures(self, snapshot: dict[str, Any], evaluation: dict[str, Any] | None) -> list[tuple[str, str]]:
        trainer = main_trainer(snapshot)
        workers = snapshot.get("workers") or []
        staleness = f"{_number(trainer.get('staleness_mean'), 2)} (max {_number(trainer.get('staleness_max'))})"
        figures = [
            ("step", _number(_step_of(snapshot)) + (f"/{self._total}" if self._total else "")),
            ("version", _number(snapshot.get("version"))),
            ("reward", _number(trainer.get("reward_mean"), 3)),
            ("held-out", _number((evaluation or {}).get("accuracy"), 3)),
            ("staleness", staleness),
            ("queued", _number(jobs_to_train(snapshot, "queued"))),
            ("leased", _number(jobs_to_train(snapshot, "leased"))),
            ("ready", _number(snapshot.get("ready"))),
            ("tokens/s", _number(sum(worker.tokens_per_s for worker in workers))),
        ]
        evaluated = (snapshot.get("lanes") or {}).get("eval") or {}
        if left := evaluated.get("queued", 0) + evaluated.get("leased", 0):
            figures.append(("evaluating", f"{_number(left)} to go"))
        if snapshot.get("dead"):
            figures.append(("dead", _number(snapshot["dead"])))
        return figures


def _step_of(snapshot: dict[str, Any]) -> Any:
    return snapshot.get("step", main_trainer(snapshot).get("step"))


def _waits(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return [wait for wait in snapshot.get("waits") or [] if (wait.get("since_s") or 0.0) >= WAIT_SHOWN_S]


def _notable(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    # Without waits that are normal: evaluators between evaluations, verifiers during generation.
    return [wait for wait in _waits(snapshot) if not _is_idle(str(wait.get("who")))]


def _waits_line(snapshot: dict[str, Any]) -> str:
    """Return the waiting parts and the causes at the end of their chains, so that a log line shows why a run stalls."""
    waits = _notable(snapshot)
    found = chains({**snapshot, "waits": waits}) if waits else []
    texts = [_chain_text(chain) for chain in found[:WAITS_SHOWN]]
    if len(found) > WAITS_SHOWN:
        texts.append(f"{len(found) - WAITS_SHOWN} more wait")
    return " | " + "; ".join(texts) if texts else ""


def _chain_text(chain: Chain) -> str:
    # Without the advice at its end, which is for `penstock why`: the launcher starts missing parts itself.
    first, last = chain.links[0], chain.links[-1]
    text = f"{first.who} {_wait_text(first.to_map())}"
    return text if last is first else f"{text}, because {last.who} {_wait_text(last.to_map())}"


def _is_idle(who: str) -> bool:
    return who.endswith(":eval") or who.startswith("verifiers:")


def _wait_text(wait: dict[str, Any]) -> str:
    return f"waits for {wait.get('what')} ({wait.get('since_s') or 0.0:.0f} s)"


def _number(value: Any, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _clock_text(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
