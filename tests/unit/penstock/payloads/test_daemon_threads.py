"""Blocking work that may never come back; what comes back late or not at all is tried in a folder of payloads."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.payloads.daemon_threads import DaemonThreads

#: Longest wait for what must come, and a wait that is sure to be over by itself.
PATIENCE_S, SOON_S = 60.0, 0.05


@pytest.fixture
def comes_back() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("most", [1, 2])
def test_work_returns_or_raises_what_it_does(most: int) -> None:
    threads, all_here = DaemonThreads("t", most), threading.Barrier(most)

    def fail(step: Callable[[], None]) -> None:
        raise ValueError("no")

    with ThreadPoolExecutor(4) as callers:
        meeting = [callers.submit(threads.do, lambda step: all_here.wait(PATIENCE_S), PATIENCE_S) for _ in range(most)]
        assert sorted(one.result() for one in meeting) == list(range(most)), "so many are under way at once"
        found = [callers.submit(threads.do, lambda step, i=i: i, PATIENCE_S) for i in range(9)]
        assert [one.result() for one in found] == list(range(9))
    with pytest.raises(ValueError, match="no"):
        threads.do(fail, PATIENCE_S)


def test_what_hangs_is_left_and_nothing_else_is_begun_until_it_comes_back(comes_back: threading.Event) -> None:
    threads, hung, begun = DaemonThreads("t"), [], []

    def hang(step: Callable[[], None]) -> None:
        hung.append(threading.current_thread())
        comes_back.wait(PATIENCE_S)

    with pytest.raises(TimeoutError, match=r"nothing came back in 0.05 s"):
        threads.do(hang, SOON_S)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="what was asked before has not come back"):
            threads.do(lambda step: begun.append(1), PATIENCE_S)
    comes_back.set()
    hung[0].join(PATIENCE_S)
    threads.do(lambda step: begun.append(2), PATIENCE_S)
    assert begun == [2], "what nobody waited for any more was not begun"


def test_who_waits_for_a_turn_is_refused_where_the_one_before_hangs(comes_back: threading.Event) -> None:
    threads = DaemonThreads("t")
    with ThreadPoolExecutor(2) as callers:
        calls = [callers.submit(threads.do, lambda step: comes_back.wait(PATIENCE_S), SOON_S) for _ in range(2)]
        said = sorted(str(one.exception()) for one in calls)
    assert said == ["nothing came back in 0.05 s", "what was asked before has not come back"]


def test_what_makes_progress_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: each wait that is over finds that something has come back."""
    threads, join = DaemonThreads("t"), threading.Thread.join
    over, stepped = threading.Event(), threading.Event()
    waits: list[None] = []

    def work(step: Callable[[], None]) -> str:
        for _ in range(3):
            assert over.wait(PATIENCE_S)
            over.clear()
            step()
            stepped.set()
        return "done"

    def until_a_step(thread: threading.Thread, timeout: float | None = None) -> None:
        if len(waits) == 3:
            return join(thread, PATIENCE_S)
        waits.append(None)
        over.set()
        assert stepped.wait(PATIENCE_S)
        stepped.clear()
        return None

    monkeypatch.setattr(threading.Thread, "join", until_a_step)
    assert threads.do(work, SOON_S) == "done"
    assert len(waits) == 3
