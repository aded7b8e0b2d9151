"""Forks parts of a run from a process that has imported what they need.

    python -m tests.chaos.cluster.zygote MODULE ...

A part that is started so is a process of its own, with its own log, environment and history, and dies as any other. It
is spared its imports alone, which take a machine more than all else that a run does. The zygote opens no connection
and has one thread, so a child inherits neither.

Its stdin is a socket of whole messages in JSON, each answered by one: ``{"argv": [MODULE, ...], "environment": {},
"log": PATH}`` by the child's pid, ``{"wait": PID}`` by its exit code, None while it runs. It ends when the other side
closes.
"""

import gc
import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from penstock.system.keeper import die_with_parent
from tests.chaos.parts.false_clock import FalseClock
from tests.chaos.recording import hooks

#: Most bytes of a message.
MESSAGE_BYTES = 128 * 1024


def main() -> None:
    """Import the modules, those that are there, and fork until the other side closes; in a child be what it asked."""
    for name in sys.argv[1:]:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    gc.freeze()
    job = serve(socket.socket(fileno=0))
    if job is not None:
        become(job)


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Answer messages; in a child what is to be run, None at the end. Blocks. Raises RuntimeError of a thread."""
    zygote = os.getpid()
    control.send(b"ready")
    while message := control.recv(MESSAGE_BYTES):
        job: dict[str, Any] = json.loads(message)
        if "wait" in job:
            control.send(json.dumps(ended(job["wait"])).encode())
            continue
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("An import started a thread, which a child would be without: take it out of IMPORTS.")
        if not (pid := os.fork()):
            die_with_parent(zygote)
            control.detach()  # the part has another stdin
            return job
        control.send(json.dumps(pid).encode())
    return None


def ended(pid: int) -> int | None:
    """Exit code of a child, minus the signal of one that was killed; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def become(job: dict[str, Any]) -> None:
    """Run a module as ``python -m`` does, with the environment and the log of the part."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(job["environment"])
    hooks.rename(os.environ.get("CHAOS_WHO", ""))
    if clock := os.environ.get("CHAOS_CLOCK"):
        FalseClock(Path(clock)).install()
    sys.argv = list(job["argv"])
    runpy.run_module(job["argv"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
