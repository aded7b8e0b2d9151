"""One verifier: an rq worker that only runs checks, each in a process of its own that can be killed.

rq's worker takes jobs off the queue, forks for each, kills on its command `stop-job` and notices a fork that died. This
module disables what is unsafe in rq: it imports nothing by a name found in Redis, ignores callbacks, webhooks and
dependencies, bounds unpacking, and makes a fork die with its parent.
"""

import asyncio
import inspect
import logging
import os
import resource
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from redis import Redis
from redis.exceptions import OutOfMemoryError
from rq import Queue, Worker
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from penstock.config import RewardConfig
from penstock.errors import ConfigError, ProtocolError, RewardError
from penstock.names import check_name
from penstock.records.job import JobFailure
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.redis.control import PASSING
from penstock.system.keeper import die_with_parent
from penstock.system.user_code import staying_alive
from penstock.text import format_exc, safe_repr
from penstock.workers.rewards import processes
from penstock.workers.rewards.kinds.kind import Kind, Question
from penstock.workers.rewards.kinds.registry import kind_of
from penstock.workers.rewards.outcomes import keyed, number_of
from penstock.workers.rewards.wire import ENTRY, MAX_BYTES, MAX_JOB_BYTES, Verdict, sample_from_json

log = logging.getLogger(__name__)

#: Longest attempt to send a worker something, while Redis is down or full.
TELL_S = 60.0
#: A stream of verdicts that is neither read nor written expires after this long.
STREAM_TTL_S = 3600
#: rq: presence of a verifier; a blocking read of the queue takes 15 s less.
RQ_TTL_S = 30
RQ_MONITOR_S = 5
RQ_MAINTENANCE_S = 60

#: Fields of an rq job that are read from Redis.
_FIELDS = frozenset(
    {"data", "created_at", "enqueued_at", "started_at", "last_heartbeat", "origin", "worker_name", "status", "timeout",
     "ttl", "result_ttl", "failure_ttl"}
)  # fmt: skip
_NOTHING = b'["", null, [], {}]'

Function = Callable[[Sample], Any]


class CheckJob(RqJob):
    """An rq job that can only be a check."""

    #: Set in the fork.
    verifier: "Verifier"

    def restore(self, raw_data: Mapping[bytes, bytes]) -> None:
        """Read the fields of a check from the job's hash, and ignore the others."""
        taken = {name: value for name, value in raw_data.items() if name.decode(errors="replace") in _FIELDS}
        if b"data" in taken:
            taken[b"data"] = _unpacked(taken[b"data"])
        super().restore(taken)

    def _execute(self) -> None:
        self.verifier.check(self)

    def question(self) -> tuple[str, str, str]:
        """Return (worker, reward, sample as JSON text). Raises ProtocolError if it is not a check."""
        args = self.args
        if self.func_name != ENTRY or len(args) != 3 or not all(isinstance(one, str) for one in args):
            raise ProtocolError(f"The rq job {self.id} is not a check of penstock, or is larger than a check may be.")
        asker, reward, text = args
        return check_name("worker", asker), reward, text


def _unpacked(data: bytes) -> bytes:
    """Decompress with a bound; return a job that is no check if the data are invalid."""
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, MAX_JOB_BYTES)
    except zlib.error:
        return _NOTHING
    return plain if unpacker.eof and plain.startswith(b"[") else _NOTHING


