"""Connect one rank to a run: the components that all kinds of trainers share.

    subscriber     its subscription                 reader        makes batches from manifests
    progress       batches trained and committed    clock         versions that it publishes
    publisher      publishes weights                steps         rows of trained batches

``Trainer`` reads the batches cut for it; ``Requests`` reads the answers to its own prompts. ``RunClient`` has the
methods of both.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.config.staleness import Mode
from penstock.config.subscription import Definition
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.reader import BatchReader
from penstock.consumers.batch.stream import Stream
from penstock.consumers.clock import Clock, weights_dir_of
from penstock.consumers.grpo.trackers.trackers import check_trackers
from penstock.consumers.metrics.recorder import LatestRecord
from penstock.consumers.metrics.steps import StepRecorder, plain_figure, steps_file
from penstock.consumers.metrics.tally import Tally
from penstock.consumers.metrics.trainer import TrainerCollector
from penstock.consumers.subscription.agreement import agree
from penstock.consumers.subscription.evaluation import Evaluations
from penstock.consumers.subscription.evaluation_reader import EvaluationReader
from penstock.consumers.subscription.progress import Progress
from penstock.consumers.subscription.rank import Seat
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.errors import ConfigError, ProtocolError
from penstock.metrics.server import Exporter
from penstock.protocol import scripts
from penstock.protocol.memory_control import TAGS, change, check_tags, revive, watch
from penstock.protocol.presence import WorkerPresence, live_workers
from penstock.records.cause import Cause
from penstock.records.causes import user_wait
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.system.extras import needed

if TYPE_CHECKING:
    from penstock.consumers.weights.publisher import Publisher


class Session:
    """Hold the components of one rank, which share a connection to the control Redis. Not thread-safe.

    Args:
        name: name of the subscription.
        seat: place of this process among the ranks and roles that train the subscription.
        definition: definition of the subscription, which rank 0 sets when it joins.
        records: whether committed batches are recorded as training steps.
        publishes: whether the trainer publishes weights and advances the clock, even if batches do not depend on it.
        job: see ``Subscriber``.
        replica_group, prepare: see ``BatchReader``.
        reads_evaluations: whether rank 0 of a publishing trainer reads the evaluations of ``data.eval``.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        seat: Seat,
        definition: Definition,
        publishes: bool,
        job: str = "",
        replica_group: Any = None,
        prepare: Callable[[Batch], Any] | None = None,
        records: bool = True,
        reads_evaluations: bool = False,
    ) -> None:
        if (url := config.redis.url) is None:
            raise ConfigError("The trainer needs redis.url: the address of the run's Redis.")
        self.config = config
        self.name = name
        self.seat = seat
        self.publishes = publishes
        self.keys = Keys(config.run)
        model = config.model.name
        self.subscriber = Subscriber(
            url, self.keys, name, seat=seat, definition=definition, model=model if publishes else "", job=job
        )
        self.reader = BatchReader(config, self.subscriber, replica_group=replica_group, prepare=prepare)
        self.progress = Progress(self.subscriber)
        self.clock = Clock(self.subscriber, model, weights_dir_of(config))
        #: Totals of training, publication and waits.
        self.tally = Tally()
        #: Records a row per committed batch in the leader process.
        self.steps = self._recorder(url, definition, records)
        self._publisher: Publisher | None = None
        self.evaluations = Evaluations(config, self.clock, is_read=reads_evaluations and publishes and seat.leads)
        self.evaluations.listeners.append(self.steps.evaluated)
        self._evaluation_reader = EvaluationReader(config, self.evaluations)
        self._exporter: Exporter | None = None

    def _recorder(self, url: str, definition: Definition, records: bool) -> StepRecorder:
        if not (self.seat.leads and records):
            return StepRecorder(self.config, self.name, self.tally, file=None)
        # All members of a pool may publish; the run's main trainer has the configured name.
        is_main = self.name == self.config.trainer.name or (self.publishes and not definition.share)
        return StepRecorder(
            self.config,
            self.name,
            self.tally,
            file=steps_file(self.config, self.name, is_main=is_main),
            latest=LatestRecord(url, self.keys, self.keys.trainers, self._who()),
            tracks=is_main,
        )

    def join(self) -> None:
        """Acquire the subscription and, on rank 0, start serving metrics. Blocks and raises like ``Progress.join``.

        Raises ConfigError if the metrics address cannot be used.
        """
        self.progress.join()
        if self.seat.leads:
            check_trackers(self.config.trainer.report_to)
            self._exporter = Exporter.of(self.config, "trainer", self.name, TrainerCollector(self.tally))
        self._evaluation_reader.start()

    def close(self, *, finished: bool = True) -> None:
        """Release the subscription even if other cleanup fails. Blocks briefly, and for trackers.

        Args:
            finished: False if the trainer failed.
        """
        with ExitStack() as ends:  # runs in reverse order
            ends.callback(self.reader.close)
            ends.callback(self.subscriber.leave)
            if self._publisher is not None:
                ends.callback(self._publisher.close)
            if self._exporter is not None:
                ends.callback(self._exporter.close)
            ends.callback(self.steps.close, finished=finished)
            ends.callback(self._evaluation_reader.stop)

    @property
    def publisher(self) -> "Publisher":
        """Return the publisher, created on first use; imports torch. Raises ConfigError if a package is missing."""
        if self._publisher is None:
            try:
                from penstock.consumers.weights.publisher import Publisher
            except ModuleNotFoundError as exc:
                raise ConfigError(f"Publishing weights needs {needed(exc.name or '', trains=True)}") from exc
            self._publisher = Publisher(self.config, self.subscriber, self.clock, self.progress, self.tally)
        return self._publisher

    def settle(self) -> None:
        """Wait until the folder of the newest version is complete. Raises PublishError if it failed."""
        if self._publisher is not None:
            self._publisher.writer.settle()

    def stream(self, prefetch: int = 0) -> Stream:
        """Return the stream of this rank's batches, with ``prefetch`` batches read ahead."""
        return Stream(
            self.subscriber,
            self.reader,
            self.progress,
            prefetch=prefetch,
            on_wait=self._keep_announced,
            tally=self.tally,
        )

    def agree(self, number: int, about: tuple[int, str, int] | None, word: str, timeout_s: float) -> list[str]:
        """Compare with all ranks the batch about to be trained, see ``Trainer.agree``."""
        with self.tally.waiting("ranks"):
            return agree(self.subscriber, number, about, word, timeout_s)

    def check_clock(self, batch: Batch) -> None:
        """Check that a new batch was cut for the trainer's current version (T2), see ``Clock.check_batch``."""
        if self.seat.leads and self.publishes and batch.n > self.progress.redelivered:
            self.clock.check_batch(batch.n, batch.train_version, self.progress.committed)

    def hand_out(self, batch: Batch) -> None:
        """Record that this rank starts training ``batch``."""
        self.steps.hand_out(batch.n)

    def commit(self, batch: Batch, *, is_trained: bool = True) -> None:
        """Commit ``batch`` for this rank, see ``Trainer.commit``.

        Args:
            is_trained: False if the batch is trained later or not at all, and recorded by the caller.
        """
        if batch.manifest.sub != self.name:
            raise ProtocolError(
                f"Batch {batch.n} belongs to subscription {batch.manifest.sub!r}: commit it to that trainer, not to "
                f"{self.name!r}."
            )
        self.progress.commit(batch.n, batch.digest)
        self.clock.see(batch.train_version if self.publishes else 0)
        if is_trained:
            self.steps.commit(batch.manifest)

    def state(self) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, see ``Trainer.state_dict``."""
        self.steps.write()
        where = {"run": self.config.run, "subscription": self.name, "batch": self.progress.state()}
        return where | {"version": self.clock.seen}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return whether this rank can rewind to ``state``; see ``Trainer.fits``."""
        self.clock.see(int(state.get("version", 0)))
        return self.progress.can_go_back(int(state["batch"]))

    def go_back(self, n: int, version: int) -> None:
        """Rewind to batch ``n``, with weights trained on no later batch and no version above ``version``.

        The driving rank must publish next (T1). Raises like ``Progress.go_back``.
        """
        self.steps.rewind(n)
        self.clock.see(version)
        self.clock.must_publish = self.seat.leads and self.publishes
        self.progress.go_back(n)

    def report(self, figures: Mapping[str, Any]) -> None:
        """Add metrics to the step, see ``Trainer.report``. Blocks for one round trip except on the leader rank."""
        if self.seat.leads:
            self.steps.report(figures)
            return
        shown = {name: plain_figure(value) for name, value in figures.items()}
        record = {"name": self.name, "rank": self.seat.rank, "pid": os.getpid(), "at": time.time(), **shown}
        self.subscriber.control.call(scripts.note(self.keys, self.keys.trainers, self._who(), pack(record)))

    def _who(self) -> str:
        """Return the field of this rank's record in the hash ``trainers``."""
        seat = self.seat
        return f"{self.name}/{seat.role}/{seat.rank}" if seat.roles else f"{self.name}/{seat.rank}"

    def _keep_announced(self) -> None:
        """During a wait for a batch, repeat the announcement of a version that engines crash on.

        Raises PublishError, and ProtocolError if Redis lost a publication, because no batch is cut from samples of that
        version until a later version replaces it.
        """
        if self.seat.leads and self.publishes:
            self.clock.check_lost(self.clock.read())
            if self._publisher is not None:
                self._publisher.writer.keep()
            staleness = self.config.staleness
            self.clock.announce_again(staleness.bound if staleness.mode is Mode.ASYNC else 0)


