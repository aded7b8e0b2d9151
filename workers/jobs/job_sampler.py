"""Produce the samples of one leased job: generate them with the engine or a hook, or score given answers."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from penstock.errors import EngineDied, MemberDied
from penstock.model.pictures import Pictures, image_reader, no_pictures, reading_threads
from penstock.names import AGENT, Lane
from penstock.records.job import Job
from penstock.records.sample import Drawn, Sample, SampleStatus
from penstock.workers.jobs.environments import Environment, close
from penstock.workers.jobs.episodes import can_resume
from penstock.workers.jobs.generate import generate_sample, prompt_ids
from penstock.workers.jobs.prefixes import Prefix
from penstock.workers.jobs.scoring import give_sample, score_sample
from penstock.workers.services import Services


class JobSampler:
    """Produce the samples of one job, and request a restart if the engine dies."""

    def __init__(self, services: Services, job: Job, attempt: int) -> None:
        self._services = services
        self._job = job
        self._attempt = attempt

    @property
    def generates_group(self) -> bool:
        """Whether one call generates all samples that are not given (``generate_group``)."""
        maker = self._services.makers.of(self._job)
        return maker is not None and maker.of_groups

    async def pictures(self) -> Pictures | None:
        """Return the images of the job, ready for requests; None without images. Waits for a thread that reads them.

        Raises:
            ConfigError: an image cannot be read, the model takes no images, or the prompt lacks a placeholder for one.
        """
        path = self._services.config.model.path
        pictures = no_pictures(self._job, path)
        if self._job.images:
            loop = asyncio.get_running_loop()
            pictures = await loop.run_in_executor(reading_threads(), lambda: image_reader(path).read(self._job))
        if pictures is None or self._job.lane == Lane.SCORE:
            return None
        pictures.unfold(prompt_ids(self._job, self._services.tokenizer))
        return pictures

    def is_given(self, k: int) -> bool:
        """Return whether the tokens of sample ``k`` are given by the job instead of generated."""
        return self._job.lane == Lane.SCORE or k < len(self._job.answers)

    async def generate(self, sample: Sample, prefix: Prefix) -> Sample:
        """Generate ``sample`` from its current tokens, or return a new sample with the scored given answer.

        Args:
            prefix: writes checkpoints of the sample.
        """
        if self.is_given(sample.k):
            return await self._score(sample.k)
        services = self._services
        async with self._environment(sample) as environment:
            birth, started_on = services.births, services.publication
            prefix.keeps_turns = can_resume(environment)
            with self._restart_if_died():
                if (maker := services.makers.of(self._job)) is not None:
                    await maker.make(services.source, [sample], [prefix.account])
                else:
                    await generate_sample(
                        services.source,
                        sample,
                        environment=environment,
                        interval=services.config.worker.checkpoint_tokens or 0,
                        on_growth=prefix.keep_if_due,
                        store=prefix.keep_now if prefix.keeps_turns else None,
                        account=prefix.account,
                    )
        if sample.status != SampleStatus.ABORTED:
            await self._report_finished([sample], birth, started_on)
        return sample

    @asynccontextmanager
    async def _environment(self, sample: Sample) -> AsyncIterator[Environment | None]:
        """Yield the environment of a sample and close it afterwards; an episode waits until an agent opens it."""
        services = self._services
        if self._job.environment == AGENT and services.agents is not None:
            episode = await services.agents.begin(sample, self._attempt)
            try:
                yield episode
            finally:
                await services.agents.end(episode)
            return
        environment = services.environments.make(self._job)
        try:
            yield environment
        finally:
            if environment is not None:
                await close(environment, sample)

    async def generate_group(self, samples: Sequence[Sample], accounts: Sequence[Drawn]) -> None:
        """Generate all ``samples`` in one call, whose requests take slots; count discarded tokens in ``accounts``."""
        services = self._services
        birth, started_on = services.births, services.publication
        with self._restart_if_died():
            maker = services.makers.of(self._job)
            assert maker is not None
            await maker.make(services.source, samples, accounts, services.slot)
        await self._report_finished(samples, birth, started_on)

    async def _report_finished(self, samples: Sequence[Sample], birth: int, started_on: str) -> None:
        """Report that the engine finished samples, unless a hook made them without calling the engine."""
        if any(any(sample.generated) for sample in samples):
            await self._services.record_finished(birth, started_on)

    async def _score(self, k: int) -> Sample:
        """Score sequence ``k`` of a scoring job, or given answer ``k``."""
        services = self._services
        with self._restart_if_died():
            if self._job.lane == Lane.SCORE:
                return await score_sample(services.source, self._job, k)
            return await give_sample(services.source, self._job, k)

    @contextmanager
    def _restart_if_died(self) -> Iterator[None]:
        """Restart the engine if it dies inside the ``with``."""
        birth = self._services.births
        try:
            yield
        except MemberDied:
            raise  # the other engines keep running
        except EngineDied as exc:
            self._services.lose_engine(birth, str(exc))
            raise
