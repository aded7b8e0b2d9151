"""Start the process of rewards, and end it with everything that it started when the worker is gone or asks for it.

    worker ── start ──> this process ── fork ──> rewards (a session of its own)
       └── a pipe that it never writes to: its end, by kill -9 too, ends all of them

No user code runs here, so nothing that user code does to its own process keeps this one from its work. Orphans of
rewards become children of this process (a subreaper), so that one that left the session is found too. A process of
rewards that was stopped (SIGSTOP) is killed, because nothing would continue it.

Run as ``python -m penstock.workers.rewards.child.keeper PIPE``.
"""

import os
import signal
import sys

from penstock.system.processes import adopt_orphans, die_with_parent
from penstock.workers.rewards.child.serve import serve
from penstock.workers.rewards.keeper import Kept, kill_children


def main(pipe: int) -> None:
    """Fork the process of rewards, and end with it; the exit code is its own, or 128 and the number of its signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(pipe)
        os.setsid()
        die_with_parent(keeper)
        serve()
        os._exit(0)
    # Sent by the kernel when the worker is gone; the pipe says the same, unless a fork of the worker holds it.
    signal.signal(signal.SIGTERM, lambda *_: _end(signal.SIGTERM))
    for own in (0, 1):
        os.close(own)
    kept = Kept(pid, pipe)
    while True:
        status, message = kept.wait()
        if status is not None:
            _end(_code(status))
        if message is not None:
            _end(0)


def _code(status: int) -> int:
    if os.WIFSTOPPED(status):
        return 128 + os.WSTOPSIG(status)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _end(code: int) -> None:
    kill_children()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