class RunClient:
    """Control engines, pin versions, and report waits and metrics; base class of all clients of a run.

    Only the leader rank controls the engines; on other ranks these calls, except ``workers``, return at once.
    """

    config: Config
    session: Session

    @property
    def keys(self) -> Keys:
        """Return the names of the run's keys."""
        return self.session.keys

    @property
    def version(self) -> int:
        """Return the version of the last publication; 0 before the first. Blocks for one round trip."""
        return self.session.clock.read()

    @property
    def weights_dir(self) -> Path:
        """Return the folder of published versions."""
        return weights_dir_of(self.config)

    def offload_engines(self, tags: Iterable[str] = TAGS, *, timeout: float = 120.0) -> None:
        """Release GPU memory of every engine: ``weights``, ``kv_cache``, ``cuda_graph``, by default all.

        For trainers that share GPUs with engines. Running requests return first (policy drain: samples end first).
        Restarted workers also release memory. Blocks until all workers have; engines need ``enable-memory-saver``.

        Raises:
            WaitTimeout: a worker did not release its memory within ``timeout`` seconds; names the worker.
        """
        given = set(check_tags(tags))
        self._command(change, lambda offloaded: offloaded | given, timeout_s=timeout, blocked_on=self._blocked_on)

    def onload_engines(self, tags: Iterable[str] = TAGS, *, timeout: float = 120.0) -> None:
        """Restore engine memory; with ``weights``, engines load the newest publication before they resume.

        Blocks and raises like :meth:`offload_engines`.
        """
        given = set(check_tags(tags))
        self.session.settle()
        self._command(change, lambda offloaded: offloaded - given, timeout_s=timeout, blocked_on=self._blocked_on)

    def watch_engines(self, watched: bool = True, *, timeout: float = 120.0) -> None:
        """Enable or ignore failed health checks of engines; ignore them while this process uses the engines' GPUs.

        An engine whose process exits is lost either way. Blocks until all workers apply it; raises like
        :meth:`offload_engines`.
        """
        self._command(watch, watched, timeout_s=timeout)

    def revive_engines(self, *, timeout: float = 600.0) -> None:
        """Restart lost engines at once, without the backoff after repeated failures; block until all serve.

        Workers restart engines anyway; use this if training cannot continue without them. If engine memory is
        offloaded, return at once; the engines start when it is restored.

        Raises:
            WaitTimeout: an engine did not serve within ``timeout`` seconds; names its worker and the reason.
        """
        self._command(revive, timeout_s=timeout, blocked_on=self._blocked_on)

    def workers(self) -> list[WorkerPresence]:
        """Return the presence of each live worker: ``name``, ``url`` of its engine, ``version``, ``state``, ...

        Blocks for a round trip.
        """
        return self.session.subscriber.control.do(lambda client: live_workers(client, self.keys))

    def pin(self, version: int, name: str) -> Path:
        """Pin the folder of ``version`` for ``name`` (an evaluation, for example) until ``unpin``; return the folder.

        Raises PublishError if the folder no longer exists. Blocks for one round trip.
        """
        return self.session.publisher.pin(version, name)

    def unpin(self, name: str) -> None:
        """Remove the pin ``name``, so that the folder may be deleted."""
        self.session.publisher.unpin(name)

    def tell_wait(self, what: str | Cause | None) -> None:
        """Report in `penstock why` a wait of the caller outside of these calls; '' ends it. Returns at once."""
        self._blocked_on(user_wait(what))

    def report(self, **figures: Any) -> None:
        """Add metrics such as ``loss`` to the row of a step in ``steps.jsonl``, `penstock status` and trackers.

        Call it between two batches, before or after the commit. Standard fields (``step``, ...) cannot be overwritten.
        Returns at once on the leader rank; other ranks block for a round trip, and only `trainers ls` shows their
        metrics.
        """
        self.session.report(figures)

    def _blocked_on(self, cause: Cause | None) -> None:
        self.session.subscriber.waiting.blocked_on(cause)

    def _command(self, command: Callable[..., object], *given: Any, **options: Any) -> None:
        session = self.session
        if session.seat.leads:
            control, by = session.subscriber.control, f"trainer {session.name}"
            command(control, self.keys, session.clock.model, *given, by=by, **options)
