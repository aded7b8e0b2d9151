"""Ctrl-C: the first one finishes the step and the checkpoint, and says how long that may take; the second one kills."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.config import Config
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import checkpoint
from penstock.consumers.grpo import main as trainer_main
from penstock.consumers.grpo.loop import TrainingLoop
from penstock.consumers.trainer import Trainer
from penstock.errors import EXIT_INTERRUPT
from penstock.system.stop import watched_signals
from tests.unit.consumers.grpo.sources import Source
from tests.unit.consumers.grpo.test_skipped_steps import good, learner


class OneBatch(Source):
    """Hands out a batch, and then waits for ever."""

    def __enter__(self) -> "OneBatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.done.append("left")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def fits(self, state: dict[str, Any]) -> bool:
        return True

    def next(self, timeout: float) -> Batch:
        return good(1)

    name = "actor"


def loop_of(folder: Path) -> tuple[TrainingLoop, OneBatch]:
    values = {
        "run": "r", "directory": str(folder), "redis": {"url": "redis://127.0.0.1:1"},
        "model": {"path": str(folder)}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
        "trainer": {"checkpoint_every": 100},
    }  # fmt: skip
    config = Config.model_validate(values)
    source = OneBatch(config)
    return TrainingLoop(config, cast(Trainer, source), learner()), source


def test_the_trainer_finishes_its_step_and_its_checkpoint_and_says_how_long_that_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, source = loop_of(tmp_path)
    step = loop.learner.step

    def stop_within(batch: Batch) -> Any:
        if loop.step == 1:
            loop.stop()
        return step(batch)

    monkeypatch.setattr(loop.learner, "step", stop_within)
    with caplog.at_level(logging.WARNING, "penstock.consumers.grpo.loop"):
        assert loop.run() == EXIT_INTERRUPT
    assert source.done == [
        "publish 0", "commit 1", "publish 1", "commit 1", "publish 2", "checkpointed", "left",
    ]  # fmt: skip
    found = checkpoint.latest(tmp_path / "r" / "checkpoints", fits=lambda _: True)
    assert found is not None
    assert found.step == 2
    (said,) = [text for text in caplog.messages if text.startswith("stop requested")]
    assert (
        "step 2 has run for 0 s and is finished (the last one took 0 s), then the checkpoint is written (it is" in said
    )
    assert "a second Ctrl-C or SIGTERM ends the trainer at once" in said


def test_signals_are_heard_of_while_the_main_thread_is_in_one_instruction() -> None:
    counts: list[int] = []
    heard = [threading.Event(), threading.Event()]

    def note(count: int) -> None:
        counts.append(count)
        heard[count - 1].set()

    before = signal.getsignal(signal.SIGTERM)
    with watched_signals(note, signal.SIGTERM):
        for event in heard:
            os.kill(os.getpid(), signal.SIGTERM)
            assert event.wait(30)
    assert counts == [1, 2]
    assert signal.getsignal(signal.SIGTERM) is before


DRIVER = """
import hashlib, sys, threading
from types import SimpleNamespace
from penstock.consumers.grpo import main

class Loop:
    def __init__(self):
        self.stopping = threading.Event()
    def stop(self):
        self.stopping.set()
        print("stopping", flush=True)
    def run(self):
        print("running", flush=True)
        self.stopping.wait()
        if sys.argv[1] == "stalls":
            # One instruction, for minutes. It releases the GIL, as torch's do, so the second signal is not late.
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        return 130

main.make_loop = lambda *_: Loop()
sys.exit(main._run_rank(None, 0, int(sys.argv[2])))
"""


@pytest.mark.parametrize(("how", "ranks"), [("ends", 1), ("stalls", 1), ("ends", 2)])
def test_a_second_ctrl_c_ends_a_trainer_that_does_not(how: str, ranks: int) -> None:
    """One of two ranks was started by torchrun, which forwards SIGINT."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER, how, str(ranks)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        if how == "stalls":
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == EXIT_INTERRUPT
    finally:
        process.kill()
        process.communicate()


class Rank:
    """A rank that ends after so many looks."""

    name = "rank"

    def __init__(self, code: int, looks: int) -> None:
        self._code, self._looks = code, looks
        self.killed = False

    @property
    def exitcode(self) -> int | None:
        return self._code if self._looks <= 0 else None

    def is_alive(self) -> bool:
        return self.exitcode is None and not self.killed

    def join(self, timeout: float) -> None:
        self._looks -= 1

    def kill(self) -> None:
        self.killed = True


def test_a_rank_that_was_stopped_does_not_end_rank_0_in_its_checkpoint() -> None:
    first, second = Rank(EXIT_INTERRUPT, 5), Rank(EXIT_INTERRUPT, 1)
    assert trainer_main._join([first, second]) == EXIT_INTERRUPT
    assert not first.killed

    failed, other = Rank(1, 1), Rank(0, 1000)
    assert trainer_main._join([other, failed]) == 1
    assert other.killed


def test_the_time_of_a_step_is_known_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = loop_of(tmp_path)
    assert loop._left() == "the checkpoint is written (it is the first, so its time is unknown)"
    loop._step_began, loop._step_s, loop._save_s = time.monotonic() - 12.2, 150.4, 3.0
    assert loop._left() == (
        "step 1 has run for 12 s and is finished (the last one took 150 s), then the checkpoint is written (the last "
        "one took 3 s)"
    )
