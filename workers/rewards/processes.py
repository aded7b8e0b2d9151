"""Run slow rewards in separate processes, because a check may hang in C and must be killed then.

Time limits of libraries are wall-clock alarms: on a busy machine they would turn right answers into wrong ones. Here
the limit is CPU time, enforced by the kernel: an answer that uses it up is worth 0 (SIGXCPU), a label that uses it up
is not the answer's fault (SIGPROF), and a check that merely waits ends by the caller's timeout (T11). The wait for a
free process counts toward none of them.

``python -m penstock.workers.rewards.processes CPU_S CONFIG`` runs one such process: a JSON line in, a JSON line out.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
from typing import IO, Any

from penstock.config import RewardConfig
from penstock.errors import ConfigError
from penstock.system.keeper import die_with
from penstock.system.processes import python_command, python_environment
from penstock.workers.rewards.jail.detect import find_jail
from penstock.workers.rewards.jail.jail import JailError
from penstock.workers.rewards.kinds.code import Workshop
from penstock.workers.rewards.kinds.kind import Kind, Question
from penstock.workers.rewards.kinds.registry import kind_of

#: Address space of a process; an answer such as 9**9**9 must not exhaust the machine.
MAX_BYTES = 4 * 1024**3
#: CPU time of one check in seconds; an answer that needs more is worth 0 (docs/internals/truth.md, T11).
CHECK_CPU_S = 5
#: Characters at the end of an answer that slow rewards check: results are at the end.
MAX_TEXT = 256 * 1024
#: Checks after which a process is replaced: sympy caches without bound.
MAX_CHECKS = 2000
#: Result of a check that used up its CPU time.
OUT_OF_TIME = {"score": 0.0, "out_of_time": True}
#: Longest output line of a process.
_MAX_LINE = 1024 * 1024
#: Longest wait for a process to end after it has closed its output.
_END_S = 10.0


class CheckProcesses:
    """Processes that compute slow rewards, started on first use.

    Args:
        config: scores of programs in answers, and their jail.
    """

    def __init__(self, num_processes: int, *, cpu_s: int, config: RewardConfig | None = None) -> None:
        self.cpu_s = cpu_s
        self.config = config or RewardConfig()
        #: Held by each check.
        self.free = asyncio.Semaphore(num_processes)
        #: Processes without a check.
        self.idle: list[_Process] = []

    async def check(self, name: str, question: Question) -> Any:
        """Return the result of the slow reward ``name``; ``OUT_OF_TIME`` if the check used up its CPU time.

        Waits without a limit of its own.

        Cancellation kills the process of the check.

        Raises:
            ValueError: the label is invalid for this reward, or takes longer to read than its time limit.
            RuntimeError: the process ended for another reason than its CPU limit.
        """
        request: dict[str, Any] = {"reward": name, "label": question.label, "text": question.text[-MAX_TEXT:]}
        if (kind := kind_of(name)) and kind.reads_metadata:
            request["metadata"] = question.metadata
        line = _line(name, request)
        async with self.free:
            process = self.idle.pop() if self.idle else await _Process.start(self.cpu_s, self.config)
            try:
                answer = await process.ask(line)
            except BaseException:
                await process.kill()
                raise
            if answer is None:
                code = await process.end()
                if code == -signal.SIGXCPU:
                    return OUT_OF_TIME
                if code == -signal.SIGPROF:
                    raise ValueError(too_slow(name, question.label, self.cpu_s))
                raise RuntimeError(f"the process that checked it ended with code {code}")
            if process.num_checks < MAX_CHECKS:
                self.idle.append(process)
            else:
                await process.kill()
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    async def close(self) -> None:
        """End the idle processes; checks that run end with their caller."""
        while self.idle:
            await self.idle.pop().leave()


def _line(name: str, request: dict[str, Any]) -> bytes:
    """Encode a request for a process. Raises ValueError if metadata cannot be JSON, as bytes cannot."""
    try:
        return json.dumps(request).encode() + b"\n"
    except TypeError as exc:
        raise ValueError(f"reward {name}: the metadata hold what is no JSON ({exc}): take it out") from exc


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.num_checks = 0

    @classmethod
    async def start(cls, cpu_s: int, config: RewardConfig) -> "_Process":
        options = config.model_dump_json(include={"code", "jail"})
        return cls(
            await asyncio.create_subprocess_exec(
                *python_command("penstock.workers.rewards.processes", str(cpu_s), options),
                env=python_environment(os.environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
                start_new_session=True,
                preexec_fn=die_with(),
            )
        )

    async def ask(self, line: bytes) -> Any:
        """Send a request; return the answer, or None if the process is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.num_checks += 1
        self.process.stdin.write(line)
        with contextlib.suppress(ConnectionError):
            await self.process.stdin.drain()
        line = await self.process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    async def end(self) -> int:
        """Return the exit code of a process that closed its output; kill it if it does not exit.

        ``asyncio`` loses the code of a dead process that is killed again: it reports 255 then.
        """
        try:
            async with asyncio.timeout(_END_S):
                return await self.process.wait()
        except TimeoutError:
            return await self.kill()

    async def leave(self) -> int:
        """Let an idle process exit."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await self.end()

    async def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return await self.process.wait()


def serve(cpu_s: int, config: RewardConfig) -> None:
    """Answer requests from stdin until it closes."""
    import resource

    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        _answer(json.loads(line), cpu_s, config, answers)


def _answer(request: dict[str, Any], cpu_s: int, config: RewardConfig, answers: IO[str]) -> None:
    kind = kind_of(request.pop("reward"))
    assert kind is not None
    try:
        answer: dict[str, Any] = {"value": check(kind, Question(**request), cpu_s, config)}
    except (ValueError, ConfigError, JailError) as exc:
        answer = {"error": str(exc)}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def check(kind: Kind, question: Question, cpu_s: int, config: RewardConfig) -> Any:
    """Compute a slow reward.

    The kernel ends this process if the label takes more than ``cpu_s`` of CPU time (SIGPROF), or the answer does
    (SIGXCPU).

    Raises:
        ValueError: the label is invalid.
        ConfigError, JailError: no program can be run.
    """
    import resource

    workshop = Workshop(config.code, find_jail(config)) if kind.needs_jail else None
    # The limit of the previous check could end this one while it reads its label, and blame its answer.
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    import_package(kind)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        kind.read_label(question.label)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    return kind.judge(question) if workshop is None else kind.judge(question, workshop)


def import_package(kind: Kind) -> None:
    """Import the packages of a reward first, so that no answer is charged with the time."""
    if kind.package:
        # math-verify warns that its own limits are off, which they are on purpose.
        logging.getLogger(kind.package).setLevel(logging.ERROR)
        if kind.load is None:
            importlib.import_module(kind.package)
        else:
            kind.load()


def too_slow(name: str, label: str, cpu_s: int) -> str:
    return f"reward {name}: the label {label[:80]!r} takes more than {cpu_s} s of CPU time to be read"


if __name__ == "__main__":
    serve(int(sys.argv[1]), RewardConfig.model_validate_json(sys.argv[2]))
