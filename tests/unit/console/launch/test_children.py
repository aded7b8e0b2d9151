"""The end of a run: the trainer finishes what it does, the others have their limits, and a second Ctrl-C kills."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.config import Config
from penstock.console.launch import children
from penstock.console.launch.children import HURRY_S, STOP_S, stop_children
from penstock.system.keeper import KILL_S
from penstock.system.processes import Child
from penstock.system.stop import Stop


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Process:
    """A child that ends so long after its first SIGTERM."""

    def __init__(self, name: str, clock: Clock, takes_s: float) -> None:
        self.name, self.clock, self.takes_s = name, clock, takes_s
        self.signals = 0
        self.killed_after_s: float | None = None
        self._told_at = math.inf

    def alive(self) -> bool:
        return self.killed_after_s is None and self.clock.now < self._told_at + self.takes_s

    def terminate(self) -> None:
        self.signals += 1
        self._told_at = min(self._told_at, self.clock.now)

    def kill(self) -> None:
        self.killed_after_s = self.clock.now - self._told_at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(children, "time", clock)
    return clock


def end(
    processes: list[Process], stop: Stop | None = None, meanwhile: Callable[[], object] = bool, **options: Any
) -> None:
    data = {"train": [{"name": "d", "path": "d.jsonl"}]}
    config = Config.model_validate({"run": "r", "model": {"path": "m"}, "data": data})
    options = {"drain": False, "meanwhile": meanwhile, **options}
    stop_children([cast(Child, one) for one in processes], config, stop or Stop(), **options)


def test_the_trainer_finishes_a_step_of_150_s_and_gets_one_signal(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, worker = Process("trainer", clock, 150.0), Process("worker-0", clock, 5.0)
    end([trainer, worker])
    assert (trainer.killed_after_s, trainer.signals) == (None, 1)
    assert (worker.killed_after_s, worker.signals) == (None, 2), "it is hurried"
    assert "still waiting for trainer after 10 s; Ctrl-C kills what is left" in caplog.messages


def test_other_parts_are_killed_at_their_limit_while_the_trainer_goes_on(clock: Clock) -> None:
    trainer, worker = Process("trainer", clock, 150.0), Process("worker-0", clock, math.inf)
    buffer, producer = Process("buffer", clock, math.inf), Process("producer", clock, math.inf)
    end([buffer, trainer, worker, producer])
    assert trainer.killed_after_s is None
    assert worker.killed_after_s == pytest.approx(HURRY_S + KILL_S + STOP_S, abs=0.1), "after its keeper"
    assert buffer.killed_after_s == pytest.approx(STOP_S, abs=0.1)
    assert producer.killed_after_s == pytest.approx(STOP_S, abs=0.1)


def test_a_worker_that_drains_is_killed_after_its_keeper_had_its_time(clock: Clock) -> None:
    worker = Process("worker-0", clock, math.inf)
    end([worker], drain=True)
    assert worker.killed_after_s == pytest.approx(30.0 + KILL_S + STOP_S, abs=0.1)


def test_a_second_ctrl_c_kills_the_trainer(clock: Clock) -> None:
    trainer, stop, began = Process("trainer", clock, math.inf), Stop(), clock.now
    stop.press()

    def press_after_20_s() -> None:
        if clock.now > began + 20 and stop.count == 1:
            stop.press()

    end([trainer], stop, press_after_20_s)
    assert trainer.killed_after_s == pytest.approx(20.0, abs=0.2)


def test_a_trainer_of_a_failed_run_has_a_limit_by_its_last_step(clock: Clock) -> None:
    trainer = Process("trainer", clock, math.inf)
    end([trainer], finish_s=60.0)
    assert trainer.killed_after_s == pytest.approx(60.0 + STOP_S, abs=0.2)


def test_the_launcher_says_how_long_the_last_step_took(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from penstock.console.launch.run import _Run

    clock = Clock()
    run = SimpleNamespace(children=[Process("trainer", clock, 1.0)], folder=SimpleNamespace(path=tmp_path))
    run._last_step_s = lambda: _Run._last_step_s(cast(_Run, run))
    assert _Run._stopping(cast(_Run, run)).startswith(
        "Stopping: the trainer finishes its step and writes a checkpoint."
    )
    (tmp_path / "steps.jsonl").write_text('{"step": 3, "step_s": 140.0, "publish_s": 10.0}\n')
    assert "a checkpoint; its last step took 150 s. Ctrl-C again kills it." in _Run._stopping(cast(_Run, run))
    run.children = []
    assert _Run._stopping(cast(_Run, run)) == "Stopping."
