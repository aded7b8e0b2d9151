"""Prefix checkpoints: keep the tokens of a running sample in Redis, so that a crash loses only the latest ones.

    generated ─> due? ─> first time, or Redis has other tokens: write the complete prefix (checkpoint)
                    └─> else: append the new tokens (extend)

A checkpoint costs the bytes of its new tokens, not those of the prefix before them. It never blocks generation: one is
written at a time, and tokens that arrive meanwhile go with the next. Only the first turn is kept: tokens after an
observation cannot be continued, because the environment is lost with its worker. Nothing is kept of a
mixture-of-experts model whose routing is recorded.
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

#: Prefixes of unfinished samples are kept for this long.
PARTIAL_TTL_S = 7 * 86400


class Prefix:
    """The checkpoint of one sample in Redis under one lease.

    Args:
        token: of the lease; once that is lost nothing more is written (I3).
        temperature: sampling temperature of the sample.
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
        #: Tokens discarded under this lease.
        self.account = Drawn()
        #: Bytes in Redis, and the versions recorded there for their tokens.
        self._num_bytes = 0
        self._claimed: list[int] = []
        #: Routing is not stored with a prefix, and another forward pass would give a different one (T17).
        self._is_kept = not services.engine.tells_routing
        self._ended = not self._is_kept
        self._task: asyncio.Task[None] | None = None

    def told(self, *, at_end: bool = False) -> Drawn:
        """Return the token usage of the sample now (I10); a given answer has no generated tokens.

        Args:
            at_end: the lease ends: requests in flight will not be answered.
        """
        given = self._sample.status == SampleStatus.GIVEN
        live = 0 if given else sum(self._sample.generated)
        return replace(self.account, live=live, unheard=self.account.unheard if at_end else 0)

    def keep_if_due(self) -> None:
        """Start a checkpoint if one is due. Does not block."""
        if self._ended or (self._task is not None and not self._task.done()) or self._sample.num_turns > 1:
            return
        if self._is_due():
            self._task = asyncio.create_task(self._keep(), name=f"prefix {self._sample.id}")

    def _is_due(self) -> bool:
        new = len(self._sample.tokens) - (len(self._claimed) or self._sample.prompt_length)
        if new <= 0:
            return False
        is_late = self._every_s is not None and time.monotonic() - self._kept_at >= self._every_s
        return is_late or (self._every_tokens is not None and new >= self._every_tokens)

    async def settle(self) -> None:
        """Wait for the checkpoint in flight; no other is started afterwards.

        Raises:
            Exception: what ended it, except a full Redis.
        """
        self._ended = True
        await self.written()

    async def written(self) -> None:
        """Wait for the checkpoint in flight; raises as ``settle``."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def keep_all(self) -> bool:
        """Keep the complete sample now. Return False if the lease is lost. Raises QueueFull."""
        await self.settle()
        return not self._is_kept or await self._write_whole()

    async def _keep(self) -> None:
        self._kept_at = time.monotonic()
        try:
            if not await self._services.commits.has_room():
                return
            if not await (self._write_growth() if self._is_current() else self._write_whole()):
                self._ended = True  # the heartbeat reports that the lease is lost
        except QueueFull as exc:
            log.warning("prefix of sample %s not kept this time: %s", self._sample.id, exc)

    def _is_current(self) -> bool:
        """Return whether Redis has a prefix of the current tokens.

        The final answer of a request may change versions; and the end of a turn is written in the first record.
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
            log.warning("prefix of sample %s kept up to token %d only", sample.id, len(self._claimed))
            self._ended = True
        return answer != "lost"

    async def _write_whole(self) -> bool:
        sample, services = self._sample, self._services
        scale = Scale(self._temperature, services.engine.logprob_kind)
        record, versions = partial_to_bytes(sample, scale), list(sample.versions)
        if len(record) > MAX_PARTIAL_BYTES:
            log.warning("prefix of sample %s not kept: it has %d bytes", sample.id, len(record))
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
    """Return the ``missing`` samples of ``job`` that can be continued at ``temperature``, by k.

    Drops the other prefixes. Raises LeaseLost.
    """
    scale = Scale(temperature, services.engine.logprob_kind)
    prefixes, unread = {}, []
    for k, (data, told) in zip(missing, await _fetch(services, job.id, missing), strict=True):
        if data is None:
            unread += [k] if told is not None else []
            continue
        try:
            prefixes[k] = partial_from_bytes(data, job, k, scale)
            continue
        except DrawnOtherwise as exc:
            services.repeats.warn(None, f"sample {job.id}/{k} starts over: {exc}", "other sampling")
        except PenstockError as exc:
            log.warning("sample %s/%d starts over: %s", job.id, k, exc)
        unread.append(k)
    if unread and not await services.control.call(scripts.unread(services.keys, job.id, token, unread)):
        raise LeaseLost(f"job {job.id}")
    return prefixes


async def _fetch(services: Services, job: str, missing: list[int]) -> list[tuple[bytes | None, bytes | None]]:
    """Return the prefix and the recorded token usage of each k."""
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
