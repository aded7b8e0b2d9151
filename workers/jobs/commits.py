"""What a worker writes: payloads on their servers first, then the commits that make them count.

One flusher serves all jobs of the worker: whatever finished while the last batch was on its way goes with the next,
in one round trip for the payloads of each server and one for the commits.
"""

import asyncio
import hashlib
import logging
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from redis.exceptions import NoScriptError

from penstock import payloads
from penstock.config import Config
from penstock.config.load import redact
from penstock.errors import ConfigError, PayloadError, QueueFull, QueueUnavailable
from penstock.payloads import servers as payload_servers
from penstock.payloads import sides
from penstock.payloads.folder import PayloadFolder
from penstock.protocol import score_jobs, scripts
from penstock.protocol.keys import CONTROL, Keys
from penstock.protocol.records.sample import Sample
from penstock.protocol.records.sample_meta import MAX_META_BYTES, SampleMeta
from penstock.protocol.scripts import Call, Committed
from penstock.protocol.waits import MOMENT_S, Waiting
from penstock.redis.control import PASSING, AsyncControl, Client
from penstock.redis.refusals import passing

log = logging.getLogger(__name__)

#: Wait before a full Redis is tried again; also how long a look at its memory holds.
FULL_WAIT_S = 1.0
#: Share of maxmemory above which nothing is committed: the buffer and the trainers need the rest to make room.
FULL = 0.85
#: How long a payload server may stay silent before samples go to another one; it is asked again after a pause, which
#: doubles.
SILENT_S, AWAY_S, LONGEST_AWAY_S = 2.0, 2.0, 60.0
#: Most bytes of payloads that travel at once.
BATCH_BYTES = 16 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Write:
    """Samples of one job on their way."""

    job: str
    token: str
    done: "asyncio.Future[Committed]"
    samples: Sequence[Sample]
    temperature: float
    kind: str
    #: Payload server that has, or is to have, its payloads.
    server: str = ""
    #: (k, oldest version, metadata record) of each.
    records: list[tuple[int, int, bytes]] = field(default_factory=list)
    #: Server -> (key, bytes) of what is not written yet; all samples of a write lie in one value, side arrays in more.
    payloads: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for pairs in self.payloads.values() for _, data in pairs)


