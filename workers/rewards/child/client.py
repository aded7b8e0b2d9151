"""Rewards given by import path, computed in one process beside their worker.

ask ─> answer within ``reward.timeout_s``: a number, or the failure of this reward alone
  └─ the process died, or answers nothing: all rewards in it are computed again, each while no other runs;
     a second death then is the fault of that one, and fails it
"""

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from penstock.errors import ProtocolError, RewardError
from penstock.records.codec import pack
from penstock.records.job import JobFailure
from penstock.records.sample import Sample
from penstock.system import keeper
from penstock.system.processes import end_text, python_command, python_environment
from penstock.text import format_exc
from penstock.workers.rewards.outcomes import Raised
from penstock.workers.rewards.wire import MAX_ANSWER_BYTES, Verdict, frame, question_of, read_frame

log = logging.getLogger(__name__)

#: After its time a reward is a time-out, as its process says; a process that says nothing for so much longer is stuck.
STUCK_S = 10.0
#: Longest import of user code, which counts for no reward's time: a model may be loaded in it.
START_S = 600.0
#: Longest wait for the keeper to end what it keeps.
END_S = 5.0


class _Died(Exception):
    """The process died, or was killed because it was stuck."""


class RewardProcess:
    """The process of one worker's rewards: started with the first question, and again after a death.

    Args:
        args: given first to functions of slime's signature.
        key: entry of a dict that is the number.
    """

    def __init__(self, args: Namespace, *, timeout_s: float, key: str) -> None:
        #: Rewards that may be asked, ``module:function``.
        self._names: list[str] = []
        self._settings = {"names": self._names, "args": vars(args), "timeout_s": timeout_s, "key": key}
        self._limit_s = timeout_s + STUCK_S
        self._key = key
        self._child: _Child | None = None
        #: Held while a question is sent, and by one that runs alone until its end.
        self._turn = asyncio.Lock()
        self._closed = False

    def asking(self, name: str) -> Callable[[Sample], Awaitable[Any]]:
        """Return reward ``name`` as a function of a sample; call it before the first question."""
        self._names.append(name)
        return partial(self.ask, name)

    async def ask(self, name: str, sample: Sample) -> dict[str, Any]:
        """Compute reward ``name`` of a sample; return its number under ``key``, beside what else it gave.

        Waits for at most ``timeout_s`` per try, beside rewards that run alone after a death, and ``START_S`` for a
        process that starts.

        Raises:
            RewardError: reward_timeout, reward_not_a_number, reward_too_large; reward_raised where the process died
                twice of this reward.
            Raised: the reward raised.
        """
        try:
            question = question_of(name, sample)
        except (TypeError, ValueError, OverflowError) as exc:
            message = f"sample {sample.id}: it cannot be sent to the process of rewards: {format_exc(exc)}."
            raise RewardError(JobFailure.REWARD_RAISED, message) from exc
        try:
            return (await self._shared(question)).result(self._key)
        except _Died:
            pass
        try:
            return (await self._alone(question)).result(self._key)
        except _Died as exc:
            message = f"sample {sample.id}: reward {name} ended its process twice: it {exc}."
            raise RewardError(JobFailure.REWARD_RAISED, message) from exc

    async def close(self) -> None:
        """Kill the process and all that it started. Blocks for ``END_S`` at most."""
        self._closed = True
        if self._child is not None:
            await self._child.end("was closed")

    async def _shared(self, question: bytes) -> Verdict:
        async with self._turn:
            child = await self._started()
            number, answer = child.send(question)
        return await child.wait(number, answer, self._limit_s)

    async def _alone(self, question: bytes) -> Verdict:
        async with self._turn:
            if self._child is not None and (running := self._child.answers()):
                await asyncio.wait(running)
            child = await self._started()
            number, answer = child.send(question)
            return await child.wait(number, answer, self._limit_s)

    async def _started(self) -> "_Child":
        if self._closed:
            raise Raised("was not computed: its worker ends")
        if self._child is None or self._child.ended:
            self._child = await _Child.start(self._settings)
        await self._child.ready()
        return self._child


class _Child:
    """One start of the process."""

    def __init__(self, process: asyncio.subprocess.Process, life: int) -> None:
        self._process = process
        #: Closing it has the keeper kill the process.
        self._life = life
        #: 0 is that of the settings.
        self._serial = itertools.count(1)
        self._ready = asyncio.Event()
        self._open: dict[int, asyncio.Future[Verdict]] = {}
        self.ended = False
        self._how = "ended"
        self._ending: asyncio.Task[None] | None = None
        self._reading = asyncio.create_task(self._read(), name="rewards")

    @classmethod
    async def start(cls, settings: dict[str, Any]) -> "_Child":
        pipe, life = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *keeper.command(pipe, python_command("penstock.workers.rewards.child.serve"), ends_stopped=True),
                env=python_environment(os.environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(pipe,),
                start_new_session=True,
            )
        except BaseException:
            os.close(life)
            raise
        finally:
            os.close(pipe)
        child = cls(process, life)
        child._write(frame(0, pack(settings | {"path": sys.path})))
        return child

    async def ready(self) -> None:
        """Wait until user code is imported, or the process ended: by itself, or killed after ``START_S``."""
        try:
            async with asyncio.timeout(START_S):
                await self._ready.wait()
        except TimeoutError:
            await self.end(f"did not import its functions within {START_S:g} s and was killed")

    def send(self, question: bytes) -> tuple[int, "asyncio.Future[Verdict]"]:
        """Send a question; return its number and its answer to come. Raises _Died if the process has ended."""
        if self.ended:
            raise _Died(self._how)
        number = next(self._serial)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        self._write(frame(number, question))
        return number, answer

    async def wait(self, number: int, answer: "asyncio.Future[Verdict]", limit_s: float) -> Verdict:
        try:
            done, _ = await asyncio.wait({answer}, timeout=limit_s)
            if not done:
                await self.end(f"answered nothing for {limit_s:g} s and was killed")
            return await answer
        finally:
            # A reward that runs alone waits for this future, also after its caller was cancelled.
            was_pending = answer.cancel()
            if self._open.pop(number, None) is not None and was_pending and not self.ended:
                self._write(frame(number, b""))  # tells the process that the result is not needed

    def answers(self) -> "set[asyncio.Future[Verdict]]":
        return set(self._open.values())

    async def end(self, how: str) -> None:
        """Kill the process and all that it started; open calls fail with ``how`` it ended."""
        if self._ending is None:
            self.ended = True
            self._ending = asyncio.create_task(self._end(how), name="end of rewards")
        await asyncio.shield(self._ending)

    async def _end(self, how: str) -> None:
        os.close(self._life)
        try:
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            code = await self._process.wait()
        how = self._how = how or (f"ended by {end_text(code)}" if code else "closed its pipe")
        self._ready.set()
        if self._open:
            log.warning("the process of rewards %s; its %d rewards run again, one at a time", how, len(self._open))
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(_Died(how))
        self._reading.cancel()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        # A pipe that is broken is read to its end, too.
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(data)

    async def _read(self) -> None:
        """Take answers until the process closes its end, by its death or by user code."""
        reader, how = self._process.stdout, ""
        assert reader is not None
        try:
            while True:
                number, data = await read_frame(reader, MAX_ANSWER_BYTES)
                self._ready.set()
                if not number:
                    continue
                verdict, answer = (
                    Verdict.from_bytes(data, "an answer of the process of rewards"),
                    self._open.get(number),
                )
                if answer is not None and not answer.done():
                    answer.set_result(verdict)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except ProtocolError as exc:
            how = f"was killed, because user code wrote to its pipe: {exc}"
        await self.end(how)
