"""Replay a recorded run to a trainer without engines, buffer or Redis.

Same interface as ``Trainer``, so that a training loop needs no changes. Only ``agree`` blocks on other ranks;
publications are counted, not written; the end of the recording ends the iteration.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from penstock.config import Config
from penstock.consumers.batch import recording
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.columns import LocalColumns
from penstock.consumers.metrics.steps import StepRecorder, steps_file
from penstock.consumers.metrics.tally import Tally
from penstock.consumers.subscription.evaluation import Evaluations
from penstock.errors import ConfigError, PenstockError, ProtocolError
from penstock.records.cause import Cause
from penstock.records.manifest import Row


class RecordingOver(PenstockError):
    """Signal the end of the recording."""


class Replay:
    """Iterate over the batches of a recording for one rank.

    Args:
        records: whether to write ``steps.jsonl`` and report to trackers, as in a run; needs ``config``.
        template: path of the recording, with ``{rollout_id}`` (and ``{rank}``); any ``dp_size`` may replay it.
        config: configuration for advantages and ``trainer.max_token_staleness``; None: the defaults.

    Raises:
        ConfigError: the recording has no files.
    """

    def __init__(
        self,
        template: str,
        config: Config | None = None,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        records: bool = False,
    ) -> None:
        self.config = config
        self.name = "replay"
        self._template = template
        self._rank, self._size = dp_rank, dp_size
        self._numbers = recording.numbers(template)
        if not self._numbers:
            raise ConfigError(f"no recorded batch matches {template!r}: record a run with debug.save_batches first.")
        self._next = 0
        self._committed = 0
        file = steps_file(config, self.name, is_main=True) if config and records and dp_rank == 0 else None
        #: Step recorder, as in ``Trainer``.
        self.steps = StepRecorder(config, self.name, Tally(), file=file)
        self.version = 0
        #: Empty, because a recording has no evaluations.
        self.evaluations = Evaluations()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)

    def close(self, *, finished: bool = True) -> None:
        """Write the last step, see ``StepRecorder.close``."""
        self.steps.close(finished=finished)

    @property
    def is_leader(self) -> bool:
        return self._rank == 0

    def __iter__(self) -> Iterator[Batch]:
        while self._next < len(self._numbers):
            yield self.next()

    def next(self, timeout: float | None = None) -> Batch:
        """Return the next batch. Blocks only for the disk. Raises RecordingOver, PayloadError."""
        if self._next >= len(self._numbers):
            raise RecordingOver(f"The recording {self._template!r} ends with batch {self._numbers[-1]}.")
        self.steps.write()
        found = recording.load(self._template, self._numbers[self._next])
        self._next += 1
        self.steps.hand_out(found.manifest.n)
        trainer = self.config.trainer if self.config is not None else None
        return Batch(
            found.manifest,
            digest=found.digest,
            payloads=found.payloads,
            dp_rank=self._rank,
            dp_size=self._size,
            advantage=trainer.advantage if trainer else "grpo",
            max_staleness=trainer.max_token_staleness if trainer else None,
            store=LocalColumns(found.columns),
            read_sides=partial(_sides, found.payloads),
        )

    def next_nowait(self) -> Batch | None:
        """Return the next batch, or None at the end."""
        return self.next() if self._next < len(self._numbers) else None

    def agree(self, batch: Batch | None, *, step: int = 0, word: str = "", timeout: float | None = None) -> list[str]:
        """Return each rank's word, in order of ranks; blocks for them. All replay the same files in the same order."""
        import torch.distributed as dist

        words: list[Any] = [word] * self._size
        if self._size > 1 and dist.is_initialized():
            dist.all_gather_object(words, word)
        return words

    def commit(self, batch: Batch) -> None:
        """Commit a batch. Raises ProtocolError if it is out of order."""
        if batch.n < self._committed:
            raise ProtocolError(f"Batch {batch.n} is out of order: batch {self._committed} is already committed.")
        self._committed = batch.n
        self.steps.commit(batch.manifest)

    def publish(self, weights: Any, *, step: int | None = None, timeout: float = 600.0) -> int:
        """Increment the version; nothing is written."""
        self.version += 1
        return self.version

    def tick(self, *, step: int | None = None, timeout: float = 600.0) -> int:
        """Increment the version, like ``publish``."""
        return self.publish(None, step=step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last commit."""
        self.steps.write()
        return {"run": self.config.run if self.config else "", "subscription": self.name, "batch": self._committed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch of ``state``."""
        self._committed = int(state["batch"])
        self.steps.rewind(self._committed)
        self._next = sum(1 for n in self._numbers if n <= self._committed)

    def fits(self, state: dict[str, Any]) -> bool:
        """Return True, because a recording has every batch."""
        return True

    def checkpointed(self) -> None:
        """Do nothing, because a recording retires no groups."""

    def ask_evaluation(self, version: int, end: str = "") -> None:
        """Do nothing, because a replay has no evaluations."""

    def asked_last(self, end: str) -> int:
        """Return 0, because a replay has no evaluations."""
        return 0

    def tell_wait(self, what: str | Cause | None) -> None:
        """Do nothing, because a replay reports no waits."""

    def report(self, **figures: Any) -> None:
        """Add metrics to the row of a step, if steps are recorded."""
        self.steps.report(figures)


def _sides(payloads: Mapping[str, recording.Bytes | None], rows: Sequence[Row], name: str) -> dict[str, bytes | None]:
    """Return the bytes of a recorded side array by sample id, without rows that lack it."""
    named = [row for row in rows if any(side[0] == name for side in row.sides)]
    found = {row.payload_id: payloads.get(recording.side_key(row.payload_id, name)) for row in named}
    return {sample: None if data is None else bytes(data) for sample, data in found.items()}
