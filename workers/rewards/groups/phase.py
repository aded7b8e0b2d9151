"""The second phase of a job, under the same lease: the reward of its whole group, once all samples are committed.

all committed ─> samples (at hand, or read back) ─> reward.group ─> verb reward: written, and the group is ready
                   └ killed anywhere: whoever leases the job next finds nothing missing and begins here
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
    """Of one leased job. Nothing of it happens where ``is_due`` stays False."""

    def __init__(self, services: Services, lease: RawLease) -> None:
        self._services = services
        self._lease = lease
        self._job: Job | None = None
        #: Samples that were committed under this lease, by k.
        self._made: dict[int, Sample] = {}
        self._records: list[bytes] = []
        #: Whether commits are to say that a reward of the group will follow.
        self.is_wanted = False
        #: Whether that reward is what is missing, once all samples are committed.
        self.is_due = lease.awaits_reward

    def begin(self, job: Job) -> None:
        """The record of the job could be read."""
        self._job, self.is_wanted = job, self._services.rewards.group.is_for(job)

    @property
    def num_open(self) -> int:
        """Samples of a group that will need a reward, or waits for it: all of them, committed or not."""
        return self._job.n if self._job is not None and (self.is_wanted or self.is_due) else 0

    def note(self, sample: Sample | None, done: Committed) -> None:
        """A sample was committed; None: it is not at hand any more."""
        self.is_due |= done.outcome == "reward"
        if self.is_wanted and sample is not None:
            self._made[sample.k] = sample

    async def score(self) -> None:
        """Compute the rewards, of samples that are read back where they are not at hand. Blocks for these.

        Raises:
            ConfigError: this worker's configuration names no reward of groups.
            RewardError: as ``GroupReward.score``.
            PayloadError: what a sample was committed with is gone, or is not what was committed.
            ProtocolError: the records of the samples cannot be read.
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
        said = await self._services.control.call(call)
        if said == "lost":
            raise LeaseLost(f"job {job}")
        if said != "ready":
            raise ProtocolError(f"job {job}: its group does not wait for a reward, or a sample is missing.")

    async def _metas(self, job: Job) -> list[SampleMeta]:
        """Records of the group's samples, by k."""
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
            await asyncio.sleep(0)  # the others of the worker go on between two long ones
        return samples
