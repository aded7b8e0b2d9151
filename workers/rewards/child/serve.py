"""The process of rewards: an event loop of its own, in which user code is called as a worker's loop would call it."""

import asyncio
import os
import resource
import signal
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.errors import RewardError
from penstock.records.codec import MAX_RECORD_BYTES, unpack
from penstock.records.job import JobFailure
from penstock.records.sample import Sample
from penstock.system.user_code import bounded, run_through, staying_alive
from penstock.workers.rewards.allowed import import_reward
from penstock.workers.rewards.calls import awaiting
from penstock.workers.rewards.judges import Judges
from penstock.workers.rewards.outcomes import number_of, too_long
from penstock.workers.rewards.wire import Verdict, frame, read_frame, read_question

#: Most bytes that are read ahead.
LIMIT_BYTES = 1024 * 1024


def serve() -> None:
    """Answer questions from stdin on stdout until stdin ends. Blocks."""
    questions, answers = os.dup(0), os.dup(1)
    # Output of user code must not mix with the answers.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_limits()
    with staying_alive():
        run_through(_Server(answers).run(questions), asyncio.new_event_loop)


def keep_limits() -> None:
    """Refuse user code that lowers a limit of this process, which other rewards share. Its own children may."""
    own, set_limit, set_depth, set_limit_of = os.getpid(), resource.setrlimit, sys.setrecursionlimit, resource.prlimit
    refusal = "other rewards share this process: set limits in a process that the reward starts"

    def setrlimit(which: int, limits: tuple[int, int]) -> None:
        if os.getpid() == own:
            raise PermissionError(refusal)
        set_limit(which, limits)

    def prlimit(pid: int, which: int, *limits: tuple[int, int]) -> tuple[int, int]:
        if limits and (pid or os.getpid()) == own:
            raise PermissionError(refusal)
        return set_limit_of(pid, which, *limits)

    def setrecursionlimit(limit: int) -> None:
        if os.getpid() == own and limit < sys.getrecursionlimit():
            raise PermissionError(refusal)
        set_depth(limit)

    resource.setrlimit, resource.prlimit, sys.setrecursionlimit = setrlimit, prlimit, setrecursionlimit


class _Server:
    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._functions: dict[str, Callable[[Sample], Awaitable[Any]]] = {}
        self._timeout_s, self._key = 0.0, ""
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, questions: int) -> None:
        reader = asyncio.StreamReader(limit=LIMIT_BYTES)
        pipe = os.fdopen(questions, "rb", 0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            _, settings = await read_frame(reader, MAX_RECORD_BYTES)
            self._begin(**unpack(settings, "settings of rewards"))
            self._write(frame(0, b""))
            while True:
                self._take(*await read_frame(reader, MAX_RECORD_BYTES))
        except asyncio.IncompleteReadError:
            return

    def _begin(self, path: list[str], names: list[str], args: dict[str, Any], timeout_s: float, key: str) -> None:
        sys.path[:] = path
        self._timeout_s, self._key = timeout_s, key
        for name in names:
            function = import_reward(name, Namespace(**args))
            self._functions[name] = awaiting(function, name, lambda one: f"sample {one.id}", Judges(()))

    def _take(self, number: int, data: bytes) -> None:
        if not data:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            return
        task = asyncio.create_task(self._answer(number, *read_question(data)), name=f"answer {number}")
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, number: int, name: str, sample: Sample) -> None:
        self._write(frame(number, (await self._judge(name, sample)).to_bytes()))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._answers, data) :]

    async def _judge(self, name: str, sample: Sample) -> Verdict:
        id_, function = sample.id, self._functions[name]  # the sample is the function's to change
        try:
            value = await bounded(lambda: function(sample), self._timeout_s, f"reward {id_}")
            reward, info = number_of(value, id_, name, self._key)
        except TimeoutError:
            return Verdict(outcome=JobFailure.REWARD_TIMEOUT, error=too_long(f"sample {id_}", name, self._timeout_s))
        except RewardError as exc:
            return Verdict(outcome=exc.outcome, error=str(exc))
        except Exception as exc:
            return Verdict.raised(exc)
        return Verdict(reward=reward, info=info)


if __name__ == "__main__":
    serve()
