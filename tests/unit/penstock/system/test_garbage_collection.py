"""The cycle collector is held off while records are made, and never longer."""

import gc
import threading

import pytest

from penstock.system.garbage_collection import collecting_later


def test_the_collector_comes_back_after_the_last_one() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collecting_later():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with collecting_later():
        thread.start()
        assert inside.wait(30)
        assert not gc.isenabled()
    assert not gc.isenabled(), "the other thread is still at it"
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_the_collector_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="x"), collecting_later():
        raise ValueError("x")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collecting_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
