"""Compute log-probabilities of given sequences under a run's policy (compute_log_prob) with the run's workers.

    sequences ─> jobs on lane score ─> any worker: one prefill each ─> payloads ─> collected here, retired

The jobs use the state machine of all jobs, so a dying worker loses no job, and each is scored once. They belong to the
scorer instead of a subscription, which would take all jobs of a lane, including those of other scorers. The buffer
retires results of a dead scorer after ``buffer.score_ttl_s``.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.config import Config
from penstock.consumers.batch.fetch import PayloadReader, row_of_meta
from penstock.errors import ConfigError, PayloadError, ProtocolError, ScoreError, WaitTimeout
from penstock.metrics.series import families, table
from penstock.metrics.server import Exporter
from penstock.names import Lane, check_name, new_token
from penstock.payloads import decode
from penstock.protocol import scripts
from penstock.protocol.score_jobs import MAX_SEQUENCES, MAX_TOKENS, Given, check_temperature, make_job
from penstock.protocol.waits import PublishedWaiting
from penstock.records.causes import ScoresPending
from penstock.records.codec import name_shown
from penstock.records.job import JobState
from penstock.records.keys import Keys
from penstock.records.manifest import Row
from penstock.records.sample_meta import SampleMeta, iter_metas
from penstock.redis.commands import Client
from penstock.redis.connect import connect_blocking
from penstock.redis.control import PASSING, Control
from penstock.redis.saved_config import config_of

#: By attribute of ``ScorerTally``.
TABLE = table("""
    calls counter scorer_calls Finished calls, including failed ones.
    failed counter scorer_failed_calls Calls that raised.
    sequences counter scorer_sequences Sequences that were scored.
    tokens counter scorer_tokens Tokens of these sequences, including those before the start.
    seconds counter scorer_seconds Time in calls.
    asked gauge scorer_asked_sequences Sequences of the running call; 0 without a call.
