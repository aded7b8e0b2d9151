"""Start the process of rewards, and end it with everything that it started when the worker is gone or asks for it.

    worker ── start ──> this process ── fork ──> rewards (a session of its own)
       └── a pipe that it never writes to: its end, by kill -9 too, ends all of them

No user code runs here, so nothing that user code does to its own process keeps this one from its work. Orphans of
rewards become children of this process (a subreaper), so that one that left the session is found too. A process of
rewards that was stopped is killed: nobody would continue it.

Run as ``python -m workers.rewards.child.keeper PIPE``.
"""

import contextlib
import os
import select
import signal
import sys
from pathlib import Path

from penstock.system.processes import adopt_orphans, die_with_parent
from workers.rewards.child.serve import serve

#: Between two checks whether the process of rewards is stopped.
CHECK_MS = 500


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
    signal.signal(signal.SIGTERM, lambda *_: _end(pid, signal.SIGTERM))
    for own in (0, 1):
        os.close(own)
    _end(pid, _wait(pid, pipe))


def _wait(pid: int, pipe: int) -> int:
    """Wait until the process ends, is stopped, or is not wanted any more; return the code to exit with."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(os.pidfd_open(pid), select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(CHECK_MS)]
        done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if done and os.WIFSTOPPED(status):
            return 128 + os.WSTOPSIG(status)
        if done:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if pipe in ready:
            return 0


def _end(pid: int, code: int) -> None:
    """Kill the process, its session and its orphans, then exit. Blocks until none is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    while orphans := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for orphan in map(int, orphans):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(orphan, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
