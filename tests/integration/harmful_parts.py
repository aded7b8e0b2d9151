"""Rewards that harm the process they run in, named by import path in the tests of ``reward.own_process``."""

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from penstock.records.sample import Sample


def _folder() -> Path:
    return Path(os.environ["PENSTOCK_TEST_FOLDER"])


def good(sample: Sample) -> float:
    return float(sum(sample.generated))


async def good_in_the_loop(sample: Sample) -> float:
    await asyncio.sleep(0)
    return float(sum(sample.generated))


def holds_the_gil(sample: Sample) -> float:
    """Lock a mutex twice in C, with the interpreter's lock held: no signal interrupts that."""
    (_folder() / "held").touch()
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
    return 0.0


def stops_itself(sample: Sample) -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0.0


def kills_itself(sample: Sample) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def closes_files(sample: Sample) -> float:
    os.closerange(0, 1024)
    time.sleep(600)
    return 0.0


def limits_files(sample: Sample) -> float:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    return 0.0


def limits_recursion(sample: Sample) -> float:
    sys.setrecursionlimit(60)
    return 0.0


def starts_children(sample: Sample) -> float:
    """Leave a child in this session and one in its own, name both, and hold the interpreter's lock."""
    ours, own = (subprocess.Popen(["sleep", "600"], start_new_session=apart) for apart in (False, True))
    made = _folder() / "children.new"
    made.write_text(f"{os.getpid()} {os.getppid()} {ours.pid} {own.pid}")
    made.rename(_folder() / "children")
    return holds_the_gil(sample)


def stops_itself_again(sample: Sample) -> float:
    while True:
        stops_itself(sample)


def ignores_signals(sample: Sample) -> float:
    """In the main thread alone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)
    return 0.0


async def harms_once(sample: Sample) -> float:
    """Harm the worker in its event loop, in the way that the job's label names; the second call is good."""
    held = _folder() / "held"
    if held.exists():
        return good(sample)
    held.touch()
    harm: float = globals()[sample.job.label](sample)
    return harm


def leaves_children(sample: Sample) -> float:
    """Start children in this session and in its own, and an orphan of its own session; leave them running."""
    for number, command in enumerate(("exec sleep 600", "exec sleep 600", "setsid sleep 600 & echo $! > $0; exit 0")):
        child = _folder() / f"child-{number}"
        process = subprocess.Popen(["sh", "-c", command, str(child)], start_new_session=number > 0)
        if number == 2:
            process.wait()
        else:
            child.write_text(str(process.pid))
    return good(sample)
