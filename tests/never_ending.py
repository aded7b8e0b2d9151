"""A test that outlives its limit is ended with its process, and says where each thread of it stood.

pytest-timeout ends what a test does; what then waits in a fixture's end, or never hears the signal, waits for ever.
"""

import faulthandler
import os
import threading
from collections.abc import Generator
from typing import IO, Any

import pytest

#: What a test may take after its time limit, for the ends of its fixtures.
GRACE_S = 120.0
_STDERR = pytest.StashKey[IO[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the process' standard error, which tests capture."""
    config.stash[_STDERR] = os.fdopen(os.dup(2), "w")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_STDERR].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if not (limit_s := _limit_s(item)):
        return (yield)
    timer = threading.Timer(limit_s + GRACE_S, _end, (item.nodeid, item.config.stash[_STDERR]))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def _limit_s(item: pytest.Item) -> float:
    """What pytest-timeout gives it; 0 for no limit."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker is not None else item.config.getini("timeout"))


def _end(name: str, stderr: IO[str]) -> None:
    stderr.write(f"\n{name} did not end by its time limit, nor {GRACE_S:.0f} s later:\n")
    stderr.flush()
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    os._exit(1)
