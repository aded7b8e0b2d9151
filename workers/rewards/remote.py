"""``remote_rm``: a reward that a service computes, asked over HTTP.

The address comes from the run's own configuration alone. A redirect is refused: it would send answers elsewhere.
"""

import asyncio
import json
import random
from typing import Any

import aiohttp

from penstock.config.reward import RemoteConfig
from penstock.errors import RewardError
from penstock.protocol.records.job import JobFailure
from penstock.protocol.records.sample import Sample
from penstock.redaction import redact
from penstock.words import said

_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class _Failed(Exception):
    """One try came to nothing."""


class RemoteReward:
    """The way to the service, for one worker."""

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config
        self._free = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, sample: Sample, response: str) -> Any:
        """What the service gives for ``response``. Waits for ``max_attempts`` tries and the pauses between them.

        Raises:
            RewardError: reward_too_large (the request, or the answer), reward_timeout (the last try took too long),
                reward_raised (the last try failed, or the service redirects).
        """
        body = self._body(sample, response)
        for attempt in range(self.config.max_attempts):
            try:
                async with self._free:
                    return await self._post(body, sample)
            except (_Failed, aiohttp.ClientError, TimeoutError, OSError) as exc:
                last: Exception = exc
            if attempt + 1 < self.config.max_attempts:
                # Spread, so that a service that comes back is not asked by all at once.
                await asyncio.sleep(min(2.0**attempt, self.config.max_pause_s) * random.uniform(0.5, 1.0))
        outcome = JobFailure.REWARD_TIMEOUT if isinstance(last, TimeoutError) else JobFailure.REWARD_RAISED
        why = str(last) if isinstance(last, _Failed) else redact(said(last))
        raise RewardError(
            outcome, f"sample {sample.id}: remote_rm: {self.config.max_attempts} tries failed, the last with {why}."
        ) from last

    async def close(self) -> None:
        """Let go of the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _body(self, sample: Sample, response: str) -> bytes:
        job = sample.job
        prompt = job.prompt if job.prompt is not None else job.prompt_ids
        body = json.dumps({"prompt": prompt, "response": response, "label": job.raw_label}).encode()
        if len(body) > self.config.max_bytes:
            raise self._too_large(sample, f"its request has {len(body):,} bytes")
        return body

    async def _post(self, body: bytes, sample: Sample) -> Any:
        assert self.config.url is not None
        async with self._opened().post(self.config.url, data=body, headers=_HEADERS, allow_redirects=False) as answer:
            if 300 <= answer.status < 400:
                raise RewardError(
                    JobFailure.REWARD_RAISED,
                    f"sample {sample.id}: remote_rm: {redact(self.config.url)} redirects ({answer.status}), which is "
                    "refused: set reward.remote.url to where it leads.",
                )
            if answer.status != 200:
                raise _Failed(f"status {answer.status}")
            text = bytearray()
            async for chunk in answer.content.iter_any():
                text += chunk
                if len(text) > self.config.max_bytes:
                    raise self._too_large(sample, "its answer has more bytes")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise _Failed(f"an answer that is no JSON: {said(exc)}") from exc

    def _too_large(self, sample: Sample, what: str) -> RewardError:
        most = f"reward.remote.max_bytes = {self.config.max_bytes:,}"
        return RewardError(JobFailure.REWARD_TOO_LARGE, f"sample {sample.id}: remote_rm: {what}; at most {most}.")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self.config.timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session