class Verifier(Worker):
    """Run checks of one run, one at a time. ``work`` blocks until SIGTERM, and lets a running check end.

    Args:
        functions: reward by name.
        connection: may block for ``RQ_TTL_S``.
    """

    def __init__(
        self, config: RewardConfig, keys: Keys, name: str, connection: Redis, functions: Mapping[str, Function | Kind]
    ) -> None:
        super().__init__(
            [Queue(keys.checks, connection=connection, job_class=CheckJob, serializer=JSONSerializer)],
            name=name,
            connection=connection,
            job_class=CheckJob,
            serializer=JSONSerializer,
            default_result_ttl=0,
            worker_ttl=RQ_TTL_S,
            job_monitoring_interval=RQ_MONITOR_S,
            maintenance_interval=RQ_MAINTENANCE_S,
            log_job_description=False,
            work_horse_killed_handler=self._fork_died,
        )
        self.config = config
        self.keys = keys
        self.functions = functions

    def main_work_horse(self, job: RqJob, queue: Queue) -> None:
        """Run a check in the fork."""
        die_with_parent(self.pid)
        assert isinstance(job, CheckJob)
        job.verifier = self
        super().main_work_horse(job, queue)

    def check(self, job: CheckJob) -> None:
        """Make the check and answer the worker, in the fork; do nothing if it was abandoned or withdrawn."""
        asker, name, text = job.question()
        with self.connection.pipeline(transaction=False) as pipe:
            pipe.exists(self.keys.asker(asker))
            pipe.hexists(job.key, "data")
            is_wanted = all(pipe.execute())
        if is_wanted:
            self._send(asker, job.id, self._bounded(self._judge(name, text)))

    def _judge(self, name: str, text: str) -> Verdict:
        pool = self.config.pool
        if len(text) > MAX_BYTES:
            return Verdict(
                outcome=JobFailure.REWARD_TOO_LARGE,
                error=f"{len(text)} bytes are more than a check may have.",
            )
        if name not in self.functions:
            known = ", ".join(sorted(self.functions))
            why = f"this verifier runs {known}, and not {safe_repr(name)}: see worker.rewards"
            return Verdict.raised(ConfigError(why))
        if pool.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (pool.memory_bytes, pool.memory_bytes))
        try:
            return judge(self.functions[name], sample_from_json(text), name, self.config)
        except ProtocolError as exc:
            return Verdict.raised(exc)

    def _bounded(self, verdict: Verdict) -> str:
        try:
            text = verdict.to_json()
        except (ValueError, RecursionError) as exc:
            return Verdict(error=f"gave what cannot be sent: {format_exc(exc)}").to_json()
        if len(text) <= MAX_BYTES:
            return text
        error = f"the reward gave {len(text)} bytes, more than the {MAX_BYTES} that a check may give."
        return Verdict(outcome=JobFailure.REWARD_TOO_LARGE, error=error).to_json()

    def _fork_died(self, job: RqJob, pid: int, status: int, usage: object) -> None:
        """Report a fork that was killed other than by stop-job. Called in the parent."""
        assert isinstance(job, CheckJob)
        try:
            asker, name, text = job.question()
            label = sample_from_json(text).job.label
        except ProtocolError:
            return
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        if number == signal.SIGXCPU and kind_of(name):
            # The kernel's limit on an answer that takes too long to check.
            verdict = Verdict(reward=0.0, info={"out_of_time": True})
        elif number == signal.SIGPROF and kind_of(name):
            slow = processes.too_slow(name, label, processes.CHECK_CPU_S)
            verdict = Verdict.raised(ValueError(slow))
        else:
            how = f"by {signal.Signals(number).name}" if number else f"with status {status}"
            verdict = Verdict(error=f"was not computed: the process that checked it at {self.name} ended {how}")
        self._send(asker, job.id, verdict.to_json())

    def _send(self, asker: str, id_: str, body: str) -> None:
        """Add to the stream of the worker; blocks while Redis is down, for ``TELL_S`` at most."""
        stream, deadline = self.keys.verdicts(asker), time.monotonic() + TELL_S
        while True:
            try:
                with self.connection.pipeline(transaction=False) as pipe:
                    pipe.xadd(stream, {"id": id_, "body": body})
                    pipe.expire(stream, STREAM_TTL_S)
                    pipe.execute()
                return
            except (*PASSING, OutOfMemoryError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def judge(function: Function | Kind, sample: Sample, name: str, config: RewardConfig) -> Verdict:
    """Compute a reward for a sample, or report how it failed. Blocks for as long as it takes."""
    own = isinstance(function, Kind)
    try:
        with staying_alive():
            value = _checked(function, sample, config) if isinstance(function, Kind) else function(sample)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
    except RewardError as exc:
        if own:
            return Verdict(outcome=exc.outcome, error=str(exc))
        return Verdict.raised(exc)
    # SystemExit too: the reward wanted to exit, not the verifier.
    except BaseException as exc:
        return Verdict.raised(exc)
    try:
        reward, info = number_of(value, sample.id, name, config.key)
    except RewardError as exc:
        return Verdict(outcome=exc.outcome, error=str(exc))
    return Verdict(reward=reward, info=info)


async def _awaited(value: Any) -> Any:
    return await value


def _checked(kind: Kind, sample: Sample, config: RewardConfig) -> Any:
    """Run a check as processes.py does; the kernel ends this process at its CPU limit."""
    most = min(config.pool.memory_bytes or processes.MAX_BYTES, processes.MAX_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    question = Question.of(sample)
    question = replace(question, text=question.text[-processes.MAX_TEXT :])
    return keyed(processes.check(kind, question, processes.CHECK_CPU_S, config), config.key)
