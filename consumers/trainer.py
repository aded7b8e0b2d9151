"""Iterate over batches, commit them, and publish weights.

    with Trainer(run="digits", name="actor") as trainer:
        for batch in trainer:
            loss = step(batch.padded())
            trainer.commit(batch)
            trainer.publish(model)
            checkpoint(trainer.state_dict()); trainer.checkpointed()

Batches are trained exactly once relative to the restored checkpoint: ``load_state_dict`` rewinds, and the same batches
are delivered again in the same order.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.config import Config
from penstock.config.staleness import Mode
from penstock.config.subscription import Definition, SubscriptionConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.reader import check_reading
from penstock.consumers.session import RunClient, Session
from penstock.consumers.subscription.manifests import check_groups, with_groups
from penstock.consumers.subscription.progress import batch_of
from penstock.consumers.subscription.rank import Seat, job_of
from penstock.errors import DataEnded, ProtocolError, WaitTimeout
from penstock.protocol.staleness import definition_of
from penstock.redis.saved_config import config_of

if TYPE_CHECKING:
    from penstock.consumers.batch.replay import Replay
    from penstock.consumers.weights.publisher import Publisher
    from penstock.consumers.weights.sources import Weights


class Trainer(RunClient):
    """Connect one rank of a trainer to a run.

    Args:
        config: configuration of the run, or its YAML file; None reads the resolved configuration from the run's
        folder. Blocks, with a reported wait, until Redis responds.
        run: name of the run, if ``config`` is None; found under ``runs/``, or under PENSTOCK_DIRECTORY.
        name: name of the subscription; None: ``trainer.name``.
        dp_rank, dp_size: share of each batch that this rank trains (T14).
        replica, num_replicas: tensor-, pipeline- and context-parallel replicas, which get the same share (T14).
        role, roles: role of this process, and all roles that train each manifest; the first role drives, that is, it
        publishes, and the others follow (T13). Every trainer of the subscription must have the same roles.
        replica_group: torch.distributed group (gloo) of the replicas of this dp_rank: the first reads payloads and
            broadcasts them. None: every replica reads.
            prefetch: most batches cut and fetched ahead; each counts into its ``train_version`` (T2).
            prepare: called with each batch before delivery, in the prefetch thread if prefetching; the result is
            ``batch.prepared``. ``lambda batch: batch.packed(8192, "cuda")`` lays out, pins and
            copies during the previous step.
            batch_groups: groups per batch; None: ``trainer.batch_groups``. ConfigError if it contradicts another size.
            subscription: overrides of ``trainer.subscription``: ``{"driving": False}`` for a trainer that reads but
            does not publish, ``{"share": "pool"}`` for one of several trainers that divide the groups.
            definition: complete definition of the subscription, including ``driving``, which overrides ``subscription``
            and the configuration; None: derived from them.
            job: identifies the ranks of one launch, so that leftover ranks of an earlier launch are rejected; None:
            taken from torchrun's or Slurm's environment.

    ``__enter__`` acquires the subscription and ``__exit__`` releases it. Not thread-safe.
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        run: str | None = None,
        name: str | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        replica: int = 0,
        num_replicas: int = 1,
        role: str = "",
        roles: Sequence[str] = (),
        replica_group: Any = None,
        prefetch: int = 0,
        prepare: Callable[[Batch], Any] | None = None,
        batch_groups: int | None = None,
        subscription: "Mapping[str, Any] | None" = None,
        definition: Definition | None = None,
        job: str | None = None,
    ) -> None:
        # Validate before the wait for Redis, so that mistakes are reported at once.
        self.seat = Seat(dp_rank, dp_size, replica, num_replicas, role or (roles[0] if roles else ""), tuple(roles))
        SubscriptionConfig.of(subscription or {}, name or "trainer")
        config = with_groups(config_of(config, run, "Trainer"), batch_groups)
        check_reading(config, self.seat, replica_group)
        self.config = config
        self.name = name or config.trainer.name
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.model_name = config.model.name
        wanted = SubscriptionConfig.of({**config.trainer.subscription.model_dump(), **(subscription or {})}, self.name)
        definition = definition or definition_of(config, subscription=wanted, roles=roles)
        check_groups(batch_groups, definition)
        #: Whether this trainer's publications advance the clock.
        self.drives = definition.driving
        self.session = Session(
            config,
            self.name,
            seat=self.seat,
            definition=definition,
            publishes=self.drives,
            job=job_of(os.environ) if job is None else job,
            replica_group=replica_group,
            prepare=prepare,
            reads_evaluations=True,
        )
        #: Finished evaluations, read and released by rank 0 of the publishing trainer.
        self.evaluations = self.session.evaluations
        self.stream = self.session.stream(0 if config.staleness.mode is Mode.SYNC else prefetch)
        #: Records a row per committed batch: in ``steps.jsonl``, `penstock status` and trackers.
        self.steps = self.session.steps
        #: Number of calls of ``agree``.
        self._rounds = 0

    @classmethod
    def replay(
        cls, path_template: str, config: Config | None = None, *, dp_rank: int = 0, dp_size: int = 1
    ) -> "Replay":
        """Open a recorded run with the same interface as a live one, without engines, buffer or Redis.

        Args:
            path_template: value of ``debug.save_batches``, a path with ``{rollout_id}``.

        Raises ConfigError if there is no recording.
        """
        from penstock.consumers.batch.replay import Replay

        return Replay(path_template, config, dp_rank=dp_rank, dp_size=dp_size)

    def __enter__(self) -> Self:
        self.session.join()
        self.stream.last = self.session.progress.position
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)

    def close(self, *, finished: bool = True) -> None:
        """Wait until the folder of the newest version is complete, then release the subscription. Blocks.

        Args:
            finished: False if training failed: trackers then get no summary.
        """
        self.stream.close()
        self.session.close(finished=finished)

    @property
    def is_leader(self) -> bool:
        """Return whether this rank is the leader, which publishes and keeps the ownership."""
        return self.seat.leads

    @property
    def position(self) -> int:
        """Return the number of batches delivered, or committed before this rank joined."""
        return self.stream.last

    def source_lines(self) -> int | None:
        """Return the producer's count of prompts per epoch; None before it is known. Blocks for one round trip."""
        lines = self.session.subscriber.control.do(lambda client: client.hget(self.keys.source, "epoch_lines"))
        return None if lines is None else int(lines)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the data ends; blocks and raises like :meth:`next`, except for DataEnded."""
        while True:
            try:
                batch = self.next()
            except DataEnded:
                return
            yield batch

    def next(self, timeout: float | None = None) -> Batch:
        """Return the next batch. Blocks until it is cut and its payloads are read (`penstock why` shows the cause).

        Raises:
            DataEnded: all prompts of ``data.epochs`` epochs were used.
            WaitTimeout: no batch within ``timeout`` seconds, or a payload server did not respond in time; calling again
            waits for the same batch.
            OwnershipLost: another trainer owns this subscription.
            ProtocolError: a restored trainer has not published its weights yet.
            RolesApart: this role was restored to a later batch than the driving role.
        """
        if self.session.clock.must_publish:
            raise ProtocolError(
                "Publish the restored weights before the next batch: engines may have an abandoned version."
            )
        self.session.steps.write()
        batch = self.stream.take(timeout)
        self.session.check_clock(batch)
        self.stream.hand_out(batch)
        self.session.hand_out(batch)
        return batch

    def next_nowait(self) -> Batch | None:
        """Return the next batch if it is cut already, else None; request it either way. Raises like :meth:`next`."""
        try:
            return self.next(timeout=0.0)
        except WaitTimeout:
            return None

    def agree(self, batch: Batch | None, *, step: int = 0, word: str = "", timeout: float | None = None) -> list[str]:
        """Check before a step that all ranks of this role train the same batch at the same step, or stop all (T14).

        Blocks, outside any collective and with a reported wait, until every rank has called it. Call it equally often
        on every rank.

        Args:
            batch: batch that this rank is about to train; None skips the comparison.
            word: message to all ranks, for instance a request to stop.
            timeout: seconds; None: ``trainer.rank_timeout_s``.

        Returns the word of each rank, ordered by rank.

        Raises:
            ProtocolError: ranks are about to train different batches. WaitTimeout: a rank did not call in time, without
            reporting a wait for disk space; names the rank.
            OwnershipLost: the subscription was rewound or taken over meanwhile.
        """
        self._rounds += 1
        about = None if batch is None else (batch.n, batch.digest, step)
        timeout_s = self.config.trainer.rank_timeout_s if timeout is None else timeout
        return self.session.agree(self._rounds, about, word, timeout_s)

    def commit(self, batch: Batch) -> None:
        """Commit ``batch`` as trained by this rank; the last rank advances the cursor. Idempotent.

        Blocks for one round trip; a role that is a batch ahead of others waits for them, and reports the wait. Raises
        OwnershipLost, ProtocolError (out of order, cut again meanwhile, or of another subscription).
        """
        self.session.commit(batch)

    def publish(self, weights: "Weights", *, step: int | None = None, timeout: float = 600.0) -> int:
        """Write and announce the next version; return its number. Every rank must call it; the leader rank writes.

        Args:
            weights: a model, its state dict (including FSDP2's DTensors), or ``penstock.Shards``. For sharded weights
            every rank takes part and blocks for the leader; otherwise other ranks return at once. Pass a transformers
            mixture of experts as the model, because its state dict has other names than its files.
            step: step shown by `penstock weights ls`; None: the number of committed batches.

        Blocks until every rank has committed, for a copy in memory, and with a transport other than disk until workers
        that can receive the weights at once have them, at most ``trainer.transfer_timeout_s`` per wait. With
        ``trainer.folder_first: true`` it blocks until the files are on disk instead of for a copy, and for all ready
        workers. The first publication of a trainer or after ``load_state_dict`` needs no new batch and goes to disk
        first; any other needs a newly committed batch.

        NaN or infinite weights are never announced: the last version is republished instead, with a warning.

        Raises:
            WeightsNotFinite: weights were not finite for the third time in a row, in the first publication, or in the
            first one after a rewind.
            PublishError: files cannot be written or read back, no new batch was committed, or ``step`` is not an
                integer.
            WaitTimeout: another rank did not commit or publish its part within ``timeout`` seconds.
            OwnershipLost: another trainer owns the subscription, or rank 0 is gone while its parts are awaited.

        If the folder of an announced version cannot be written, :meth:`next`, ``tick``, ``pin`` and ``onload_engines``
        each raise PublishError and then retry.
        """
        with self.session.steps.publishing():
            return self.session.publisher.publish(weights, step=step, timeout_s=timeout)

    @property
    def publisher(self) -> "Publisher":
        """Return the publisher, which writes and sends weights; imports torch on first use."""
        return self.session.publisher

    def tick(self, *, step: int | None = None, timeout: float = 600.0) -> int:
        """Publish the next version with unchanged weights, for steps without update (a critic's warm-up, T13)."""
        with self.session.steps.publishing():
            return self.session.publisher.tick(step=step, timeout_s=timeout)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the trainer's checkpoint; equal on all ranks (T15)."""
        return self.session.state()

    def fits(self, state: dict[str, Any]) -> bool:
        """Return whether ``load_state_dict`` can rewind to ``state``: Redis knows its batch and has its successors.

        After a power loss the newest checkpoint may refer to a batch that Redis lost. Its version counts as seen either
        way, so that its number is not reused. Blocks for one round trip.
        """
        return self.session.fits(state)

    def checkpointed(self) -> None:
        """Report that the last ``state_dict`` is durable, so that groups trained before it may be deleted.

        With roles, they are deleted once every role has reported. Blocks until every rank has committed. Raises
        ProtocolError without an earlier ``state_dict``.
        """
        self.session.progress.checkpointed()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Rewind to ``state``; the batches after it are delivered again in the same order.

        Call it on every rank. The next call must be ``publish``, because engines may have weights that this rewind
        abandoned (T1). A role that does not drive rewinds only itself: it alone trains again the batches that other
        roles have committed since. Raises ProtocolError if the buffer no longer has the batches.
        """
        n = batch_of(state, self.config.run, self.name)
        self.stream.drop()
        self.session.go_back(n, int(state.get("version", 0)))
        if self.seat.drives:
            self.stream.last = n

    def ask_evaluation(self, version: int, end: str = "") -> None:
        """Request an evaluation of ``version`` regardless of ``data.eval_every``; ``end`` names the end of training."""
        self.session.clock.ask_evaluation(version, end)

    def asked_last(self, end: str) -> int:
        """Return the newest version if ``ask_evaluation`` requested it with this ``end``, else 0."""
        return self.session.clock.asked_last(end)
