"""Tried prompts end when somebody wants them to, whatever a user's code does."""

import asyncio
import signal

import pytest
import uvloop

from penstock.console.launch.trials import until_stopped
from penstock.system.user_code import Raised, bounded, run_through, staying_alive


def test_a_second_signal_ends_code_that_holds_up_the_loop() -> None:
    went_on: list[str] = []

    async def reward() -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append("after one")
        signal.raise_signal(signal.SIGINT)
        went_on.append("after two")

    async def work() -> list[object]:
        with pytest.raises(Raised, match="KeyboardInterrupt"):
            await bounded(reward, 60, "reward")
        await asyncio.sleep(60)
        return []

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(asyncio.CancelledError), staying_alive():
        run_through(until_stopped(work()), uvloop.new_event_loop)  # type: ignore[arg-type]
    assert went_on == ["after one"]
    assert signal.getsignal(signal.SIGINT) is before
