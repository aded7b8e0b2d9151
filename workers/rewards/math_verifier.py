"""math-verify in processes of its own, because a check may hang in C and must be killed then.

math-verify's own limits are wall-clock alarms: on a busy machine they would turn right answers into wrong ones. Here
the limit is CPU time, kept by the kernel: an answer that uses it up is worth 0 (SIGXCPU), a label that does is no
answer's fault (SIGPROF), and a check that merely waited is the caller's time-out (T11). The wait for a free process
counts for none of them.

Run as ``python -m workers.rewards.math_verifier CPU_S`` this is one such process: a JSON line in, a JSON line out.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

from penstock.system.processes import die_with, python_command, python_environment

#: Address space of a process; an answer such as 9**9**9 must not take the machine along.
MAX_BYTES = 4 * 1024**3
#: Most bytes of one answer that is looked at, from its end: that is where results stand.
MAX_TEXT = 16 * 1024
#: Checks after which a process is replaced: sympy caches without bound.
MAX_CHECKS = 2000
_MAX_LINE = 1024 * 1024
#: Longest wait for a process to end that has closed its output.
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class MathVerdict:
    correct: bool
    #: The check used up its CPU time, and counts as wrong.
    out_of_time: bool = False


class MathVerifier:
    """A pool of verifier processes, started when first needed."""

    def __init__(self, num_processes: int, *, cpu_s: int) -> None:
        self.cpu_s = cpu_s
        #: Held by each check.
        self.free = asyncio.Semaphore(num_processes)
        #: Processes that check nothing now.
        self.idle: list[_Process] = []

    async def verify(self, label: str, text: str) -> MathVerdict:
        """Whether ``text`` ends in a result equal to ``label``, as mathematics. Waits without a limit of its own.

        Cancelling it kills the process that checks.

        Raises:
            ValueError: the label cannot be read as mathematics, or not within its time.
            RuntimeError: the process died of something other than its CPU limit.
        """
        async with self.free:
            process = self.idle.pop() if self.idle else await _Process.start(self.cpu_s)
            try:
                answer = await process.ask({"label": label, "text": final(text)})
            except BaseException:
                await process.kill()
                raise
            if answer is None:
                code = await process.end()
                if code == -signal.SIGXCPU:
                    return MathVerdict(correct=False, out_of_time=True)
                if code == -signal.SIGPROF:
                    raise ValueError(too_slow(label, self.cpu_s))
                raise RuntimeError(f"the verifier process ended with code {code}")
            if process.num_checks < MAX_CHECKS:
                self.idle.append(process)
            else:
                await process.kill()
        if "error" in answer:
            raise ValueError(answer["error"])
        return MathVerdict(correct=bool(answer["correct"]))

    async def close(self) -> None:
        """End the idle processes; checks that run end with their caller."""
        while self.idle:
            await self.idle.pop().kill()


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.num_checks = 0

    @classmethod
    async def start(cls, cpu_s: int) -> "_Process":
        return cls(
            await asyncio.create_subprocess_exec(
                *python_command("workers.rewards.math_verifier", str(cpu_s)),
                env=python_environment(os.environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
                start_new_session=True,
                preexec_fn=die_with(),
            )
        )

    async def ask(self, request: dict[str, Any]) -> Any:
        """The answer, or None where the process is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.num_checks += 1
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await self.process.stdin.drain()
        line = await self.process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    async def end(self) -> int:
        """Exit code of a process that closed its output; one that does not end by itself is killed.

        ``asyncio`` loses the code of a dead process that is killed once more: it says 255 then.
        """
        try:
            async with asyncio.timeout(_END_S):
                return await self.process.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return await self.process.wait()


def serve(cpu_s: int) -> None:
    """Answer requests from stdin until it closes."""
    import resource

    # What libraries print must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Importing it is not charged to an answer; its own limits are off on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    import math_verify  # noqa: F401

    for line in sys.stdin:
        _answer(json.loads(line), cpu_s, answers)


def _answer(request: dict[str, str], cpu_s: int, answers: IO[str]) -> None:
    try:
        answer: dict[str, Any] = {"correct": check(request["label"], request["text"], cpu_s)}
    except ValueError as exc:
        answer = {"error": str(exc)}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def final(text: str) -> str:
    """What of an answer is judged: what follows its last ``</think>``, of that the last box, where there is one."""
    text = text.rpartition("</think>")[2][-MAX_TEXT:]
    begin = text.rfind("\\boxed{")
    return text if begin < 0 else text[begin : _end_of_box(text, begin + len("\\boxed{"))]


def _end_of_box(text: str, at: int) -> int:
    """Index behind the brace that closes what is open at ``at``; the text's end where none does."""
    depth, escaped = 1, False
    for index in range(at, len(text)):
        character = text[index]
        depth += 0 if escaped else (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if not depth:
            return index + 1
    return len(text)


def too_slow(label: str, cpu_s: int) -> str:
    return f"the label {label[:80]!r} takes more than reward.check_cpu_s = {cpu_s} s to be read as mathematics"


def check(label: str, text: str, cpu_s: int) -> bool:
    """math-verify's verdict; ValueError where the label is not mathematics.

    The kernel ends this process where the label takes more than ``cpu_s`` of CPU time (SIGPROF), or the answer
    (SIGXCPU).
    """
    import resource

    from math_verify import parse, verify

    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        gold = _read_label(label)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if not gold:
        raise ValueError(f"the label {label[:80]!r} cannot be read as mathematics")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    return bool(verify(gold, parse(_without_dollars(text), parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=256)
def _read_label(label: str) -> list[Any]:
    """The label as mathematics; [] where it is not. Compared once, because only that evaluates it."""
    from math_verify import parse, verify

    label = _without_dollars(label)
    marked = any(mark in label for mark in ("$", "\\boxed", "\\(", "\\["))
    gold: list[Any] = parse(label if marked else f"\\boxed{{{label}}}", parsing_timeout=None)
    if gold:
        verify(gold, parse("\\boxed{1}", parsing_timeout=None), timeout_seconds=None)
    return gold


def _without_dollars(text: str) -> str:
    """``\\$36`` is money: its sign says nothing, and does not mark mathematics."""
    return text.replace("\\$", "")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
