"""Run the producer process: make jobs from prompts, and admit as many as the gate allows.

| waits for | unblocked by |
|---|---|
| the first publication | a trainer that publishes |
| a driving subscription | a trainer that joins |
| the gate (T3) | publish, dispose, bury: the list `gate` |
| a valid subscription, position or version | an operator who corrects it, or deletes the subscription |
| free memory in Redis | sweep, or more memory |
| more data (``data.epochs`` are over) | a restart with more epochs; evaluations continue |
| working user code (too many jobs failed) | a fix, and a restart of the producer |

One Lua function changes the position and the queue, so that a killed or duplicated producer neither skips a prompt nor
admits it twice. Evaluation jobs have no gate (offers.py).
"""

import hashlib
import json
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.config import Config
from penstock.config.staleness import Mode, Sampler
from penstock.errors import ConfigError, ProtocolError, QueueFull, QueueUnavailable
from penstock.metrics.series import families, table
from penstock.metrics.server import serve
from penstock.model.tokenizer import read_tokenizer
from penstock.names import Lane
from penstock.producer.dataset import Dataset
from penstock.producer.held_out import HeldOut, check_overlap, is_small
from penstock.producer.mixture import Mixture, mixture_of
from penstock.producer.offers import CHUNK, Evaluations, Offer, Offers, chunk, record_of
from penstock.producer.prompt import Template
from penstock.protocol import scripts, user_failures
from penstock.protocol.gate import read_gates, read_rooms
from penstock.protocol.presence import Attendance
from penstock.protocol.scripts import Admission, ensure_lanes
from penstock.protocol.waits import PublishedWaiting
from penstock.records.cause import Cause
from penstock.records.causes import DataExhausted, GateClosed, NoDrivingTrainer, NoPublication
from penstock.records.codec import count_of
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.worker_causes import RecordUnreadable, RedisEvicts, RedisFull
from penstock.redis.call import evicting_policy
from penstock.redis.commands import Client, is_full
from penstock.redis.connect import connect_blocking
from penstock.redis.control import Control
from penstock.system.extras import check_installed

log = logging.getLogger(__name__)

#: By attribute of ``Tally``.
TABLE = table("""
    admitted counter producer_admitted_jobs{lane} Jobs that this producer admitted.
    position gauge producer_position Training prompts that were admitted, over all epochs and producers.
    epoch_prompts gauge producer_epoch_prompts Prompts of one epoch; 0 while the end of a stream is not known yet.
    waits gauge producer_waits 1 while the producer waits; `penstock why` shows the cause.
    waited_s counter producer_wait_seconds Time in which the producer waited for the gate or another cause and
        admitted no jobs.
""")
SERIES = tuple(TABLE.values())


@dataclass(slots=True)
class Tally(Collector):
    """Running totals of one producer, written by its loop and read by scrapes."""

    epoch_prompts: int = 0
    position: int = 0
    admitted: Counter[str] = field(default_factory=Counter)
    waits: bool = False
    waited_s: float = 0.0

    def collect(self) -> Iterator[Metric]:
        return families(TABLE, {name: getattr(self, name) for name in TABLE})


#: Optional keys of a dataset that affect its prompts or their positions.
_PROMPT_KEYS = (
    "chat_template_kwargs",
    "image_key",
    "source_args",
    "split",
    "streaming",
    "system_prompt",
    "tools_key",
    "weight",
)


