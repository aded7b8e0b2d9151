"""A trainer client in memory, for tests of the training loop: it records steps, and needs no Redis."""

from typing import Any

from penstock.config import Config
from penstock.consumers.batch.batch import Batch
from penstock.consumers.metrics.steps import StepRecorder, steps_file
from penstock.consumers.metrics.tally import Tally
from penstock.consumers.subscription.evaluation import Evaluations
from penstock.records.cause import Cause


class Source:
    """What the loop needs of a trainer; ``done`` lists what it did with it, in order."""

    def __init__(self, config: Config, rank: int = 0) -> None:
        self.done: list[str] = []
        self.evaluations = Evaluations()
        file = steps_file(config, "actor", is_main=True) if rank == 0 else None
        self.steps = StepRecorder(config, "actor", Tally(), file=file)

    def commit(self, batch: Batch) -> None:
        self.done.append(f"commit {batch.n}")
        self.steps.commit(batch.manifest)

    def publish(self, weights: Any, *, step: int) -> int:
        self.done.append(f"publish {step}")
        return step

    def state_dict(self) -> dict[str, Any]:
        return {}

    def checkpointed(self) -> None:
        self.done.append("checkpointed")

    def tell_wait(self, what: "str | Cause | None") -> None: ...

    def report(self, **figures: Any) -> None:
        self.steps.report(figures)
