"""Prefix checkpoints: a sample's tokens are kept in Redis while it is drawn, so that whoever dies loses only the rest.

    drawn ─> due? ─> first time, or what is there is not true any more: the whole prefix (checkpoint)
                └─> else: what is new, appended (extend)

A checkpoint costs the bytes of its new tokens, not those of the prefix before them. It never holds up the drawing: one
is written at a time, and tokens that come meanwhile go with the next. Only the first turn is kept: what comes behind
an observation cannot be continued, because its environment is lost with its worker. Of a mixture of experts whose
routing is asked for nothing is kept.
"""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from penstock.errors import LeaseLost, PenstockError, QueueFull
from penstock.protocol import scripts
from penstock.protocol.records.drawn import Drawn
from penstock.protocol.records.job import Job
from penstock.protocol.records.sample import FinishReason, Sample, SampleStatus
from penstock.redis.commands import AsyncClient
from penstock.redis.control import raise_passing
from penstock.workers.jobs.partial import (
    MAX_PARTIAL_BYTES,
    DrawnOtherwise,
    Scale,
    growth_to_bytes,
    partial_from_bytes,
    partial_to_bytes,
)
from penstock.workers.services import Services

log = logging.getLogger(__name__)

#: Prefixes of unfinished samples are kept so long.
PARTIAL_TTL_S = 7 * 86400


