"""Compute the reward of a whole group: the second phase of a job, under the same lease, once all samples are committed.

all committed ─> samples (in memory, or read back) ─> reward.group ─> verb reward: written, and the group is ready
                   └ after a kill anywhere: the next lease of the job finds all samples committed and begins here
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby

from penstock import payloads
from penstock.errors import ConfigError, LeaseLost, PayloadError, ProtocolError
from penstock.payloads.sides import key_of
from penstock.protocol import scripts
from penstock.protocol.scripts import Committed, RawLease
from penstock.records.cause import Cause
from penstock.records.causes import PayloadServersAway
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import FinishReason, Sample, SampleStatus
from penstock.records.sample_meta import SampleMeta, iter_metas, stored
from penstock.workers.jobs.commits import bounded_record
from penstock.workers.jobs.payload_stores import PayloadStores
from penstock.workers.jobs.sampling import sampling_for
from penstock.workers.jobs.stops import StopRule
from penstock.workers.services import Services

#: Seconds between two attempts to read from a payload server that does not respond.
LOOK_S = 1.0
BlockedOn = Callable[[Cause | None], None]


async def read_payloads(
    stores: PayloadStores, keys: Keys, job: str, metas: Sequence[SampleMeta], blocked_on: BlockedOn
) -> dict[int, bytes]:
    """Return the payload bytes of committed samples by k; the time to live of all their data is renewed.

    Waits for a payload server that does not respond, until it does or is lost.

    Args:
        blocked_on: called with the cause of a wait, None at its end.

    Raises:
        PayloadError: one is gone.
    """
    found: dict[int, bytes] = {}
    for server in sorted({meta.server for meta in metas}):
        of_server = [meta for meta in metas if meta.server == server]
        names = list(dict.fromkeys(stored(keys, job, meta) for meta in of_server))
        sides = [key_of(keys, job, one.k, one.token, side) for one in of_server for side in one.sides]
        read = partial(stores.read, server, names, [*names, *sides])
        values = dict(zip(names, await _answer(read, stores, server, blocked_on), strict=True))
        for meta in of_server:
            value = values[stored(keys, job, meta)]
            if value is None:
                raise PayloadError(
                    f"sample {job}/{meta.k}: its payload on {server} is gone, and the reward of its group needs it."
                )
            begin = meta.shared[1] if meta.shared else 0
            found[meta.k] = value[begin : begin + meta.num_bytes] if meta.shared else value
    return found


async def _answer(
    read: Callable[[], Awaitable[list[bytes | None] | None]],
    stores: PayloadStores,
    server: str,
    blocked_on: BlockedOn,
) -> list[bytes | None]:
    is_blocked = False
    while (values := await read()) is None:
        blocked_on(PayloadServersAway((server,)))
        is_blocked = True
        await asyncio.sleep(LOOK_S)
        await stores.refresh()
    if is_blocked:
        blocked_on(None)
    return values


def sample_of(job: Job, meta: SampleMeta, data: bytes, stops: StopRule) -> Sample:
    """Restore the sample of a record and its payload. Raises PayloadError if the bytes do not match the record."""
    sample = Sample(job, meta.k)
    payload = payloads.decode(data, sample.id, meta.checksum)
    sample.tokens, sample.logprobs = payload.tokens.tolist(), payload.logprobs.tolist()
    sample.generated, sample.loss_mask = payload.generated.tolist(), payload.loss_mask.tolist()
    sample.versions, sample.prompt_length = payload.versions.tolist(), payload.prompt_length
    sample.status, sample.finish_reason = meta.status, meta.finish_reason
    sample.reward, sample.reward_info = meta.reward, meta.reward_info
    sample.num_turns, sample.num_aborts, sample.num_unproven = meta.num_turns, meta.num_aborts, meta.num_unproven
    sample.cached_tokens, sample.pauses = meta.cached_tokens, meta.pauses
    sample.started_s, sample.first_token_s, sample.drawn_s = meta.started_s, meta.first_token_s, meta.drawn_s
    sample.generate_s, sample.reward_s = meta.generate_s, meta.reward_s
    sample.parts = list(accumulate(part.length for part in meta.all_parts[:-1]))
    sample.turns = _turns(sample, stops)
    sample.text = "".join(sample.turns)
    return sample


def _turns(sample: Sample, stops: StopRule) -> list[str]:
    """Return the text of each turn, as it was when the turn was generated."""
    if sample.status == SampleStatus.GIVEN:
        answer = sample.job.answers[sample.k] if sample.k < len(sample.job.answers) else None
        if isinstance(answer, str):
            return [answer]
    runs = [list(run) for drawn, run in groupby(range(len(sample.tokens)), lambda i: sample.generated[i]) if drawn]
    ends = [True] * (len(runs) - 1) + [sample.finish_reason == FinishReason.STOP]
    return [
        stops.text_of(sample.tokens[run[0] : run[-1] + 1], stopped=ended) for run, ended in zip(runs, ends, strict=True)
    ]


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