""")
SERIES = tuple(TABLE.values())


@dataclass(slots=True)
class ScorerTally(Collector):
    """Count the totals of one scorer."""

    calls: int = 0
    failed: int = 0
    sequences: int = 0
    tokens: int = 0
    seconds: float = 0.0
    asked: int = 0

    @contextmanager
    def call(self, lengths: list[int]) -> Iterator[None]:
        """Count one call that scores sequences of these lengths."""
        began, self.asked = time.monotonic(), len(lengths)
        try:
            yield
        except BaseException:
            self.failed += 1
            raise
        else:
            self.sequences += len(lengths)
            self.tokens += sum(lengths)
        finally:
            self.calls += 1
            self.seconds += time.monotonic() - began
            self.asked = 0

    def collect(self) -> Iterator[Metric]:
        return families(TABLE, {name: getattr(self, name) for name in TABLE})


#: Most admitted jobs of one scorer that are not collected yet.
WINDOW = 64
#: Longest blocking read in seconds, which bounds the delay of stops, timeouts and checks without events.
BLOCK_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """Hold log-probabilities of one sequence."""

    #: [L - start] float32, log-probability of each token from the start on, given all earlier tokens; temperature 1.
    logprobs: NDArray[np.float32]
    #: Version of the weights; -1: the engine's initial weights.
    version: int


class Scorer:
    """Request log-probabilities of given tokens from the workers of a run.

    Args:
        config: configuration of the run, or its YAML file; None reads the resolved configuration from the run's
        folder.
        run: name of the run, if ``config`` is None; found under ``runs/``, or under PENSTOCK_DIRECTORY.
        name: unique name of the scorer in job ids (``score-NAME/0/N``) and waits; None generates a name.

    Thread-safe; one call at a time. Close it, or use it as a context manager.
    """

    def __init__(
        self, config: Config | str | Path | None = None, *, run: str | None = None, name: str | None = None
    ) -> None:
        config = config_of(config, run, "Scorer")
        if (url := config.redis.url) is None:
            raise ConfigError("The scorer needs redis.url: the address of the run's Redis.")
        self.name = check_name("scorer", name or f"{socket.gethostname()[:32]}-{os.getpid()}-{new_token()[:6]}")
        self._dataset = check_name("scorer", f"score-{self.name}"[:64])
        self._model = config.model.name
        self._keys = Keys(config.run)
        self._control = Control(url)
        self._control.do(lambda client: scripts.ensure_lanes(client, self._keys))
        self._events: Client = connect_blocking(url, BLOCK_S)
        self._payloads = PayloadReader(config.redis)
        self._waiting = PublishedWaiting(self._control.client, self._keys, f"scorer:{self.name}")
        self._busy = threading.Lock()
        self._tally = ScorerTally()
        self._exporter = Exporter.of(config, "scorer", self.name, self._tally)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, which fails a running call of another thread."""
        if self._exporter is not None:
            self._exporter.close()
        self._control.close()
        self._events.close()
        self._payloads.close()

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        temperature: float = 1.0,
        timeout_s: float | None = None,
        stopped: threading.Event | None = None,
    ) -> list[Score]:
        """Return log-probabilities of ``sequences[i]`` from token ``starts[i]`` on. Blocks until all are complete.

        Each sequence is scored under one version, the current one or a later one; sequences of a call may have
        different versions. The wait is reported (`penstock why`).

        Args:
            sequences: [N][L] token ids, prompt and response.
            starts: [N] index of the first scored token, 1 <= start <= L; the first token of a sequence has no score.
            temperature: must be 1, because engines support no other temperature for given tokens.
            timeout_s: longest wait in seconds; None: unlimited.
            stopped: event that another thread sets to end the wait.

        Raises:
            ConfigError: a sequence, start or temperature is invalid.
            ScoreError: the engine refused a sequence (too long, for instance), or a job was cancelled.
            WaitTimeout: the call timed out, or ``stopped`` was set; all jobs are cancelled.
            QueueFull, QueueUnavailable: Redis is full or unavailable.
        """
        check_temperature("Scorer.score", temperature)
        given = _check(sequences, starts)
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with self._busy, self._tally.call([len(one.tokens) for one in given]):
            call = _Call(self, deadline, timeout_s, stopped or threading.Event())
            try:
                found = call.run([(i, one) for i, one in enumerate(given) if one.start < len(one.tokens)])
            finally:
                call.clear()
                self._waiting.end()
        empty = Score(np.zeros(0, np.float32), -1)
        return [found.get(i, empty) for i in range(len(given))]

    async def ascore(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, timeout_s: float | None = None
    ) -> list[Score]:
        """Run ``score`` under asyncio; cancellation cancels the jobs."""
        stopped = threading.Event()
        work = asyncio.create_task(
            asyncio.to_thread(self.score, sequences, starts, timeout_s=timeout_s, stopped=stopped)
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stopped.set()
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()
            raise


class _Call:
    """Run one call of ``score``: track pending jobs and collect results."""

    def __init__(self, scorer: Scorer, deadline: float, timeout_s: float | None, stopped: threading.Event) -> None:
        self._scorer = scorer
        self._keys = scorer._keys
        self._control = scorer._control
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._stopped = stopped
        #: Job -> indices of its sequences in the call.
        self._out: dict[str, list[int]] = {}
        self._starts: dict[int, int] = {}
        self._found: dict[int, Score] = {}
        newest = self._control.do(lambda client: client.xrevrange(self._keys.samples, count=1))
        self._event = newest[0][0] if newest else b"0-0"

    def run(self, given: Sequence[tuple[int, Given]]) -> dict[int, Score]:
        """Return scores by index."""
        self._starts = {i: one.start for i, one in given}
        todo = list(_pieces(given))
        while todo or self._out:
            if todo and len(self._out) < WINDOW:
                room = WINDOW - len(self._out)
                self._admit(todo[:room])
                del todo[:room]
            if not self._collect_finished():
                self._wait(len(todo))
        return self._found

    def _admit(self, pieces: Sequence[Sequence[tuple[int, Given]]]) -> None:
        keys, source = self._keys, f"score:{self._scorer.name}"
        at = int(self._control.do(lambda client: client.hget(keys.source, source)) or 0)
        jobs = [
            make_job(f"{self._scorer._dataset}/0/{at + i}", [one for _, one in piece]) for i, piece in enumerate(pieces)
        ]
        for job, piece in zip(jobs, pieces, strict=True):
            self._out[job.id] = [place for place, _ in piece]
        call = scripts.admit(
            keys,
            [(job, job.to_bytes()) for job in jobs],
            lane=Lane.SCORE,
            source=source,
            position=at,
            model=self._scorer._model,
            gate=None,
        )
        answer = self._control.call(call)
        # After a lost reply, a retry must find the position unchanged.
        if answer.position != at + len(jobs):
            raise ProtocolError(f"Another scorer has the name {self._scorer.name!r}: use unique names.")

    def _collect_finished(self) -> int:
        """Collect finished jobs; return their number."""
        jobs = list(self._out)
        states = self._control.do(partial(self._states, jobs))
        done = [job for job, state in zip(jobs, states, strict=True) if state == JobState.READY]
        for job, state in zip(jobs, states, strict=True):
            if state == JobState.DEAD:
                raise ScoreError(self._why_dead(job))
            if state in ("", JobState.RETIRING):
                raise ScoreError(f"Scoring job {job} was cancelled, or its results were not collected in time.")
        if done:
            self._collect(done)
        return len(done)

    def _states(self, jobs: Sequence[str], client: Client) -> list[str]:
        pipe = client.pipeline(transaction=False)
        for job in jobs:
            pipe.hget(self._keys.group(job), "st")
        return [name_shown(state or b"") for state in pipe.execute()]

    def _collect(self, jobs: Sequence[str]) -> None:
        rows = [_row(job, meta) for job in jobs for meta in self._metas(job)]
        data = self._scorer._payloads.read(self._keys, [row for row, _ in rows])
        for row, version in rows:
            raw = data[row.sample]
            if raw is None:
                raise ScoreError(f"The scores of {row.sample} are gone from payload server {row.server!r}: retry.")
            place = self._out[row.job][row.k]
            logprobs = decode(raw, row.sample, row.checksum).logprobs[self._starts[place] :]
            self._found[place] = Score(np.array(logprobs, np.float32), version)
        for job in jobs:
            missing = [place for place in self._out[job] if place not in self._found]
            if missing:
                raise ScoreError(f"Scoring job {job} ended without {len(missing)} of its sequences: retry.")
            self._control.call(scripts.collect(self._keys, job, Lane.SCORE))
            del self._out[job]

    def _metas(self, job: str) -> list[SampleMeta]:
        data = self._control.do(lambda client: client.get(self._keys.meta(job)))
        return list(iter_metas(data or b"", f"metadata of group {job}"))

    def _why_dead(self, job: str) -> str:
        entry = self._control.do(lambda client: client.hget(self._keys.group(job), "eid"))
        found = self._control.do(lambda client: client.xrange(self._keys.dead, entry, entry)) if entry else []
        fields = found[0][1] if found else {}
        reason, detail = (fields.get(name, b"").decode(errors="replace") for name in (b"reason", b"detail"))
        places = self._out[job]
        last = (detail.strip().splitlines() or [""])[-1]
        return f"Sequences {places[0]} to {places[-1]} cannot be scored; job {job} is a dead letter ({reason}): {last}"

    def _wait(self, num_pieces: int) -> None:
        """Report the wait and sleep until there may be progress. Raises WaitTimeout."""
        sequences = sum(map(len, self._out.values()))
        cause = ScoresPending(sequences, len(self._out), num_pieces)
        self._scorer._waiting.blocked_on(cause)
        left = self._deadline - time.monotonic()
        if left <= 0 or self._stopped.is_set():
            why = "was stopped" if self._stopped.is_set() else f"did not finish within {self._timeout_s:g} s"
            raise WaitTimeout(
                f"The scoring of {sequences} sequences {why}; run `penstock workers ls` to check the workers.",
                count=len(self._found),
                cause=cause,
            )
        until = time.monotonic() + min(BLOCK_S, left)
        while (block_s := until - time.monotonic()) > 0:
            if any(job in self._out for job in self._read_events(block_s)):
                return

    def _read_events(self, block_s: float) -> list[str]:
        """Return jobs of all scorers with new events. Blocks until there is one, at most ``block_s``."""
        block_ms = max(1, int(block_s * 1000))
        try:
            news = self._scorer._events.xread({self._keys.samples: self._event}, count=1000, block=block_ms)
        except PASSING:
            time.sleep(block_s)  # the next check waits for Redis and reports the wait
            return []
        if not news:
            return []
        entries = news[0][1]
        self._event = entries[-1][0]
        return [name_shown(fields.get(b"j", b"")) for _, fields in entries]

    def clear(self) -> None:
        """Cancel all pending jobs after a failure."""
        for job in list(self._out):
            self._control.call(scripts.cancel(self._keys, job, []))
            del self._out[job]


def _check(sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Given]:
    if len(sequences) != len(starts):
        raise ConfigError(f"{len(sequences)} sequences but {len(starts)} starts: pass one start per sequence.")
    given = []
    for i, (tokens, start) in enumerate(zip(sequences, starts, strict=True)):
        ids: list[Any] = tokens.tolist() if isinstance(tokens, np.ndarray) else [int(token) for token in tokens]
        if not 1 <= start <= len(ids):
            raise ConfigError(f"sequence {i} has {len(ids)} tokens and start {start}: start must be in 1..{len(ids)}.")
        if min(ids) < 0:
            raise ConfigError(f"sequence {i} has token id {min(ids)}: token ids must not be negative.")
        given.append(Given(ids, int(start)))
    return given


def _pieces(given: Sequence[tuple[int, Given]]) -> Iterator[list[tuple[int, Given]]]:
    """Split sequences into jobs of at most ``MAX_SEQUENCES`` sequences and ``MAX_TOKENS`` tokens (or one sequence)."""
    piece: list[tuple[int, Given]] = []
    size = 0
    for place, one in given:
        if piece and (len(piece) == MAX_SEQUENCES or size + len(one.tokens) > MAX_TOKENS):
            yield piece
            piece, size = [], 0
        piece.append((place, one))
        size += len(one.tokens)
    if piece:
        yield piece


def _row(job: str, meta: SampleMeta) -> tuple[Row, int]:
    """Return the location of a sample's payload, and the version of its scores."""
    row = row_of_meta(job, meta)
    version = meta.reward_info.get("version")
    if not isinstance(version, int):
        raise PayloadError(f"sample {row.sample}: reward_info lacks the version of its scores.")
    return row, version


def score(
    run: str | Config,
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    *,
    timeout_s: float | None = None,
) -> list[Score]:
    """Score with a temporary ``Scorer`` of ``run`` (name or configuration). Blocks; raises like ``Scorer.score``."""
    scorer = Scorer(run) if isinstance(run, Config) else Scorer(run=run)
    with scorer:
        return scorer.score(sequences, starts, timeout_s=timeout_s)