class Commits:
    """Writes payloads and commits them. A full Redis is waited for, with the samples in hand.

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
        self._ttl_s = config.buffer.payload_ttl_s
        self._redis = config.redis
        self._sides = config.rollout.sides
        self._servers = {name: _store(url) for name, url in config.redis.payload_servers.items()}
        #: Servers that do not answer -> (not asked before then (monotonic), pause after that).
        self._away: dict[str, tuple[float, float]] = {}
        #: Those that are written to now.
        self._names = list(self._servers) or [CONTROL]
        self._servers[CONTROL] = control
        self._memory = {name: _Memory(server) for name, server in self._servers.items()}
        self._directory = payload_servers.Directory(rev=-1)
        #: Server -> samples handed over whose end is still open.
        self._open: Counter[str] = Counter()
        self._pending: list[_Write] = []
        self._flusher: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """See which payload servers there are by now. One round trip where nothing changed."""
        rev = int(await self._control.do(lambda client: client.hget(self._keys.servers, "rev")) or 0)
        if self._directory.rev < 0:
            for call in payload_servers.seeds(self._keys, self._redis):
                await self._control.call(call)
        elif rev == self._directory.rev:
            return
        raw = await self._control.do(lambda client: client.hgetall(self._keys.servers))
        directory = payload_servers.parse(raw)
        for name in directory.live:
            if name not in self._servers:
                self._servers[name] = _store(directory.url(name, self._redis))
                self._memory[name] = _Memory(self._servers[name])
        names = directory.live or [CONTROL]
        if names != sorted(self._names):
            log.info("payloads go to %s from now on", ", ".join(names))
        self._directory, self._names = directory, names

    @property
    def servers_rev(self) -> int:
        """Revision of the directory that this worker acts by: it writes to no server that was not live in it."""
        if any(count for name, count in self._open.items() if name not in self._names):
            return 0
        return max(0, self._directory.rev)

    async def commit(self, job: str, token: str, samples: Sequence[Sample], temperature: float, kind: str) -> Committed:
        """Write and commit finished samples of one job. Waits while Redis is full or gone; see ``submit``."""
        return await self.submit(job, token, samples, temperature, kind)

    def submit(
        self, job: str, token: str, samples: Sequence[Sample], temperature: float, kind: str
    ) -> "asyncio.Future[Committed]":
        """Hand samples over to be committed; returns at once. A cancelled future is not tried any more.

        Args:
            temperature: what the engine scaled logprobs by.
            kind: scaled | original logprobs.

        Raises:
            PayloadError: a sample's arrays contradict each other, or a side array that was asked for is not there.
        """
        write = _Write(job, token, asyncio.get_running_loop().create_future(), samples, temperature, kind)
        self._house(write, self._choose(write))
        write.done.add_done_callback(partial(self._settle, write))
        self._pending.append(write)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(), name="commits")
        return write.done

    def _choose(self, write: _Write) -> str:
        """The server for its payloads, by rendezvous hash among those that are written to and answer."""
        names = [name for name in self._names if not self._is_away(name)] or self._names
        return choose_server(write.samples[0].id, names)

    def _house(self, write: _Write, server: str) -> None:
        """Make its payloads, and the records that name their server. Raises PayloadError."""
        samples = write.samples
        data, metas = payloads.pack(
            samples,
            token=write.token,
            server=server,
            worker=self._worker,
            temperature=write.temperature,
            logprob_kind=write.kind,
        )
        write.payloads = {server: [(self._keys.payload(samples[0].id, write.token), data)]}
        metas = [self._pack_sides(write, sample, meta) for sample, meta in zip(samples, metas, strict=True)]
        write.records = [
            (meta.k, meta.oldest, _bounded(sample, meta)) for sample, meta in zip(samples, metas, strict=True)
        ]
        if write.server:
            self._open[write.server] -= 1
        write.server = server
        self._open[server] += 1

    def _is_away(self, server: str) -> bool:
        return server in self._away and time.monotonic() < self._away[server][0]

    def _tell_away(self, server: str, exc: QueueUnavailable) -> None:
        """A payload server does not answer: what was for it goes to another one, and it is asked again later."""
        pause_s = self._away[server][1] if server in self._away else AWAY_S
        self._away[server] = (time.monotonic() + pause_s, min(2 * pause_s, LONGEST_AWAY_S))
        log.warning(
            "payload server %s does not answer; finished samples go to others for %g s: %s", server, pause_s, exc
        )

    def _pack_sides(self, write: _Write, sample: Sample, meta: SampleMeta) -> SampleMeta:
        """Have the side arrays of a sample written beside its payload; the record that names them."""
        # A sequence that is scored is no sample of the run.
        wanted = () if sample.job.lane == score_jobs.LANE else self._sides
        if not sample.sides and not wanted:
            return meta
        arrays = sides.pack_all(sample.sides, sample.id, wanted)
        write.payloads[meta.server] += [
            (self._keys.side(sample.id, write.token, name), data) for name, data in arrays.items()
        ]
        return replace(meta, sides=[[name, len(data), zlib.crc32(data)] for name, data in arrays.items()])

    def _settle(self, write: _Write, _: object) -> None:
        self._open[write.server] -= 1

    async def _flush(self) -> None:
        """Write until nothing is pending."""
        while self._pending:
            batch = self._pending
            try:
                batch = await self._take()
                if batch and await self._write(batch):
                    self._waiting.end()
                    continue
            except Exception as exc:
                # Not what passes by itself: each job buries it with its own name on it.
                for write in batch:
                    if not write.done.done():
                        write.done.set_exception(exc)
                continue
            if self._pending:
                away = [name for name in self._away if any(write.server == name for write in self._pending)]
                what = f"payload server {', '.join(away)} to take" if away else "room in Redis for"
                self._waiting.for_(f"{what} finished samples")
                await asyncio.sleep(FULL_WAIT_S)
        self._waiting.end()

    async def _take(self) -> list[_Write]:
        """Pending writes whose servers have room, as many as travel at once."""
        for write in self._pending:
            # Nothing of it is committed, so nothing names the server that it was for.
            if write.payloads and not write.done.done() and self._is_away(write.server):
                chosen = self._choose(write)
                if chosen != write.server:
                    self._house(write, chosen)
        # Not those that nobody writes to: one that was drained may be gone.
        wanted = {CONTROL, *(name for write in self._pending for name in write.payloads)}
        full = {name for name in wanted if await self._is_full(name)}
        batch: list[_Write] = []
        left: list[_Write] = []
        num_bytes = 0
        for write in self._pending:
            if write.done.done():
                continue
            if CONTROL in full or full & write.payloads.keys() or num_bytes > BATCH_BYTES:
                left.append(write)
                continue
            batch.append(write)
            num_bytes += write.num_bytes
        self._pending = left
        return batch

    async def _is_full(self, server: str) -> bool:
        """Whether a server takes nothing now, for want of room or because it does not answer."""
        if self._is_away(server):
            return True
        try:
            return await self._memory[server].is_full()
        except QueueUnavailable as exc:
            if server == CONTROL:
                raise
            self._tell_away(server, exc)
            return True

    async def _write(self, batch: list[_Write]) -> bool:
        """Payloads, then the commits of those that have theirs; what found no room is pending again.

        Returns whether anything found room.
        """
        for server in {name for write in batch for name in write.payloads}:
            await self._write_payloads(server, [write for write in batch if server in write.payloads])
        whole = [write for write in batch if not write.payloads]
        refused = [write for write in batch if write.payloads] + await self._commit(whole)
        self._pending = refused + self._pending
        return len(refused) < len(batch)

    async def _write_payloads(self, server: str, writes: list[_Write]) -> None:
        pairs = [pair for write in writes for pair in write.payloads[server]]
        # Told only where it takes longer than a moment; ended when something was written.
        told = asyncio.get_running_loop().call_later(
            MOMENT_S, self._waiting.for_, f"payload server {server} to take finished samples"
        )
        try:
            answers = await self._servers[server].do(lambda client: _put_all(client, pairs, self._ttl_s))
            self._away.pop(server, None)
        except QueueUnavailable as exc:
            if server == CONTROL:
                raise
            self._tell_away(server, exc)
            return
        finally:
            told.cancel()
        rest = iter(answers)
        for write in writes:
            # Each is looked at: what is not for want of room is an error.
            full = [_is_full(answer, "payload") for answer in islice(rest, len(write.payloads[server]))]
            if not any(full):
                del write.payloads[server]

    async def _commit(self, writes: list[_Write]) -> list[_Write]:
        """Commit, one verb per lease; returns what found no room."""
        leases: dict[tuple[str, str], list[_Write]] = {}
        for write in writes:
            leases.setdefault((write.job, write.token), []).append(write)
        calls = [
            scripts.commit(self._keys, job, token, [record for write in together for record in write.records])
            for (job, token), together in leases.items()
        ]
        answers = await self._control.do(lambda client: _call_all(client, calls))
        refused = []
        for call, answer, together in zip(calls, answers, leases.values(), strict=True):
            if _is_full(answer, "commit"):
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

    async def has_room(self) -> bool:
        """Whether the control Redis has room for what can be done without."""
        return not await self._memory[CONTROL].is_full()

    async def close(self) -> None:
        """Give up what is not committed, and close the payload servers."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        for name, control in self._servers.items():
            if name != CONTROL:
                await control.close()


