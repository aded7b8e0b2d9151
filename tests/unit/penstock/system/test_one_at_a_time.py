"""Work in a thread that may be left behind; what comes back late or not at all is tried in a folder of payloads."""

import threading

import pytest

from penstock.system.one_at_a_time import OneAtATime


def test_what_makes_progress_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: each wait that is over finds that something has come back."""
    asking, join = OneAtATime("t"), threading.Thread.join
    over, stepped = threading.Event(), threading.Event()
    waits: list[None] = []

    def work() -> str:
        for _ in range(3):
            assert over.wait(60.0)
            over.clear()
            asking.step()
            stepped.set()
        return "done"

    def until_a_step(thread: threading.Thread, timeout: float | None = None) -> None:
        if len(waits) == 3:
            return join(thread, 60.0)
        waits.append(None)
        over.set()
        assert stepped.wait(60.0)
        stepped.clear()
        return None

    monkeypatch.setattr(threading.Thread, "join", until_a_step)
    assert asking.do(work, 0.05) == "done"
    assert len(waits) == 3
