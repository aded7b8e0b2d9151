"""Write finished samples: payloads to their servers first, then the commits that make them count.

One flusher serves all jobs of the worker: samples that finish while a batch is in flight join the next batch, which
takes one round trip per payload server and one for the commits.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from redis.exceptions import NoScriptError

from penstock import payloads
from penstock.config import Config
from penstock.errors import ConfigError, PayloadError, QueueFull
from penstock.names import Lane
from penstock.payloads import sides
from penstock.protocol import scripts
from penstock.protocol.scripts import Call, Committed
from penstock.protocol.waits import MOMENT_S, Waiting
from penstock.records.cause import Cause
from penstock.records.causes import PayloadServersAway
from penstock.records.keys import CONTROL, Keys
from penstock.records.sample import Drawn, Sample
from penstock.records.sample_meta import MAX_META_BYTES, SampleMeta
from penstock.records.worker_causes import RedisFull
from penstock.redis.commands import AsyncClient
from penstock.redis.control import AsyncControl, raise_passing
from penstock.workers.jobs.payload_stores import PayloadStores

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Write:
    """Describe samples of one job that are being written."""

    job: str
    #: Token of the lease.
    token: str
    done: "asyncio.Future[Committed]"
    samples: Sequence[Sample]
    temperature: float
    kind: str
    #: Whether a reward of the whole group follows.
    with_reward: bool = False
    #: Discarded tokens of each sample; empty if no tokens were discarded.
    accounts: Sequence[Drawn] = ()
    #: Payload server chosen for the payloads.
    server: str = ""
    #: (k, oldest version, metadata record) of each sample.
    records: list[tuple[int, int, bytes]] = field(default_factory=list)
    #: Token usage, by k.
    usage: dict[int, Drawn] = field(default_factory=dict)
    #: Server -> unwritten (key, bytes) pairs; all samples share one value, each side array has its own.
    payloads: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    #: Pairs written to the control Redis, and the number of lost connections to it at that time.
    on_control: list[tuple[str, bytes]] = field(default_factory=list)
    losses: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for pairs in self.payloads.values() for _, data in pairs)

    def pack(self, server: str, keys: Keys, *, worker: str, wanted: Sequence[str]) -> None:
        """Encode the payloads for ``server`` and the records that refer to it; call again if the server changes.

        Args:
            worker: name recorded with each sample.
            wanted: names of the side arrays that the run requires.

        Raises:
            PayloadError: the arrays of a sample are inconsistent, or a required side array is missing.
        """
        samples = self.samples
        data, metas = payloads.pack(
            samples,
            token=self.token,
            server=server,
            worker=worker,
            temperature=self.temperature,
            logprob_kind=self.kind,
        )
        self.payloads = {server: [(keys.payload(samples[0].id, self.token), data)]}
        metas = [self._pack_sides(sample, meta, keys, wanted) for sample, meta in zip(samples, metas, strict=True)]
        self.records = [
            (meta.k, meta.oldest, bounded_record(sample.id, meta)) for sample, meta in zip(samples, metas, strict=True)
        ]
        discarded = self.accounts or [Drawn()] * len(metas)
        self.usage = {
            meta.k: replace(account, live=Drawn.recorded(meta).live)
            for meta, account in zip(metas, discarded, strict=True)
        }
        self.server = server

    def _pack_sides(self, sample: Sample, meta: SampleMeta, keys: Keys, wanted: Sequence[str]) -> SampleMeta:
        """Add the side arrays of a sample to its payloads; return the record that names them."""
        # Evaluated and scored samples are never trained on.
        is_untrained = sample.job.lane in (Lane.EVAL, Lane.SCORE)
        if is_untrained:
            wanted = ()
        shared = {} if sample.pictures is None or is_untrained else sample.pictures.packed
        if not sample.sides and not wanted and not shared:
            return meta
        arrays = sides.pack_all(sample.sides, sample.id, [name for name in wanted if name not in shared])
        if taken := sorted(arrays.keys() & shared.keys()):
            raise PayloadError(
                f"sample {sample.id}: its side array {taken[0]!r} has the name of a model input made from its images: "
                "rename the side array."
            )
        entries = [[name, len(data), payloads.checksum_of(data)] for name, data in arrays.items()]
        entries += [one.entry(name) for name, one in shared.items()]
        data_of = arrays | {name: one.data for name, one in shared.items()}
        # Existing keys are not rewritten, so the first sample of a group writes the arrays that the group shares.
        pairs = [(sides.key_of(keys, self.job, sample.k, self.token, entry), data_of[entry[0]]) for entry in entries]
        self.payloads[meta.server] += pairs
        return replace(meta, sides=entries)


def bounded_record(sample: str, meta: SampleMeta) -> bytes:
    """Encode the record of a sample. Raises PayloadError if it is longer than a reader accepts."""
    data = meta.to_bytes()
    if len(data) > MAX_META_BYTES:
        raise PayloadError(
            f"sample {sample}: its record has {len(data):,} bytes, at most {MAX_META_BYTES:,} are allowed."
        )
    return data


#: Seconds between attempts to write to a full Redis.
FULL_WAIT_S = 1.0
#: Largest batch of payloads in flight, in bytes.
BATCH_BYTES = 16 * 1024 * 1024


class Commits:
    """Write payloads and commit them; buffer samples while Redis is full.

    Args:
        control: the control Redis of this worker.
        worker: name recorded with each sample.
    """

    def __init__(self, config: Config, keys: Keys, control: AsyncControl, waiting: Waiting, worker: str) -> None:
        if config.redis.url is None:
            raise ConfigError("The worker needs redis.url: the address of the run's Redis.")
        self._keys = keys
        self._control = control
        self._waiting = waiting
        self._worker = worker
        self._wanted_sides = config.rollout.sides
        #: Payload servers to which this worker writes.
        self.stores = self._stores = PayloadStores(config.redis, keys, control)
        #: Server -> number of submitted samples that are neither committed nor cancelled.
        self._open: Counter[str] = Counter()
        self._pending: list[Write] = []
        self._flusher: asyncio.Task[None] | None = None

    def blocked_on(self, cause: Cause | None) -> None:
        """Report what the worker is blocked on; None ends the wait."""
        self._waiting.blocked_on(cause)

    async def refresh(self) -> None:
        """Refresh the list of payload servers. One round trip if nothing changed."""
        await self._stores.refresh()

    @property
    def servers_seen(self) -> str:
        """Directory revision in use: this worker writes only to servers that were live in that revision."""
        if any(count for name, count in self._open.items() if name not in self._stores.names):
            return ""
        return self._stores.rev

    def submit(
        self,
        job: str,
        token: str,
        samples: Sequence[Sample],
        temperature: float,
        kind: str,
        accounts: Sequence[Drawn] = (),
        *,
        with_reward: bool = False,
    ) -> "asyncio.Future[Committed]":
        """Queue samples to be committed; returns at once. Cancelling the future stops retries.

        Args:
            temperature: temperature of the engine's logprobs.
            kind: scaled | original logprobs.
            accounts: discarded tokens of each sample (I10); empty: none.
            with_reward: a reward of the whole group follows.

        Raises:
            PayloadError: the arrays of a sample are inconsistent, or a requested side array is missing.
        """
        done: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        write = Write(job, token, done, samples, temperature, kind, with_reward, accounts)
        self._pack(write, self._choose(write))
        write.done.add_done_callback(partial(self._on_done, write))
        self._pending.append(write)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(), name="commits")
        return write.done

    def _choose(self, write: Write) -> str:
        return self._stores.choose(write.samples[0].id)

    def _pack(self, write: Write, server: str) -> None:
        """Pack the payloads for ``server`` and count the write as open there. Raises PayloadError."""
        before = write.server
        write.pack(server, self._keys, worker=self._worker, wanted=self._wanted_sides)
        if before:
            self._open[before] -= 1
        self._open[server] += 1

    def _on_done(self, write: Write, _: object) -> None:
        self._open[write.server] -= 1

    async def _flush(self) -> None:
        """Write batches until no write is pending."""
        while self._pending:
            batch = self._pending
            try:
                batch = await self._next_batch()
                if batch and await self._write(batch):
                    self._waiting.end()
                    continue
            except Exception as exc:
                # Not transient: each job becomes a dead letter.
                for write in batch:
                    if not write.done.done():
                        write.done.set_exception(exc)
                continue
            if self._pending:
                away = self._stores.silent({write.server for write in self._pending})
                self._waiting.blocked_on(PayloadServersAway(tuple(away)) if away else RedisFull("commit"))
                await asyncio.sleep(FULL_WAIT_S)
        self._waiting.end()

    async def _next_batch(self) -> list[Write]:
        """Remove and return pending writes whose servers have room, up to ``BATCH_BYTES``."""
        for write in self._pending:
            # No sample is committed yet, so no record refers to the previous server.
            if write.payloads and not write.done.done() and self._stores.is_away(write.server):
                chosen = self._choose(write)
                if chosen != write.server:
                    self._pack(write, chosen)
        # Check only servers with pending writes: a drained server may no longer exist.
        wanted = {CONTROL, *(name for write in self._pending for name in write.payloads)}
        full = {name for name in wanted if await self._stores.is_full(name)}
        batch: list[Write] = []
        skipped: list[Write] = []
        num_bytes = 0
        for write in self._pending:
            if write.done.done():
                continue
            if CONTROL in full or full & write.payloads.keys() or num_bytes > BATCH_BYTES:
                skipped.append(write)
                continue
            batch.append(write)
            num_bytes += write.num_bytes
        self._pending = skipped
        return batch

    async def _write(self, batch: list[Write]) -> bool:
        """Write payloads, then commit the writes whose payloads are stored; requeue writes that a full server refused.

        Return whether any write succeeded.
        """
        for server in {name for write in batch for name in write.payloads}:
            await self._write_payloads(server, [write for write in batch if server in write.payloads])
        complete = [write for write in batch if not write.payloads]
        refused = [write for write in batch if write.payloads] + await self._commit(complete)
        self._pending = refused + self._pending
        return len(refused) < len(batch)

    async def _write_payloads(self, server: str, writes: list[Write]) -> None:
        pairs, losses = [pair for write in writes for pair in write.payloads[server]], self._control.losses
        # Report the wait only after MOMENT_S; it ends with the first successful write.
        report = asyncio.get_running_loop().call_later(
            MOMENT_S, self._waiting.blocked_on, PayloadServersAway((server,))
        )
        try:
            answers = await self._stores.put(server, pairs)
        finally:
            report.cancel()
        if answers is None:
            return
        rest = iter(answers)
        for write in writes:
            refusals = [refusal for refusal in islice(rest, len(write.payloads[server])) if refusal is not None]
            for refusal in refusals:
                _warn_full(refusal)
            if not refusals:
                pairs = write.payloads.pop(server)
                if server == CONTROL:
                    write.on_control, write.losses = pairs, losses

    async def _commit(self, writes: list[Write]) -> list[Write]:
        """Commit with one call per lease; return the writes that a full Redis refused."""
        leases: dict[tuple[str, str], list[Write]] = {}
        for write in writes:
            leases.setdefault((write.job, write.token), []).append(write)
        calls = [
            scripts.commit(
                self._keys,
                job,
                token,
                [record for write in together for record in write.records],
                {k: usage for write in together for k, usage in write.usage.items()},
                with_reward=any(write.with_reward for write in together),
            )
            for (job, token), together in leases.items()
        ]
        answers = await self._control.do(lambda client: self._send(client, writes, calls))
        if answers is None:
            return await self._write_again(writes)
        refused = []
        for call, answer, together in zip(calls, answers, leases.values(), strict=True):
            if _found_no_room(answer):
                refused += together
                continue
            for write in together:
                if write.done.done():
                    continue
                if isinstance(answer, Exception):
                    write.done.set_exception(answer)
                else:
                    write.done.set_result(call.parse(answer))
        return refused

    async def _send(self, client: AsyncClient, writes: list[Write], calls: Sequence[Call[Any]]) -> list[Any] | None:
        """Return the replies to the commits; None if the connection was lost after the payloads were written.

        After a failover the new Redis may lack those payloads.
        """
        if any(write.on_control and write.losses != self._control.losses for write in writes):
            return None
        return await _call_all(client, calls)

    async def _write_again(self, writes: list[Write]) -> list[Write]:
        """Write missing payloads to the control Redis again, then commit like ``_commit``."""
        stored = [write for write in writes if write.on_control]
        for write in stored:
            write.payloads[CONTROL] = write.on_control
        await self._write_payloads(CONTROL, stored)
        refused = [write for write in writes if write.payloads]
        return refused + await self._commit([write for write in writes if not write.payloads])

    async def has_room(self) -> bool:
        """Return whether the control Redis has room for optional data."""
        return not await self._stores.is_full(CONTROL)

    async def close(self) -> None:
        """Discard uncommitted writes and close the payload servers."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        await self._stores.close()


async def _call_all(client: AsyncClient, calls: Sequence[Call[Any]]) -> list[Any]:
    """Send calls of one kind in a pipeline; return the raw replies, with the exception of each failed call."""
    if not calls:
        return []
    while True:
        pipe = client.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        answers = raise_passing(await pipe.execute(raise_on_error=False))
        if not any(isinstance(answer, NoScriptError) for answer in answers):
            return answers
        await client.script_load(calls[0].script.text)


def _found_no_room(answer: Any) -> bool:
    refusal = scripts.translate(answer, "commit") if isinstance(answer, Exception) else None
    if isinstance(refusal, QueueFull):
        _warn_full(refusal)
        return True
    return False


def _warn_full(refusal: QueueFull) -> None:
    log.warning("buffering a finished sample locally: %s", refusal)
