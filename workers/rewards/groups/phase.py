"""Compute the reward of a whole group: the second phase of a job, under the same lease, once all samples are committed.

all committed ─> samples (in memory, or read back) ─> reward.group ─> verb reward: written, and the group is ready
                   └ after a kill anywhere: the next lease of the job finds all samples committed and begins here
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ConfigError, LeaseLost, ProtocolError
from penstock.protocol import scripts
from penstock.protocol.records.job import Job
from penstock.protocol.records.sample import Sample
from penstock.protocol.records.sample_meta import SampleMeta, iter_metas
from penstock.protocol.scripts import Committed, RawLease
from penstock.workers.jobs.sampling import sampling_for
from penstock.workers.jobs.stops import StopRule
from penstock.workers.jobs.write import bounded_record
from penstock.workers.rewards.groups.stored_samples import read_payloads, sample_of
from penstock.workers.services import Services


class GroupPhase:
    """The group reward of one leased job. Does nothing while ``is_due`` is False."""

    def __init__(self, services: Services, lease: RawLease) -> None:
        self._services = services
        self._lease = lease
        self._job: Job | None = None
        #: Samples that were committed under this lease, by k.
        self._made: dict[int, Sample] = {}
        self._records: list[bytes] = []
        #: Whether commits must announce that a group reward follows.
        self.is_wanted = False
        #: Whether only the group reward is missing, once all samples are committed.
        self.is_due = lease.awaits_reward

    def begin(self, job: Job) -> None:
        """Start with the job's record."""
        self._job, self.is_wanted = job, self._services.rewards.group.is_for(job)

    @property
    def num_open(self) -> int:
        """Number of samples of a group that needs a reward now or later, committed or not; else 0."""
        return self._job.n if self._job is not None and (self.is_wanted or self.is_due) else 0

    def note(self, sample: Sample | None, done: Committed) -> None:
        """Record a committed sample; None if it is no longer in memory."""
        self.is_due |= done.outcome == "reward"
        if self.is_wanted and sample is not None:
            self._made[sample.k] = sample

    async def score(self) -> None:
        """Compute the rewards; samples that are not in memory are read back. Blocks for both.

        Raises:
            ConfigError: this worker's configuration has no group reward.
            RewardError: as ``GroupReward.score``.
            PayloadError: the payload of a sample is gone, or differs from the committed one.
            ProtocolError: the records of the samples are malformed.
        """
        services, job = self._services, self._job
        assert job is not None
        if not self.is_wanted:
            raise ConfigError(
                f"job {job.id} waits for the reward of its group, and reward.group of this worker's configuration "
                "names none: set it as it was, start the workers again, and requeue the job."
            )
        began = time.monotonic()
        metas = await self._metas(job)
        samples = await self._samples(job, metas)
        scored = await services.rewards.group.score(samples)
        self._records = [
            bounded_record(sample.id, replace(meta, reward=number, reward_info=info))
            for meta, sample, (number, info) in zip(metas, samples, scored, strict=True)
        ]
        services.tally.group_rewards += 1
        services.tally.group_reward_s += time.monotonic() - began

    async def write(self) -> None:
        """Write the rewards, which makes the group ready. Blocks for a round trip. Raises LeaseLost, ProtocolError."""
        job = self._lease.job
        call = scripts.reward(self._services.keys, job, self._lease.token, self._records)
        outcome = await self._services.control.call(call)
        if outcome == "lost":
            raise LeaseLost(f"job {job}")
        if outcome != "ready":
            raise ProtocolError(f"job {job}: its group does not wait for a reward, or a sample is missing.")

    async def _metas(self, job: Job) -> list[SampleMeta]:
        """Return the records of the group's samples, by k."""
        services, what = self._services, f"metadata of group {job.id}"
        (data,) = await services.control.do(lambda client: client.mget([services.keys.meta(job.id)]))
        metas = sorted(iter_metas(data or b"", what), key=lambda one: one.k)
        if not metas or len({one.k for one in metas}) != len(metas) or metas[-1].k >= job.n:
            raise ProtocolError(f"{what} are not those of its samples.")
        return metas

    async def _samples(self, job: Job, metas: Sequence[SampleMeta]) -> list[Sample]:
        services, made = self._services, self._made
        if all(meta.k in made for meta in metas):
            return [made[meta.k] for meta in metas]
        found = await read_payloads(services.commits.stores, services.keys, job.id, metas, services.commits.blocked_on)
        sampling = sampling_for(job, services.config.rollout)
        stops = StopRule.of(sampling, services.tokenizer, services.engine.eos_token_ids)
        samples = []
        for meta in metas:
            samples.append(made.get(meta.k) or sample_of(job, meta, found[meta.k], stops))
            await asyncio.sleep(0)  # let other tasks run between two long samples
        return samples
