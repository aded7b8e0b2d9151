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

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from consumers.batch.ahead import Ahead
from consumers.batch.batch import Batch
from consumers.batch.reader import BatchReader, check_reading
from consumers.clock import Clock
from consumers.subscription.agreement import agree
from consumers.subscription.seat import Seat, job_of
from consumers.subscription.subscriber import Delivery, Subscriber
from penstock.config import Config
from penstock.config.subscription import subscription_of
from penstock.errors import ConfigError, DataEnded, ProtocolError, PublishError, RolesApart, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.memory_control import TAGS, change, check_tags, revive, watch
from penstock.protocol.presence import live_workers
from penstock.protocol.records.codec import pack
from penstock.protocol.records.publication import Publication
from penstock.protocol.staleness import Policy
from penstock.redis.control import Client
from penstock.redis.saved_config import config_of

if TYPE_CHECKING:
    from consumers.batch.replay import Replay
    from consumers.weights.publisher import Publisher
    from consumers.weights.sources import Weights

log = logging.getLogger(__name__)

#: How often a wait for a batch that is fetched ahead is told.
LOOK_S = 0.5


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
        batch_groups: groups per batch; None takes ``trainer.batch_groups``.
        subscription: fields of ``trainer.subscription`` that differ for this one: ``{"driving": False}`` for a trainer
            that reads beside the one that publishes, ``{"share": "pool"}`` for one of several that divide the groups.
        definition: fields of the subscription; None makes them of the configuration.
        job: what the ranks of one start have in common, so that a rank which outlived its job is refused by the next
            one; None takes it from torchrun's or Slurm's environment.

    The subscription is taken on ``__enter__`` and given back on ``__exit__``. Not thread-safe.
    """

    #: Seconds spent in ``next`` since the start.
    wait_s = 0.0
    #: Number of the batch that is handed out next.
    _next = 1
    #: Batch that the last ``state_dict`` told of.
    _stated: int | None = None
    #: Number and digest of the batch that was committed last.
    _committed: tuple[int, str] | None = None
    #: Last batch that the weights of this process have seen.
    _position = 0
    #: True once ``load_state_dict`` said where the weights are.
    _restored = False
    #: Batches up to this one were committed by all roles before this one was restored to an older one.
    _redone = 0
    #: Times that the ranks agreed.
    _rounds = 0
    #: Last batch that was cut before the last rewind: it keeps the version of its first delivery.
    _redelivered = 0
    _warned = False
    _publisher: "Publisher | None" = None

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
        definition: Mapping[str, scripts.Value] | None = None,
        job: str | None = None,
    ) -> None:
        # Before the wait for Redis, so that a mistake is told at once.
        self.seat = Seat(dp_rank, dp_size, replica, num_replicas, role or (roles[0] if roles else ""), tuple(roles))
        subscription_of(dict(subscription or {}), name or "trainer")
        config = _with_groups(config_of(config, run, "Trainer"), batch_groups)
        check_reading(config, self.seat, replica_group)
        self.config = config
        self.name = name or config.trainer.name
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.model_name = config.model.name
        policy = Policy.of(config.staleness, config.buffer, filtered=bool(config.trainer.filter.functions))
        if (url := config.redis.url) is None:
            raise ConfigError("The trainer needs redis.url: the address of the run's Redis.")
        wanted = subscription_of({**config.trainer.subscription.model_dump(), **(subscription or {})}, self.name)
        #: True where its publications move the clock.
        self.drives = wanted.driving
        if definition is None:
            definition = {
                **policy.definition(config.trainer, model=self.model_name, seed=config.seed, subscription=wanted),
                "roles": ",".join(roles),
            }
        self._subscriber = Subscriber(
            url,
            Keys(config.run),
            self.name,
            seat=self.seat,
            definition=dict(definition),
            model=self.model_name if self.drives else "",
            job=job_of(os.environ) if job is None else job,
        )
        self._reader = BatchReader(config, self._subscriber, replica_group=replica_group, prepare=prepare)
        self._ahead = Ahead(0 if policy.mode == "sync" else prefetch, self._read_ahead)
        self._clock = Clock(self._subscriber, self.model_name, weights_dir_of(config))
        #: False until a role that follows knows where the driving one goes on.
        self._begun = self.seat.drives

    @classmethod
    def replay(
        cls, path_template: str, config: Config | None = None, *, dp_rank: int = 0, dp_size: int = 1
    ) -> "Replay":
        """A recorded run instead of a live one, with the same interface: no engines, no buffer, no Redis.

        Args:
            path_template: what ``debug.save_batches`` was, a path with ``{rollout_id}``.

        Raises ConfigError where nothing was recorded.
        """
        from consumers.batch.replay import Replay

        return Replay(path_template, config, dp_rank=dp_rank, dp_size=dp_size)

    # --- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._subscriber.join()
        self._position = self._subscriber.cursor
        self._next = self._position + 1
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the subscription back. Blocks shortly."""
        self._ahead.close()
        if self._publisher is not None:
            self._publisher.close()
        self._subscriber.leave()
        self._reader.close()

    @property
    def is_leader(self) -> bool:
        """True on the rank that publishes and keeps the ownership."""
        return self.seat.leads

    @property
    def keys(self) -> Keys:
        return self._subscriber.keys

    @property
    def version(self) -> int:
        """Version of the last publication; 0 before the first. Blocks for one round trip."""
        return self._clock.read()

    @property
    def position(self) -> int:
        """Batches behind this trainer: handed out, or committed before it joined."""
        return self._next - 1

    def source_lines(self) -> int | None:
        """Prompts of one epoch, as the producer counts them; None before it has. Blocks for one round trip."""
        lines = self._subscriber.control.do(lambda client: client.hget(self.keys.source, "epoch_lines"))
        return None if lines is None else int(lines)

    # --- batches --------------------------------------------------------------------------------------------------

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
        if self._clock.must_publish:
            raise ProtocolError(
                "Publish the restored weights before the next batch: engines may hold a version that was abandoned."
            )
        began = time.monotonic()
        try:
            self._begin(timeout)
            batch = self._take(self._next, timeout)
        finally:
            self.wait_s += time.monotonic() - began
        self._check_clock(batch)
        self._next = batch.n + 1
        self._look_ahead()
        return batch

    def next_nowait(self) -> Batch | None:
        """The next batch if it is cut already, else None; asks for it either way. Raises as :meth:`next`."""
        try:
            return self.next(timeout=0.0)
        except WaitTimeout:
            return None

    def _begin(self, timeout: float | None) -> None:
        """A role that follows goes on from where its weights are, once the driving one has rewound (T13)."""
        if self._begun:
            return
        self._subscriber.await_driver(timeout)
        cursor = self._subscriber.cursor
        if self._position > cursor:
            raise RolesApart(
                cursor,
                f"Role {self.seat.role} has trained batch {self._position}, but role {self.seat.roles[0]} goes on from "
                f"batch {cursor}: restore a checkpoint of batch {cursor} or before.",
            )
        if not self._restored:
            self._position = cursor
        self._redone = cursor
        self._next = self._position + 1
        self._begun = True

    def _ask(self, n: int) -> None:
        if self.seat.drives:
            self._subscriber.ask(n)

    def _take(self, n: int, timeout: float | None) -> Batch:
        ahead = self._ahead.get(n)
        if ahead is None:
            self._ask(n)
            return self._reader.prepare(self._make(self._subscriber.read(n, timeout, look=self._look_after)))
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while not ahead.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"Batch {n} of subscription {self.name!r} was not there in {timeout} s.")
            self._look_after()
            self._subscriber.waiting.for_(f"batch {n} of buffer:{self.name}")
            futures.wait([ahead], min(LOOK_S, left))
        self._subscriber.waiting.end()
        return self._ahead.take(n)

    def _look_after(self) -> None:
        """While it waits for a batch: a version that engines die of is announced again. Raises PublishError."""
        if self.is_leader and self.drives:
            staleness = self.config.staleness
            self._clock.announce_again(staleness.bound if staleness.mode == "async" else 0)

    def _look_ahead(self) -> None:
        if self._ahead.depth:
            self._ask(self._next + self._ahead.depth - 1)
            self._ahead.look(self._next)

    def _read_ahead(self, n: int, stopped: Callable[[], bool]) -> Batch:
        batch = self._make(self._subscriber.read(n, stopped=stopped, ahead=True))
        batch.decode()
        return self._reader.prepare(batch)

    def _make(self, delivery: Delivery) -> Batch:
        return self._reader.read(delivery, redone=delivery.manifest.n <= self._redone)

    def agree(self, batch: Batch | None, *, step: int = 0, word: str = "", timeout: float | None = None) -> list[str]:
        """Before a step: every rank of this role is about to train the same batch at the same step, or all stop (T14).

        Blocks until every rank has called it, outside any collective; says for whom it waits. Call it equally often
        on every rank.

        Args:
            batch: what this rank is about to train; None: nothing, which is not compared.
            word: heard by all, for instance that this rank was told to stop.
            timeout: seconds; None takes ``trainer.rank_timeout_s``.

        Returns:
            Each rank's word, in order of ranks.

        Raises:
            ProtocolError: ranks are about to train different things. WaitTimeout: a rank did not come; names it.
            OwnershipLost: the subscription was rewound or taken over meanwhile.
        """
        self._rounds += 1
        about = None if batch is None else (batch.n, batch.digest, step)
        timeout_s = self.config.trainer.rank_timeout_s if timeout is None else timeout
        return agree(self._subscriber, self._rounds, about, word, timeout_s)

    def _check_clock(self, batch: Batch) -> None:
        """T2: the version written in a new manifest is the one the trainer holds now."""
        if batch.n <= self._redelivered or not self.drives:
            return
        clock = self.version if self.is_leader else 0
        if self.is_leader:
            self._clock.check_lost(clock)
        if clock > batch.train_version:
            raise ProtocolError(
                f"Batch {batch.n} was cut for version {batch.train_version}, but version {clock} is published: "
                "publish once every trainer.batches_per_version batches."
            )
        committed = self._committed[0] if self._committed is not None else self._subscriber.cursor
        # Who takes a batch before the one before it is trained publishes in between.
        if self.is_leader and clock < batch.train_version and batch.n == committed + 1 and not self._warned:
            self._warned = True
            log.warning(
                "batch %d was cut for version %d, but only version %d is published: publish after every batch whose "
                "number is a multiple of trainer.batches_per_version, before the next batch, or staleness is wrong",
                batch.n,
                batch.train_version,
                clock,
            )

    def commit(self, batch: Batch) -> None:
        """This rank has trained ``batch``; the last rank to say so moves the cursor. Idempotent.

        Blocks for one round trip; a role that is a batch ahead of others waits for them, and says so. Raises
        OwnershipLost, ProtocolError (out of order, cut anew meanwhile, or of another subscription).
        """
        if batch.manifest.sub != self.name:
            raise ProtocolError(
                f"Batch {batch.n} is of subscription {batch.manifest.sub!r}; commit it to its own trainer, not to "
                f"{self.name!r}."
            )
        self._subscriber.commit(batch.n, batch.digest, behind=self._position)
        self._committed = (batch.n, batch.digest)
        self._position = batch.n
        self._clock.see(batch.train_version if self.drives else 0)

    # --- weights --------------------------------------------------------------------------------------------------

    def publish(self, weights: "Weights", *, step: int = 0, timeout: float = 600.0) -> int:
        """Write the next version and announce it; returns its number. Every rank calls it; the leader rank writes.

        Args:
            weights: a model, its state dict (FSDP2's DTensors too), or ``consumers.weights.sources.Shards``. Of a
                sharded one every rank takes part, and blocks for the leader; otherwise the others return at once. A
                mixture of experts of transformers is given as the model: its state dict has other names than its files.

        Blocks until the files are on disk and every rank has committed; by another transport than disk also until the
        workers that are ready have the weights, at most three times ``trainer.transfer_timeout_s``. The first
        publication of a trainer, or after ``load_state_dict``, consumes nothing; any other needs a newly committed
        batch.

        Raises:
            PublishError: the files cannot be written or read back, or nothing new was committed.
            WaitTimeout: another rank has not committed in ``timeout`` seconds.
        """
        from consumers.weights.publisher import tell_failure
        from consumers.weights.sources import as_source

        self._check_drives("publish")
        source = as_source(weights)
        if not self.is_leader:
            self._clock.last = self.publisher.follow(source) or self._clock.last
            return self._clock.last
        try:
            through = self._await_ranks(timeout)
            version, abandoned = self._clock.next_version()
            written = self.publisher.write(source, self.weights_dir, version)
            publication = Publication(
                model=self.model_name,
                version=version,
                transport=self.publisher.transport,
                path=str(written.path),
                index=written.index_digest,
                step=step,
                through=through,
                published_s=time.time(),
                abandoned=abandoned,
            )
            self.publisher.open(publication)
            self._clock.announce(publication)
            self.publisher.send(source, publication)
        except BaseException as exc:
            tell_failure(self.publisher, source, exc)
            raise
        self.publisher.tell(source, "done", self._clock.last)
        return self._clock.last

    @property
    def publisher(self) -> "Publisher":
        """What writes and sends weights; imports torch when first used."""
        if self._publisher is None:
            from consumers.weights.publisher import Publisher

            subscriber = self._subscriber
            self._publisher = Publisher(self.config, subscriber.keys, subscriber.control, subscriber.waiting)
        return self._publisher

    def tick(self, *, step: int = 0, timeout: float = 600.0) -> int:
        """The next version with the weights of the last one: a step that changed none, as a critic's warm-up (T13)."""
        self._check_drives("tick")
        if not self.is_leader:
            return self._clock.last
        if self._clock.must_publish:
            raise ProtocolError("Publish the restored weights before tick(): the last version may be abandoned.")
        through = self._await_ranks(timeout)
        before = self._clock.newest()
        version, abandoned = self._clock.next_version()
        fields = {name: getattr(before, name) for name in ("model", "path", "index", "tensors", "checksums")}
        return self._clock.announce(
            Publication(
                **fields,
                transport="disk",
                version=version,
                step=step,
                through=through,
                published_s=time.time(),
                abandoned=abandoned,
            )
        )

    def tell_wait(self, what: str) -> None:
        """Show in `penstock why` what the caller waits for beside these calls; '' ends it. Returns at once."""
        self._subscriber.waiting.for_(what)

    def _check_drives(self, verb: str) -> None:
        if not self.seat.drives:
            raise ProtocolError(
                f"Role {self.seat.role} may not {verb}(): only role {self.seat.roles[0]} drives the clock."
            )

    def offload_engines(self, tags: Iterable[str] = TAGS, *, timeout: float = 120.0) -> None:
        """Have every engine give up GPU memory: ``weights``, ``kv_cache``, ``cuda_graph``; default all of it.

        For a trainer on the engines' GPUs. Running requests return first (policy drain: samples end first). Workers
        that are restarted obey too. Blocks until all have followed; engines need ``enable-memory-saver``.

        Raises:
            WaitTimeout: a worker did not follow in ``timeout`` seconds; names it.
        """
        given = set(check_tags(tags))
        self._change_memory(lambda offloaded: offloaded | given, timeout)

    def onload_engines(self, tags: Iterable[str] = TAGS, *, timeout: float = 120.0) -> None:
        """Let engines have that memory again; with ``weights`` they load the newest publication before they go on.

        Blocks as :meth:`offload_engines`.
        """
        given = set(check_tags(tags))
        self._change_memory(lambda offloaded: offloaded - given, timeout)

    def watch_engines(self, watched: bool = True, *, timeout: float = 120.0) -> None:
        """Have workers count health checks of their engines, or, ``watched`` false, leave them out: while this process
        takes the engines' time or their GPUs. An engine whose process ends is lost all the same.

        Blocks until all do. Raises WaitTimeout as :meth:`offload_engines`.
        """
        if self.is_leader:
            by = f"trainer {self.name}"
            watch(self._subscriber.control, self.keys, self.model_name, watched, by=by, timeout_s=timeout)

    def revive_engines(self, *, timeout: float = 600.0) -> None:
        """Have engines that are lost started at once, without the wait after several failures; blocks until all serve.

        They are started again without being asked, too; this is for a trainer that will not go on without them. With
        memory offloaded it returns at once: they start when it is back.

        Raises:
            WaitTimeout: an engine was not back in ``timeout`` seconds; names its worker and why.
        """
        if self.is_leader:
            subscriber, by = self._subscriber, f"trainer {self.name}"
            tell = subscriber.waiting.for_
            revive(subscriber.control, self.keys, self.model_name, by=by, timeout_s=timeout, tell=tell)

    def workers(self) -> list[dict[str, Any]]:
        """What each live worker shows of itself: ``name``, ``url`` of its engine, ``version``, ``state``, ...

        Blocks for a round trip.
        """
        workers = self._subscriber.control.do(lambda client: live_workers(client, self.keys))
        return [worker.to_record() for worker in workers]

    def _change_memory(self, change_tags: "Callable[[set[str]], set[str]]", timeout: float) -> None:
        if not self.is_leader:
            return
        subscriber = self._subscriber
        change(
            subscriber.control,
            self.keys,
            self.model_name,
            change_tags,
            by=f"trainer {self.name}",
            timeout_s=timeout,
            tell=subscriber.waiting.for_,
        )

    def pin(self, version: int, name: str) -> Path:
        """Keep the folder of ``version`` for ``name`` (an evaluation, say) until ``unpin``; returns it.

        Raises PublishError when it is not there any more. Blocks for one round trip.
        """
        self._subscriber.control.do(lambda client: client.hset(self.keys.pins(self.model_name), name, version))
        folder = self.weights_dir / f"v{version:08d}"
        if not folder.is_dir():
            self.unpin(name)
            raise PublishError(
                f"Version {version} is not kept any more: raise trainer.keep_versions, or pin it earlier."
            )
        return folder

    def unpin(self, name: str) -> None:
        """What ``name`` had pinned may be deleted."""
        self._subscriber.control.do(lambda client: client.hdel(self.keys.pins(self.model_name), name))

    def _await_ranks(self, timeout: float) -> int:
        """Block until every rank has committed the last batch; its number."""
        if self._committed is None:
            return self._subscriber.cursor
        n, digest = self._committed
        deadline = time.monotonic() + timeout
        while others := self._subscriber.commit(n, digest):
            self._subscriber.ownership.check()
            self._subscriber.waiting.for_(f"other ranks to commit batch {n}: {others}")
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"Not every rank committed batch {n} in {timeout:g} s: one is dead or stuck ({others})."
                )
            time.sleep(0.005)
        self._subscriber.waiting.end()
        return n

    @property
    def weights_dir(self) -> Path:
        """Folder of published versions."""
        return weights_dir_of(self.config)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What to keep in the trainer's own checkpoint; equal on all ranks (T15)."""
        self._stated = self._position
        where = {"run": self.config.run, "subscription": self.name, "batch": self._position}
        return where | {"version": self._clock.seen}

    def fits(self, state: dict[str, Any]) -> bool:
        """True where ``load_state_dict`` can go back to ``state``: Redis knows its batch, and has what came after it.

        After a power loss the newest checkpoint may name a batch that Redis lost. Its version counts as seen either
        way, so that its number is not used again. Blocks for one round trip.
        """
        self._clock.see(int(state.get("version", 0)))
        floor, cursor = self._subscriber.control.do(
            lambda client: client.hmget(self.keys.sub(self.name), "floor", "cursor")
        )
        return int(floor or 0) <= int(state["batch"]) <= int(cursor or 0)

    def checkpointed(self) -> None:
        """The file that holds the last ``state_dict`` is safe on disk: what it trained on may go.

        With roles, it may go when every role has said so. Blocks until every rank has committed. Raises
        ProtocolError without a ``state_dict`` before it.
        """
        if self._stated is None:
            raise ProtocolError("Call state_dict() and save it before checkpointed().")
        if self.seat.rank == 0:
            self._await_ranks(600.0)
            self._subscriber.checkpointed(self._stated)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where ``state`` was taken: the batches after it come again, in the same order.

        The next act must be ``publish``: engines may hold weights that this rewind abandoned (T1). Call it on every
        rank. A role that follows rewinds nobody: it trains again, alone, what the others have committed since. Raises
        ProtocolError when the buffer no longer has what is needed.
        """
        if (state.get("run"), state.get("subscription")) != (self.config.run, self.name):
            raise ConfigError(
                f"The checkpoint is of subscription {state.get('subscription')!r} of run {state.get('run')!r}, "
                f"not of {self.name!r} of {self.config.run!r}."
            )
        if not isinstance(state.get("batch"), int):
            raise ConfigError(
                f"The checkpoint says of no batch where it stands (batch is {state.get('batch')!r}): give what "
                "Trainer.state_dict() returned."
            )
        self._ahead.drop()
        self._committed = None
        self._clock.see(int(state.get("version", 0)))
        self._clock.must_publish = self.is_leader and self.drives
        n = int(state["batch"])
        self._position, self._restored = n, True
        if not self.seat.drives:
            self._begun = False
            return
        self._subscriber.rewind(n)
        # From the rewind to the next publication nothing is cut.
        cut = self._subscriber.control.do(lambda client: client.hget(self.keys.sub(self.name), "cut"))
        self._redelivered = int(cut or 0)
        self._next = n + 1

    # --- presence -------------------------------------------------------------------------------------------------

    def ask_evaluation(self, version: int, end: str = "") -> None:
        """Have ``version`` evaluated, whatever ``data.eval_every`` says: the last one of a run.

        Args:
            end: where training ended, in words of the caller's own, for :meth:`asked_last`.
        """
        # As notes, which a full Redis takes: the run is at its end. The words come first, and count with the version.
        self._subscriber.control.call(
            scripts.note(self.keys, self.keys.source, "final_end", f"{version} {end}".encode())
        )
        self._subscriber.control.call(scripts.note(self.keys, self.keys.clock, "final", str(version).encode()))

    def asked_last(self, end: str) -> int:
        """The newest version, if ``ask_evaluation`` was asked for it with this ``end``; else 0."""

        def look(client: Client) -> list[Any]:
            pipe = client.pipeline(transaction=True)
            pipe.hmget(self.keys.clock, "final", scripts.version_field(self.model_name))
            pipe.hget(self.keys.source, "final_end")
            return list(pipe.execute())

        (final, newest), words = self._subscriber.control.do(look)
        same = final is not None and final == newest and words == f"{int(final)} {end}".encode()
        return int(final) if same else 0

    def take_wait_s(self) -> float:
        """Seconds spent in ``next`` since the last call."""
        waited, self.wait_s = self.wait_s, 0.0
        return waited

    def report(self, **figures: float | int | str) -> None:
        """Show figures of the last step in `penstock status` and the live view."""
        record = {"name": self.name, "rank": self.seat.rank, "pid": os.getpid(), "at": time.time(), **figures}
        who = f"{self.name}/{self.seat.role}/{self.seat.rank}" if self.seat.roles else f"{self.name}/{self.seat.rank}"
        self._subscriber.control.call(scripts.note(self.keys, self.keys.trainers, who, pack(record)))


def weights_dir_of(config: Config) -> Path:
    """Folder of a run's published versions."""
    return Path(config.trainer.weights_dir or config.run_dir / "weights").absolute()


def _with_groups(config: Config, batch_groups: int | None) -> Config:
    """``config`` with another number of groups per batch; None: as it is."""
    if batch_groups is None:
        return config
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"batch_groups": batch_groups})})
