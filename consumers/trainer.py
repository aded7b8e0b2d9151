"""The trainer's client: batches come out of an iterator, commits and weights go back.

    with Trainer(run="digits", name="actor") as trainer:
        for batch in trainer:
            loss = step(batch.padded())
            trainer.commit(batch)
            trainer.publish(model)
            checkpoint(trainer.state_dict()); trainer.checkpointed()

Exactly once is relative to the checkpoint that is restored: ``load_state_dict`` rewinds, and the same batches come
again in the same order.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.config import Config
from penstock.config.staleness import Mode
from penstock.config.subscription import Definition, SubscriptionConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.reader import check_reading
from penstock.consumers.session import Session
from penstock.consumers.subscription.batch_groups import check_groups, with_groups
from penstock.consumers.subscription.progress import batch_of
from penstock.consumers.subscription.seat import Seat, job_of
from penstock.errors import DataEnded, ProtocolError, WaitTimeout
from penstock.protocol.keys import Keys
from penstock.protocol.memory_control import TAGS
from penstock.protocol.presence import WorkerPresence
from penstock.protocol.records.causes import Cause, user_wait
from penstock.protocol.staleness import definition_of
from penstock.redis.saved_config import config_of

if TYPE_CHECKING:
    from penstock.consumers.batch.replay import Replay
    from penstock.consumers.weights.publisher import Publisher
    from penstock.consumers.weights.sources import Weights


class Trainer:
    """One rank of a trainer.

    Args:
        config: the run's configuration, or its YAML file; None reads the resolved one that parts left in the run's
            folder. Of a file or a run the Redis is waited for, by name, until it answers.
        run: name of the run, where ``config`` is None; found under ``runs/``, or under PENSTOCK_DIRECTORY.
        name: the subscription; None takes ``trainer.name``.
        dp_rank, dp_size: which share of each batch this rank trains (T14).
        replica, num_replicas: tensor-, pipeline- and context-parallel copies that see the same share (T14).
        role, roles: which of the roles on one manifest this process plays; the first one drives: it publishes, and
            the others follow it (T13). Every trainer of the subscription is given the same roles.
        replica_group: torch.distributed group (gloo) of the replicas of this dp_rank: the first reads payloads and
            broadcasts them. None: every replica reads.
        prefetch: batches cut and fetched ahead; each counts into its ``train_version`` (T2). At most so many are held.
        prepare: called with each batch before it is handed out, in the thread that fetches ahead where there is one;
            what it returns is ``batch.prepared``. ``lambda batch: batch.packed(8192, "cuda")`` lays out, pins and
            copies while the step before it runs.
        batch_groups: groups per batch; None takes ``trainer.batch_groups``. ConfigError beside another size.
        subscription: fields of ``trainer.subscription`` that differ for this one: ``{"driving": False}`` for a trainer
            that reads beside the one that publishes, ``{"share": "pool"}`` for one of several that divide the groups.
        definition: what the subscription takes, ``driving`` included, whatever ``subscription`` and the configuration
            say; None makes it of them.
        job: what the ranks of one start have in common, so that a rank which outlived its job is refused by the next
            one; None takes it from torchrun's or Slurm's environment.

    The subscription is taken on ``__enter__`` and given back on ``__exit__``. Not thread-safe.
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
        # Before the wait for Redis, so that a mistake is reported at once.
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
        #: True where its publications move the clock.
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
        #: Finished evaluations, which rank 0 of the trainer that publishes reads and releases.
        self.evaluations = self.session.evaluations
        self.stream = self.session.stream(0 if config.staleness.mode is Mode.SYNC else prefetch)
        #: Records a row per committed batch: in ``steps.jsonl``, `penstock status` and trackers.
        self.steps = self.session.steps
        #: Times that the ranks agreed.
        self._rounds = 0

    @classmethod
    def replay(
        cls, path_template: str, config: Config | None = None, *, dp_rank: int = 0, dp_size: int = 1
    ) -> "Replay":
        """A recorded run instead of a live one, with the same interface: no engines, no buffer, no Redis.

        Args:
            path_template: what ``debug.save_batches`` was, a path with ``{rollout_id}``.

        Raises ConfigError where nothing was recorded.
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
        """Give the subscription back, when the newest version has its folder; blocks for that.

        Args:
            finished: False if training failed, so that trackers get no summary.
        """
        self.stream.close()
        self.session.close(finished=finished)

    @property
    def is_leader(self) -> bool:
        """True on the rank that publishes and keeps the ownership."""
        return self.seat.leads

    @property
    def keys(self) -> Keys:
        """Names of the run's keys."""
        return self.session.keys

    @property
    def version(self) -> int:
        """Version of the last publication; 0 before the first. Blocks for one round trip."""
        return self.session.clock.read()

    @property
    def position(self) -> int:
        """Number of batches handed out, or committed before it joined."""
        return self.stream.last

    def source_lines(self) -> int | None:
        """Prompts of one epoch, as the producer counts them; None before it has. Blocks for one round trip."""
        lines = self.session.subscriber.control.do(lambda client: client.hget(self.keys.source, "epoch_lines"))
        return None if lines is None else int(lines)

    def __iter__(self) -> Iterator[Batch]:
        """Batches until the data ends; blocks as :meth:`next`, and raises what it raises but for DataEnded."""
        while True:
            try:
                batch = self.next()
            except DataEnded:
                return
            yield batch

    def next(self, timeout: float | None = None) -> Batch:
        """The next batch; blocks until it is cut and its payloads are here, and says why meanwhile (`penstock why`).

        Raises:
            DataEnded: there are no more; every prompt of ``data.epochs`` passes was drawn on.
            WaitTimeout: it was not there in ``timeout`` seconds; asking again goes on with the same batch.
            OwnershipLost: another trainer has this subscription.
            ProtocolError: a restored trainer has not published its weights yet.
            RolesApart: this role was restored to a later batch than the driving one.
        """
        if self.session.clock.must_publish:
            raise ProtocolError(
                "Publish the restored weights before the next batch: engines may hold a version that was abandoned."
            )
        self.session.steps.write()
        batch = self.stream.take(timeout)
        self.session.check_clock(batch)
        self.stream.hand_out(batch)
        self.session.hand_out(batch)
        return batch

    def next_nowait(self) -> Batch | None:
        """The next batch if it is cut already, else None; asks for it either way. Raises as :meth:`next`."""
        try:
            return self.next(timeout=0.0)
        except WaitTimeout:
            return None

    def agree(self, batch: Batch | None, *, step: int = 0, word: str = "", timeout: float | None = None) -> list[str]:
        """Before a step: every rank of this role is about to train the same batch at the same step, or all stop (T14).

        Blocks until every rank has called it, outside any collective; says for whom it waits. Call it equally often
        on every rank.

        Args:
            batch: what this rank is about to train; None: nothing, which is not compared.
            word: heard by all, for instance that this rank was asked to stop.
            timeout: seconds; None takes ``trainer.rank_timeout_s``.

        Returns each rank's word, in order of ranks.

        Raises:
            ProtocolError: ranks are about to train different things. WaitTimeout: a rank did not come, and does not say
            that it waits for room on a disk; names it.
            OwnershipLost: the subscription was rewound or taken over meanwhile.
        """
        self._rounds += 1
        about = None if batch is None else (batch.n, batch.digest, step)
        timeout_s = self.config.trainer.rank_timeout_s if timeout is None else timeout
        return self.session.agree(self._rounds, about, word, timeout_s)

    def commit(self, batch: Batch) -> None:
        """This rank has trained ``batch``; the last rank to say so moves the cursor. Idempotent.

        Blocks for one round trip; a role that is a batch ahead of others waits for them, and says so. Raises
        OwnershipLost, ProtocolError (out of order, cut anew meanwhile, or of another subscription).
        """
        self.session.commit(batch)

    def publish(self, weights: "Weights", *, step: int | None = None, timeout: float = 600.0) -> int:
        """Write the next version and announce it; returns its number. Every rank calls it; the leader rank writes.

        Args:
            weights: a model, its state dict (FSDP2's DTensors too), or ``penstock.Shards``. Of a
                sharded one every rank takes part, and blocks for the leader; otherwise the others return at once. A
                mixture of experts of transformers is given as the model: its state dict has other names than its files.
            step: what `penstock weights ls` shows as its step; None takes the number of batches that are committed.

        Blocks until every rank has committed, for a copy in memory, and by another transport than disk until workers
        that can take the weights at once have them, each wait for at most ``trainer.transfer_timeout_s``. With
        ``trainer.folder_first: true`` it blocks until the files are on disk instead of for a copy, and for all workers
        that are ready. The first publication of a trainer, or after ``load_state_dict``, consumes nothing, and is on
        disk first; any other needs a newly committed batch.

        NaN or infinite weights are never announced: the last version's are, under the next number, with a warning.

        Raises:
            WeightsNotFinite: the third such weights in a row, or the first publication or one after a rewind.
            PublishError: files cannot be written or read back, nothing new was committed, or ``step`` is no integer.
            WaitTimeout: another rank has not committed in ``timeout`` seconds, or does not come to publish its part.
            OwnershipLost: another trainer has the subscription, or rank 0 is gone while its parts are waited for.

        A folder that cannot be written behind a version has :meth:`next`, ``tick``, ``pin`` and ``onload_engines``
        raise PublishError, each time, and is tried once more after that.
        """
        with self.session.steps.publishing():
            return self.session.publications.publish(weights, step=step, timeout_s=timeout)

    @property
    def publisher(self) -> "Publisher":
        """What writes and sends weights; imports torch when first used."""
        return self.session.publications.publisher

    def tick(self, *, step: int | None = None, timeout: float = 600.0) -> int:
        """The next version with the weights of the last one: a step that changed none, as a critic's warm-up (T13)."""
        with self.session.steps.publishing():
            return self.session.publications.tick(step=step, timeout_s=timeout)

    def tell_wait(self, what: str | Cause | None) -> None:
        """Show in `penstock why` what the caller waits for beside these calls; '' ends it. Returns at once."""
        self.session.subscriber.waiting.blocked_on(user_wait(what))

    def offload_engines(self, tags: Iterable[str] = TAGS, *, timeout: float = 120.0) -> None:
        """Have every engine give up GPU memory: ``weights``, ``kv_cache``, ``cuda_graph``; default all of it.

        For a trainer on the engines' GPUs. Running requests return first (policy drain: samples end first). Workers
        that are restarted obey too. Blocks until all have followed; engines need ``enable-memory-saver``.

        Raises:
            WaitTimeout: a worker did not follow in ``timeout`` seconds; names it.
        """
        self.session.engines.offload(tags, timeout)

    def onload_engines(self, tags: Iterable[str] = TAGS, *, timeout: float = 120.0) -> None:
        """Let engines have that memory again; with ``weights`` they load the newest publication before they go on.

        Blocks as :meth:`offload_engines`.
        """
        self.session.publications.settle()
        self.session.engines.onload(tags, timeout)

    def watch_engines(self, watched: bool = True, *, timeout: float = 120.0) -> None:
        """Have workers count failed health checks of their engines; false: not, while this process uses their GPUs.

        An engine whose process ends is lost either way. Blocks until all do; raises as :meth:`offload_engines`.
        """
        self.session.engines.watch(watched, timeout)

    def revive_engines(self, *, timeout: float = 600.0) -> None:
        """Have engines that are lost started at once, without the wait after several failures; blocks until all serve.

        They are restarted in any case; this is for a trainer that cannot continue without them. With memory offloaded
        it returns at once: they start when it is back.

        Raises:
            WaitTimeout: an engine was not back in ``timeout`` seconds; names its worker and why.
        """
        self.session.engines.revive(timeout)

    def workers(self) -> list[WorkerPresence]:
        """What each live worker shows of itself: ``name``, ``url`` of its engine, ``version``, ``state``, ...

        Blocks for a round trip.
        """
        return self.session.engines.workers()

    def pin(self, version: int, name: str) -> Path:
        """Keep the folder of ``version`` for ``name`` (an evaluation, say) until ``unpin``; returns it.

        Raises PublishError when it is not there any more. Blocks for one round trip.
        """
        return self.session.publications.pin(version, name)

    def unpin(self, name: str) -> None:
        """What ``name`` had pinned may be deleted."""
        self.session.publications.unpin(name)

    @property
    def weights_dir(self) -> Path:
        """Folder of published versions."""
        return self.session.publications.folder

    def state_dict(self) -> dict[str, Any]:
        """What to keep in the trainer's own checkpoint; equal on all ranks (T15)."""
        return self.session.state()

    def fits(self, state: dict[str, Any]) -> bool:
        """True where ``load_state_dict`` can go back to ``state``: Redis knows its batch, and has what came after it.

        After a power loss the newest checkpoint may name a batch that Redis lost. Its version counts as seen either
        way, so that its number is not used again. Blocks for one round trip.
        """
        return self.session.fits(state)

    def checkpointed(self) -> None:
        """The file that holds the last ``state_dict`` is safe on disk: what it trained on may go.

        With roles, it may go when every role has said so. Blocks until every rank has committed. Raises
        ProtocolError without a ``state_dict`` before it.
        """
        self.session.progress.checkpointed()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where ``state`` was taken: the batches after it come again, in the same order.

        The next act must be ``publish``: engines may hold weights that this rewind abandoned (T1). Call it on every
        rank. A role that follows rewinds nobody: it trains again, alone, what the others have committed since. Raises
        ProtocolError when the buffer no longer has what is needed.
        """
        n = batch_of(state, self.config.run, self.name)
        self.stream.drop()
        self.session.go_back(n, int(state.get("version", 0)))
        if self.seat.drives:
            self.stream.last = n

    def ask_evaluation(self, version: int, end: str = "") -> None:
        """Have ``version`` evaluated, whatever ``data.eval_every`` says; ``end`` names where training ended."""
        self.session.clock.ask_evaluation(version, end)

    def asked_last(self, end: str) -> int:
        """The newest version, if ``ask_evaluation`` was asked for it with this ``end``; else 0."""
        return self.session.clock.asked_last(end)

    def report(self, **figures: Any) -> None:
        """Add figures, such as ``loss``, to the row of a step: in ``steps.jsonl``, `penstock status` and trackers.

        Call it between two batches, before the commit or after it. Figures that every row has (``step``, ...) keep
        their value. Returns at once; on a rank that does not lead it blocks for a round trip, for `trainers ls` alone.
        """
        self.session.report(figures)