def _store(url: str) -> AsyncControl:
    """A payload server, which others may stand in for."""
    return AsyncControl(url, patience_s=SILENT_S)


class _Memory:
    """Whether a server has room, looked up at most once per ``FULL_WAIT_S``."""

    def __init__(self, control: AsyncControl) -> None:
        self._control = control
        self._looked = 0.0
        self._full = False

    async def is_full(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= FULL_WAIT_S:
            full = await self._control.do(_has_no_room)
            if full and not self._full:
                log.warning("finished samples are kept here: %s has no room for them", redact(self._control.url))
            self._full, self._looked = full, now
        return self._full


async def _has_no_room(client: Client) -> bool:
    if isinstance(client, PayloadFolder):
        return await asyncio.to_thread(client.is_full)
    info = await client.info("memory")
    return bool(info["maxmemory"]) and info["used_memory"] > FULL * info["maxmemory"]


async def _put_all(client: Client, pairs: Sequence[tuple[str, bytes]], ttl_s: int) -> list[Any]:
    """- -> written: SET NX EX of each; an error of one stands in its place.

    In a folder: a file of each. On a server no script: a plain SET keeps the very bytes that came in, a script copies
    them twice. The key carries the lease's token, so saying it twice writes the same bytes, or nothing.
    """
    if isinstance(client, PayloadFolder):
        return list(await asyncio.to_thread(client.put, pairs))
    pipe = client.pipeline(transaction=False)
    for key, data in pairs:
        pipe.set(key, data, nx=True, ex=ttl_s)
    return _answers(await pipe.execute(raise_on_error=False))


async def _call_all(client: Client, calls: Sequence[Call[Any]]) -> list[Any]:
    """Raw answers of verbs of one kind, sent together; an error of one stands in its place."""
    if not calls:
        return []
    while True:
        pipe = client.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        answers = _answers(await pipe.execute(raise_on_error=False))
        if not any(isinstance(answer, NoScriptError) for answer in answers):
            return answers
        await client.script_load(calls[0].script.text)


def _answers(answers: list[Any]) -> list[Any]:
    """A server that loads or takes no writes says so in every answer: that passes, all is sent again."""
    for answer in answers:
        if isinstance(answer, PASSING):
            raise answer
        if (refusal := passing(answer)) is not None:
            raise refusal
    return answers


def _bounded(sample: Sample, meta: SampleMeta) -> bytes:
    """The record of a sample, which every reader must be able to take. Raises PayloadError."""
    data = meta.to_bytes()
    if len(data) > MAX_META_BYTES:
        raise PayloadError(
            f"sample {sample.id}: its record has {len(data):,} bytes, more than the {MAX_META_BYTES:,} of one."
        )
    return data


def _is_full(answer: Any, verb: str) -> bool:
    if not isinstance(answer, Exception):
        return False
    translated = answer if isinstance(answer, QueueFull) else scripts.translate(answer, verb)
    if isinstance(translated, QueueFull):
        log.warning("a finished sample is kept here: %s", translated)
        return True
    if verb == "payload":
        raise answer
    return False


def choose_server(sample_id: str, servers: Sequence[str]) -> str:
    """Rendezvous hash (Thaler and Ravishankar 1998): a server that joins or leaves moves only its own share."""
    if len(servers) == 1:
        return servers[0]
    return max(servers, key=lambda name: hashlib.blake2b(f"{name}\0{sample_id}".encode(), digest_size=8).digest())
