"""How the samples of one leased job come to be: drawn by the engine, made by a hook, or given by the job and scored."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.errors import EngineDied, MemberDied
from penstock.names import Lane
from penstock.protocol.records.drawn import Drawn
from penstock.protocol.records.job import Job
from penstock.protocol.records.sample import Sample, SampleStatus
from penstock.weights.pictures import Pictures, image_reader, no_pictures, reading_threads
from penstock.workers.jobs.generate import prompt_ids
from penstock.workers.jobs.given import give_sample
from penstock.workers.jobs.prefixes import Prefix
from penstock.workers.jobs.scoring import score_sample
from penstock.workers.services import Services


class Drawing:
    """Of one job. Waits and errors are those of ``Generating``; an engine that dies under it is restarted."""

    def __init__(self, services: Services, job: Job) -> None:
        self._services = services
        self._job = job

    @property
    def is_together(self) -> bool:
        """Whether all that are drawn are drawn by one call (``draw_group``)."""
        return self._services.generating.makes_groups(self._job)

    async def pictures(self) -> Pictures | None:
        """The images of the job, ready to be drawn with; None: nothing is an image. Waits for a thread that reads them.

        Raises:
            ConfigError: they cannot be read, the model reads none, or the prompt has not one place for each.
        """
        path = self._services.config.model.path
        found = no_pictures(self._job, path)
        if self._job.images:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(reading_threads(), lambda: image_reader(path).read(self._job))
        if found is None or self._job.lane == Lane.SCORE:
            return None
        found.unfold(prompt_ids(self._job, self._services.tokenizer))
        return found

    def is_given(self, k: int) -> bool:
        """Whether sample ``k`` is not drawn: its tokens are the job's."""
        return self._job.lane == Lane.SCORE or k < len(self._job.answers)

    async def draw(self, sample: Sample, prefix: Prefix) -> Sample:
        """Draw ``sample``, behind what it holds; or another one in its place, where it is given.

        Args:
            prefix: keeps what is drawn.
        """
        if self.is_given(sample.k):
            return await self._given(sample.k)
        services = self._services
        birth, begun_on = services.births, services.publication
        with self._noticing_death():
            await services.generating.make(
                services.engine,
                services.valves,
                sample,
                tokenizer=services.tokenizer,
                environment=services.environments.make(self._job),
                interval=services.config.worker.stream_interval,
                drawn=prefix.keep_if_due,
                account=prefix.account,
                answered=services.tally.answered,
            )
        if sample.status != SampleStatus.ABORTED:
            await self._note_finished([sample], birth, begun_on)
        return sample

    async def draw_group(self, samples: Sequence[Sample], accounts: Sequence[Drawn]) -> None:
        """Draw all of ``samples`` by one call, whose requests hold slots; ``accounts`` are told of each."""
        services = self._services
        birth, begun_on = services.births, services.publication
        with self._noticing_death():
            await services.generating.make_group(
                services.engine,
                services.valves,
                samples,
                tokenizer=services.tokenizer,
                accounts=accounts,
                answered=services.tally.answered,
                slot=services.slot,
            )
        await self._note_finished(samples, birth, begun_on)

    async def _note_finished(self, samples: Sequence[Sample], birth: int, begun_on: str) -> None:
        """What a hook made without asking the engine says nothing of the engine."""
        if any(any(sample.generated) for sample in samples):
            await self._services.note_finished(birth, begun_on)

    async def _given(self, k: int) -> Sample:
        """Sample ``k`` of what is given: a sequence of a scoring job, or an answer."""
        services = self._services
        with self._noticing_death():
            if self._job.lane == Lane.SCORE:
                return await score_sample(services.engine, services.valves, self._job, k)
            return await give_sample(
                services.engine,
                services.valves,
                self._job,
                k,
                tokenizer=services.tokenizer,
                max_context=services.config.rollout.max_context_tokens,
            )

    @contextmanager
    def _noticing_death(self) -> Iterator[None]:
        """An engine that dies under what is asked of it inside is restarted."""
        birth = self._services.births
        try:
            yield
        except MemberDied:
            raise  # the other engines go on
        except EngineDied as exc:
            self._services.lose_engine(birth, str(exc))
            raise
