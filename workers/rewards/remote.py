"""``remote_rm``: a reward computed by an HTTP service.

The address comes from the run's own configuration alone.
"""

from typing import Any

from penstock.config.reward import RemoteConfig
from penstock.errors import RewardError
from penstock.protocol.records.sample import Sample
from penstock.workers.rewards.service import Service, ServiceFailed


class RemoteReward:
    """Client of the service, for one worker."""

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config
        self._service = Service(config, "reward.remote")

    async def ask(self, sample: Sample, response: str) -> Any:
        """Return the service's result for ``response``. Waits for ``max_attempts`` and the pauses between them.

        Raises:
            RewardError: reward_too_large (the request, or the answer), reward_timeout (the last attempt timed out),
                reward_raised (the last attempt failed, the service redirects, or the label has NaN or an infinity).
        """
        assert self.config.url is not None
        job = sample.job
        prompt = job.prompt if job.prompt is not None else job.prompt_ids
        try:
            return await self._service.ask(
                self.config.url, {"prompt": prompt, "response": response, "label": job.raw_label}
            )
        except ServiceFailed as exc:
            raise RewardError(exc.outcome, f"sample {sample.id}: remote_rm: {exc}.") from exc

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()
