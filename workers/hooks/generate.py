"""Generate samples: by turns of the engine, or by a function of ``hooks.generate``, ``eval`` or ``rollout``."""

from collections.abc import Awaitable, Callable, Sequence

from penstock.config import Config
from penstock.model.tokenizer import Tokenizer
from penstock.names import Lane
from penstock.records.job import Job
from penstock.records.sample import Drawn, Sample
from penstock.workers.engine import Engine, Segment
from penstock.workers.hooks.maker import Maker, Slot
from penstock.workers.jobs.environments import Environment
from penstock.workers.jobs.generate import generate_sample
from penstock.workers.jobs.valves import Valves


class Generating:
    """Generates the samples of one worker.

    Raises:
        ConfigError: a function cannot be imported, or has an unsupported signature.
    """

    def __init__(self, config: Config) -> None:
        hooks, self._rollout = config.hooks, config.rollout
        paths = {"generate": hooks.generate, "rollout": hooks.rollout, "eval": hooks.eval}
        makers = {key: Maker(key, path, config) for key, path in paths.items() if path is not None}
        self._maker = makers.get("generate") or makers.get("rollout")
        self._maker_of_eval = makers.get("eval") or self._maker

    def makes_groups(self, job: Job) -> bool:
        """Return whether all samples of ``job`` are generated together (``make_group``)."""
        maker = self._maker_of(job)
        return maker is not None and maker.of_groups

    def _maker_of(self, job: Job) -> Maker | None:
        return self._maker_of_eval if job.lane == Lane.EVAL else self._maker

    async def make(
        self,
        engine: Engine,
        valves: Valves,
        sample: Sample,
        *,
        tokenizer: Tokenizer,
        environment: Environment | None = None,
        interval: int = 0,
        drawn: Callable[[], None] | None = None,
        store: Callable[[], Awaitable[None]] | None = None,
        account: Drawn | None = None,
        answered: Callable[[Segment, bool], None] | None = None,
    ) -> None:
        """Generate ``sample``; arguments, waits and errors are those of ``generate_sample``.

        A custom function starts over, without tokens of an earlier attempt; one for groups gets a group of one.

        Raises:
            HookError: the function raised, hung (``hooks.generate_timeout_s``), or claims tokens not generated.
        """
        job, account = sample.job, account or Drawn()
        maker = self._maker_of(job)
        if maker is None:
            await generate_sample(
                engine, valves, job, sample.k, tokenizer=tokenizer, rollout=self._rollout, environment=environment,
                partial=sample, interval=interval, drawn=drawn, store=store, account=account, answered=answered,
            )  # fmt: skip
            return
        await maker.make(engine, valves, [sample], tokenizer=tokenizer, accounts=[account], answered=answered)

    async def make_group(
        self,
        engine: Engine,
        valves: Valves,
        samples: Sequence[Sample],
        *,
        tokenizer: Tokenizer,
        accounts: Sequence[Drawn],
        answered: Callable[[Segment, bool], None],
        slot: Slot,
    ) -> None:
        """Generate ``samples`` of a job that ``makes_groups``; as ``Maker.make``."""
        maker = self._maker_of(samples[0].job)
        assert maker is not None
        await maker.make(engine, valves, samples, tokenizer=tokenizer, accounts=accounts, answered=answered, slot=slot)