def fingerprint(source: Mixture, held_out: Sequence[Dataset] = ()) -> str:
    """Compute a fingerprint that changes whenever a position would refer to another job, in training or evaluation.

    It covers the digests of the sources and the keys that affect prompts; no prompt is rendered.
    """
    trained = [[*_of(dataset), source.shuffles(dataset)] for dataset in source.datasets]
    shape = [source.seed, trained, [_of(dataset) for dataset in held_out]]
    # default=str: YAML values may be dates, which JSON cannot represent.
    text = json.dumps(shape, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _of(dataset: Dataset) -> list[Any]:
    config = dataset.config
    keys = [config.name, config.input_key, config.answer_key, config.apply_chat_template]
    template = dataset.template.digest if dataset.template is not None and config.apply_chat_template else None
    shaping = [getattr(config, key) for key in _PROMPT_KEYS]
    return [*keys, template, dataset.first, dataset.last, dataset.rows.digest(), shaping]


#: Longest sleep while the gate is closed.
GATE_S = 0.5


class Producer:
    """One producer process; ``run`` blocks until ``stop``."""

    def __init__(self, config: Config) -> None:
        if config.redis.url is None:
            raise ConfigError(
                "redis.url is not set, and the producer needs it: set it to the address of the run's Redis."
            )
        self._config = config
        self._keys = Keys(config.run)
        template = chat_template(config)
        train = [Dataset(one, template) for one in config.data.train]
        self._evals = [Dataset(one, template) for one in config.data.eval]
        if is_small(train):
            check_overlap(train, self._evals)
        self._held_out = HeldOut(self._evals)
        self.source = mixture_of(train, config.seed)
        self._offers = Offers(config, self.source, self._held_out)
        self._stop = threading.Event()
        self._control = Control(config.redis.url, stopped=self._stop.is_set)
        self._evaluations = Evaluations(config, self._keys, self._control, self._held_out, self._admit_eval)
        self._gate: Client = connect_blocking(config.redis.url, GATE_S)
        self._waiting = PublishedWaiting(self._control.client, self._keys, "producer")
        self._tally = Tally(self.source.num_lines or 0)
        self.metrics = serve(config, "producer", "", self._tally)
        url = self.metrics.url if self.metrics else ""
        self._attendance = Attendance(self._control.client, self._keys, "producer", metrics=url)
        #: [datasets]: number of lines reported to Redis; None for a stream whose end is not known yet.
        self._reported_lines: list[int | None] = []
        self._version_field = scripts.version_field(config.model.name)
        self._is_begun = False
        #: Whether the gate was closed at the last admission.
        self._is_closed = False

    def stop(self) -> None:
        """Make ``run`` return; safe in a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Admit jobs until ``stop``. Blocks."""
        try:
            self._control.do(lambda client: ensure_lanes(client, self._keys))
            self._check_source()
            while not self._stop.is_set():
                self._attendance.confirm()
                cause = self._step()
                self._waiting.blocked_on(cause)
                self._tally.waits = cause is not None
                if cause is not None:
                    self._pause()
            self._waiting.end()
            self._attendance.end()
        except QueueUnavailable as exc:
            if not self._stop.is_set():
                raise
            log.warning("stopped while Redis was unreachable: %s", exc)
        self._control.close()
        self._gate.close()
        if self.metrics is not None:
            self.metrics.close()

    def _pause(self) -> None:
        """Sleep until the gate may have opened."""
        began = time.monotonic()
        self._control.do(lambda _: self._gate.blpop([self._keys.gate], timeout=GATE_S))
        self._tally.waited_s += time.monotonic() - began

    def _step(self) -> Cause | None:
        """Admit one chunk; return the cause of a wait, or None."""
        try:
            self._begin()
            return self._admit_due_jobs()
        except ProtocolError as exc:
            return RecordUnreadable(str(exc))

    def _begin(self) -> None:
        """Record the end of the data and clear the failures of user code, which may have been fixed; only once."""
        if not self._is_begun:
            self._set_end()
            self._control.do(lambda client: user_failures.forget(client, self._keys))
            self._is_begun = True

    def _admit_due_jobs(self) -> Cause | None:
        version = self._count(self._keys.clock, self._version_field, "The newest version")
        if not version:
            return NoPublication(self._config.model.name)
        if policy := self._control.do(evicting_policy):
            return RedisEvicts(policy)
        if self._is_full():
            return RedisFull()
        if failing := self._control.do(lambda client: user_failures.too_many(client, self._keys, self._config.reward)):
            return failing
        try:
            self._evaluations.admit(version)
            return self._admit_train()
        except QueueFull as exc:
            return exc.cause

    @property
    def _end(self) -> int | None:
        """Return the position after the last prompt; None if epochs are unlimited or the end is not known yet."""
        epochs, num_lines = self._config.data.epochs, self.source.num_lines
        return None if epochs is None or num_lines is None else epochs * num_lines

    def _admit_train(self) -> Cause | None:
        gate = self._control.do(lambda client: read_gates(client, self._keys))
        if not gate[1]:
            return NoDrivingTrainer()
        position, end = self._position_and_end()
        self._tally.position = position
        if end is None and self._end is not None:
            self._set_end()  # a start of the run cleared it
            return self._admit_train()
        if end is not None and position >= end:
            return DataExhausted(position)
        # While the gate is closed one job is enough to detect that it has opened.
        jobs = chunk(map(self._offers.at, count(position)), 1 if self._is_closed else CHUNK)
        if self._reported_lines != [one.num_lines for one in self.source.datasets]:
            # A stream has ended: report that before admitting jobs after the end of the data.
            self._report_lines(fingerprint(self.source, self._evals))
            self._set_end()
        answer = self._admit(jobs, lane=Lane.TRAIN, source="train", position=position, gate=gate)
        self._offers.record_skips(jobs[: answer.admitted])
        self._is_closed = answer.outcome == "closed"
        if self._is_closed:
            return self._closed_cause(answer.sub, gate[1])
        return DataExhausted(position) if answer.outcome == "ended" else None

    def _closed_cause(self, sub: str, gates: Sequence[Sequence[str]]) -> Cause:
        gate = [names for names in gates if names[0] == sub]
        try:
            room = self._control.do(partial(read_rooms, keys=self._keys, gates=gate))[sub]
        except ProtocolError as exc:
            return RecordUnreadable(str(exc))
        return GateClosed(sub, room.taken, room.places)

    def _admit_eval(self, jobs: list[Offer], source: str, position: int) -> Admission:
        return self._admit(jobs, lane=Lane.EVAL, source=source, position=position, gate=None)

    def _admit(
        self,
        jobs: Sequence[Offer],
        *,
        lane: str,
        source: str,
        position: int,
        gate: tuple[int, Sequence[Sequence[str]]] | None,
    ) -> Admission:
        config = self._config
        in_order = config.staleness.mode is not Mode.ASYNC or config.trainer.subscription.sampler is Sampler.COHORT
        answer = self._control.call(
            scripts.admit(
                self._keys,
                [record_of(job) for job in jobs],
                lane=lane,
                source=source,
                position=position,
                model=self._config.model.name,
                gate=gate,
                cohorts=lane == Lane.EVAL or in_order,
                skips=[self._offers.skip_rule(job) for job in jobs] if lane == Lane.TRAIN else (),
            )
        )
        offered = enumerate(jobs[: answer.admitted])
        self._tally.admitted[lane] += sum(isinstance(job, Job) and at not in answer.skipped for at, job in offered)
        return answer

    def _position(self, source: str) -> int:
        return self._count(self._keys.source, source, f"The position in {source}")

    def _position_and_end(self) -> tuple[int, int | None]:
        """Return (position, end) of the train prompts; the end is None if there is none."""
        position, end = self._control.do(partial(_hmget, key=self._keys.source, fields=("train", "end")))
        return count_of(position, "The position in train"), None if end is None else count_of(
            end, "The end of the prompts"
        )

    def _count(self, key: str, field: str, what: str) -> int:
        return count_of(self._control.do(lambda client: client.hget(key, field)), what)

    def _set_end(self) -> None:
        """Record the end of the data, unless it is not known yet because of a stream.

        Raises:
            ConfigError: prompts after the end were already admitted.
        """
        if self._config.data.epochs is not None and self._end is None:
            return
        position = self._position("train")
        if self._control.call(scripts.span(self._keys, self._end, self._config.data.last_batch)) < 0:
            raise ConfigError(
                f"data.epochs is {self._config.data.epochs}, but {position} prompts were already admitted, with "
                f"{len(self.source)} per epoch: set it to {-(-position // len(self.source))} or more."
            )

    def _check_source(self) -> None:
        """Check that the prompts are those to which the recorded position refers. Raises ConfigError."""
        mine = fingerprint(self.source, self._evals)
        if self._report_lines(mine) != mine:
            raise ConfigError(
                f"Run {self._config.run!r} was started with other prompts (or another seed or order), to which its "
                "position refers: restore the files, or start a run with another name."
            )
        self._read_stream_end_field()
        lengths = ",".join(f"{d.config.name}:{d.num_lines or 'a stream'}" for d in self.source.datasets)
        log.info("prompts: %s (%s per epoch)", lengths, self.source.num_lines or "unknown number")
        for name, skipped in self._held_out.skipped.items():
            log.warning("skipped %d lines of held-out dataset %s", skipped, name)

    def _report_lines(self, mine: str) -> str:
        """Report the known numbers of prompts to Redis; return the fingerprint that is recorded there."""
        self._reported_lines = [one.num_lines for one in self.source.datasets]
        self._tally.epoch_prompts = self.source.num_lines or 0
        sizes = {"epoch_lines": self.source.num_lines, "eval_jobs": len(self._held_out.lines)}
        ends = {_end_field(one): one.num_lines for one in self.source.datasets if one.stream is not None}
        known = {name: number for name, number in {**sizes, **ends}.items() if number is not None}
        return self._control.call(scripts.identify(self._keys, mine, known))

    def _read_stream_end_field(self) -> None:
        """Read the ends of streams that another producer of this run has reached."""
        for one in self.source.datasets:
            if one.num_lines is None and (
                lines := self._count(self._keys.source, _end_field(one), "The end of a stream")
            ):
                one.ends_after(lines)

    def _is_full(self) -> bool:
        return is_full(self._control.do(lambda client: client.info("memory")))


def _hmget(client: Client, key: str, fields: Sequence[str]) -> list[bytes | None]:
    return list(client.hmget(key, *fields))


def _end_field(dataset: Dataset) -> str:
    """Return the hash field that stores a stream's number of lines."""
    return f"lines:{dataset.config.name}"


def chat_template(config: Config) -> Template | None:
    """Return the chat template and token counter if a dataset needs one of them. The import takes seconds."""
    datasets = [*config.data.train, *config.data.eval]
    renders = any(one.apply_chat_template for one in datasets)
    if not renders and not any(one.max_prompt_tokens for one in datasets):
        return None
    check_installed("transformers", "A chat template, and max_prompt_tokens of a dataset,")
    tokenizer: Any = read_tokenizer(config.model.path)

    def render(messages: list[dict[str, Any]], **keywords: Any) -> str:
        keywords = {"add_generation_prompt": True, **keywords, "tokenize": False}
        return str(tokenizer.apply_chat_template(messages, **keywords))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    digest = hashlib.blake2b(repr(getattr(tokenizer, "chat_template", None)).encode(), digest_size=12).hexdigest()
    return Template(render if renders else None, digest, count)


def main(config: Config) -> int:
    """Run one producer until SIGTERM or SIGINT. Blocks."""
    producer = Producer(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: producer.stop())
    producer.run()
    return 0