class Prefix:
    """What Redis has of one sample under one lease.

    Args:
        token: of the lease; once it is lost nothing is written any more (I3).
        temperature: what the sample is drawn at.
    """

    def __init__(self, services: Services, token: str, sample: Sample, temperature: float) -> None:
        config = services.config.worker
        self._services = services
        self._token = token
        self._sample = sample
        self._temperature = temperature
        self._every_tokens = config.checkpoint_tokens
        self._every_s = config.checkpoint_s
        self._kept_at = time.monotonic()
        #: What was thrown away under this lease.
        self.account = Drawn()
        #: Bytes that are there, and the versions they claim for their tokens.
        self._num_bytes = 0
        self._claimed: list[int] = []
        #: Routing does not go with a prefix, and another pass would tell another (T17).
        self._is_kept = not services.engine.tells_routing
        self._ended = not self._is_kept
        self._task: asyncio.Task[None] | None = None

    def told(self, *, at_end: bool = False) -> Drawn:
        """What there is to tell of the sample now (I10); nothing is drawn of one that was given.

        Args:
            at_end: of the lease: a request that is on its way will not be answered any more.
        """
        given = self._sample.status == SampleStatus.GIVEN
        live = 0 if given else sum(self._sample.generated)
        return replace(self.account, live=live, unheard=self.account.unheard if at_end else 0)

    def keep_if_due(self) -> None:
        """Tokens were drawn: begin a checkpoint if one is due. Does not block."""
        if self._ended or (self._task is not None and not self._task.done()) or self._sample.num_turns > 1:
            return
        if self._is_due():
            self._task = asyncio.create_task(self._keep(), name=f"prefix {self._sample.id}")

    def _is_due(self) -> bool:
        new = len(self._sample.tokens) - (len(self._claimed) or self._sample.prompt_length)
        if new <= 0:
            return False
        late = self._every_s is not None and time.monotonic() - self._kept_at >= self._every_s
        return late or (self._every_tokens is not None and new >= self._every_tokens)

    async def settle(self) -> None:
        """Wait for the checkpoint on its way; none is begun afterwards.

        Raises:
            Exception: what ended it, but for a Redis that is full.
        """
        self._ended = True
        await self.written()

    async def written(self) -> None:
        """Wait for the checkpoint on its way; raises as ``settle``."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def keep_all(self) -> bool:
        """Keep the sample as it stands, whatever is due. False: the lease is lost. Raises QueueFull."""
        await self.settle()
        return not self._is_kept or await self._write_whole()

    async def _keep(self) -> None:
        self._kept_at = time.monotonic()
        try:
            if not await self._services.commits.has_room():
                return
            if not await (self._write_growth() if self._is_true() else self._write_whole()):
                self._ended = True  # the heartbeat will say that the lease is lost
        except QueueFull as exc:
            log.warning("the prefix of sample %s is not kept this time: %s", self._sample.id, exc)

    def _is_true(self) -> bool:
        """Whether what is there is the beginning of what was drawn.

        The end of a request may bring other versions; and that a turn has ended is written in the first record.
        """
        claimed, sample = self._claimed, self._sample
        unended = sample.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)
        return bool(claimed) and unended and sample.versions[: len(claimed)] == claimed

    async def _write_growth(self) -> bool:
        sample, services = self._sample, self._services
        record, versions = growth_to_bytes(sample, len(self._claimed)), list(sample.versions)
        call = scripts.extend(
            services.keys,
            sample.job.id,
            self._token,
            sample.k,
            record,
            before=self._num_bytes,
            ttl_s=PARTIAL_TTL_S,
            most=MAX_PARTIAL_BYTES,
            told=self.told(),
        )
        answer = await services.control.call(call)
        if answer == "kept":
            self._note_kept(self._num_bytes + len(record), versions)
        elif answer == "other":
            return await self._write_whole()
        elif answer == "full":
            log.warning("the prefix of sample %s is kept up to token %d only", sample.id, len(self._claimed))
            self._ended = True
        return answer != "lost"

    async def _write_whole(self) -> bool:
        sample, services = self._sample, self._services
        scale = Scale(self._temperature, services.engine.logprob_kind)
        record, versions = partial_to_bytes(sample, scale), list(sample.versions)
        if len(record) > MAX_PARTIAL_BYTES:
            log.warning("the prefix of sample %s has %d bytes and is not kept", sample.id, len(record))
            return True
        call = scripts.checkpoint(
            services.keys, sample.job.id, self._token, sample.k, record, PARTIAL_TTL_S, self.told()
        )
        kept = await services.control.call(call)
        if kept:
            self._note_kept(len(record), versions)
        return kept

    def _note_kept(self, num_bytes: int, versions: list[int]) -> None:
        self._services.tally.checkpoints += 1
        self._services.tally.checkpoint_bytes += max(0, num_bytes - self._num_bytes)
        self._num_bytes, self._claimed = num_bytes, versions


async def read_prefixes(
    services: Services, job: Job, token: str, missing: list[int], temperature: float
) -> dict[int, Sample]:
    """The samples of ``job`` that can be continued at ``temperature``, by k; of those ``missing``.

    Prefixes that cannot be are dropped. Raises LeaseLost.
    """
    scale = Scale(temperature, services.engine.logprob_kind)
    prefixes, unread = {}, []
    for k, (data, told) in zip(missing, await _found(services, job.id, missing), strict=True):
        if data is None:
            unread += [k] if told is not None else []
            continue
        try:
            prefixes[k] = partial_from_bytes(data, job, k, scale)
            continue
        except DrawnOtherwise as exc:
            services.repeats.warn(None, f"sample {job.id}/{k} starts over: {exc}", "drawn otherwise")
        except PenstockError as exc:
            log.warning("sample %s/%d starts over: %s", job.id, k, exc)
        unread.append(k)
    if unread and not await services.control.call(scripts.unread(services.keys, job.id, token, unread)):
        raise LeaseLost(f"job {job.id}")
    return prefixes


async def _found(services: Services, job: str, missing: list[int]) -> list[tuple[bytes | None, bytes | None]]:
    """Of each k its prefix, and what was told of it."""
    if not missing:
        return []
    keys = services.keys

    async def read(client: AsyncClient) -> list[Any]:
        pipe = client.pipeline(transaction=False)
        pipe.mget([keys.partial(f"{job}/{k}") for k in missing])
        pipe.hmget(keys.group(job), [f"t:{k}" for k in missing])
        return raise_passing(await pipe.execute(raise_on_error=False))

    prefixes, told = await services.control.do(read)
    return list(zip(prefixes, told, strict=True))
