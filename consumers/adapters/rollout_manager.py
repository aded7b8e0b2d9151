"""A facade with the methods of slime's ``RolloutManager``, so that a slime-shaped loop calls penstock.

    manager.load(start - 1); manager.publish(model, start - 1)
    for rollout_id in range(start, num_rollout):
        shares = manager.generate(rollout_id)          # one dict of train data per data-parallel rank
        train(rollout_id, shares)
        save_model(rollout_id); manager.save(rollout_id)
        manager.publish(model, rollout_id)             # where slime calls actor_model.update_weights()

Rollout i is batch i + 1 of the subscription. A loop that generates ahead (slime's ``train_async``) calls
``generate(i + 1)`` before it has trained rollout i; nothing is committed before ``publish`` or ``save`` names it.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from consumers import behaviour
from consumers.adapters.slime import train_data
from consumers.batch import Batch
from consumers.evaluate import Evaluation
from consumers.trainer import Trainer
from penstock.config import Config
from penstock.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

#: Longest wait for an evaluation.
EVAL_TIMEOUT_S = 3600.0


class RolloutManager:
    """Rollouts of a run for a slime-shaped loop; one per run, on the driver.

    Args:
        config, run, name: as of ``Trainer``.
        dp_size: data-parallel ranks that train; ``generate`` returns a share for each. Payloads of all ranks are read
            by this process, as in slime.
        folder: where ``save`` writes; None: the run's ``rollout`` folder.
        prefetch: batches cut and fetched ahead, see ``Trainer``.
        temperature: what slime's trainer divides logits by, its ``--rollout-temperature``; None takes the run's
            ``rollout.sampling``. Another one than the run's is refused here, and batches of any other by ``generate``.
        options: further arguments of ``consumers.adapters.slime.train_data``.

    The subscription is taken when it is made; ``dispose`` (or the end of a ``with`` block) gives it back. Not
    thread-safe: a Ray actor around it serves one call at a time.
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        run: str | None = None,
        name: str | None = None,
        dp_size: int = 1,
        folder: Path | None = None,
        prefetch: int = 0,
        temperature: float | None = None,
        **options: Any,
    ) -> None:
        if dp_size < 1:
            raise ConfigError(f"dp_size is {dp_size}; it must be at least 1.")
        self._trainer = Trainer(config, run=run, name=name, prefetch=prefetch)
        self.config = self._trainer.config
        behaviour.check_config(self.config)
        drawn_at = behaviour.run_temperature(self.config)
        if temperature is not None and not behaviour.same(temperature, drawn_at):
            raise ConfigError(
                f"The run draws at temperature {drawn_at:g}, and the trainer divides by {temperature:g}: every ratio "
                "would be wrong. Make rollout.sampling and --rollout-temperature the same."
            )
        self.temperature = drawn_at
        self.dp_size = dp_size
        self._options = options
        self._folder = folder or self.config.run_dir / "rollout"
        #: Rollouts that were handed out and are not committed, by id; in their order.
        self._open: dict[int, Batch] = {}
        self._evaluation: Evaluation | None = None
        self._trainer.__enter__()
        self._next = self._trainer.position
        #: Samples of all rollouts handed out before ``_next``, as far as this process knows.
        self._samples = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.dispose()

    def dispose(self) -> None:
        """Give the subscription back; what is not committed comes again. Blocks shortly."""
        if self._evaluation is not None:
            self._evaluation.stop()
        self._trainer.close()

    @property
    def version(self) -> int:
        """Version of the last publication; 0 before the first. Blocks for one round trip."""
        return self._trainer.version

    # --- slime's methods ------------------------------------------------------------------------------------------

    def generate(self, rollout_id: int) -> list[dict[str, Any]]:
        """Train data of a rollout, one dict per rank (``slime.train_data``); blocks until its batch is cut.

        Asked again before it is committed, it returns the same rollout.

        Raises:
            ProtocolError: ``rollout_id`` is neither the next one nor one that is not committed yet.
            ConfigError: not all of it was drawn at the run's temperature, or logprobs are from before it (T6).
        """
        batch = self._open.get(rollout_id)
        if batch is None:
            if rollout_id != self._next:
                raise ProtocolError(
                    f"Rollout {rollout_id} was asked for, but the next one of subscription {self._trainer.name!r} is "
                    f"{self._next}: call load() with the rollout that the weights have last seen, or begin there."
                )
            batch = self._open[rollout_id] = self._trainer.next()
            self._next = rollout_id + 1
        return [self._share(batch, rank) for rank in range(self.dp_size)]

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Have the last publication evaluated: ``eval/DATASET`` -> mean reward. Blocks until it is.

        Raises:
            ConfigError: the run has no ``data.eval``.
            ProtocolError: nothing is published yet.
        """
        if not self.config.data.eval:
            raise ConfigError("data.eval names no dataset, so there is nothing to evaluate: add one.")
        version = self.version
        if not version:
            raise ProtocolError(f"Rollout {rollout_id} cannot be evaluated: publish the first weights before.")
        if self._evaluation is None:
            self._evaluation = Evaluation(self.config, self._file("eval.jsonl"))
            self._evaluation.start()
        self._trainer.ask_evaluation(version)
        accuracy = self._evaluation.wait(version, EVAL_TIMEOUT_S)
        return {f"eval/{dataset}": value for dataset, value in accuracy.items()}

    def save(self, rollout_id: int) -> Path:
        """The trainer's own checkpoint of ``rollout_id`` is safe on disk: commit, note the place, let groups go.

        Returns the file written. Blocks shortly.
        """
        self._commit(rollout_id)
        state = self._trainer.state_dict() | {"samples": self._samples}
        path = self._file(f"state_{rollout_id}.json")
        _write(path, json.dumps(state) + "\n")
        self._trainer.checkpointed()
        return path

    def load(self, rollout_id: int | None = None) -> int:
        """Go back to behind ``rollout_id`` (-1, or None: before the first); returns the rollout that comes next.

        The weights must be those saved with it, and ``publish`` must be the next call. Blocks shortly.

        Raises:
            ConfigError: ``save`` was never called with this rollout.
            ProtocolError: the buffer no longer has what comes after it.
        """
        last = -1 if rollout_id is None else rollout_id
        state: dict[str, Any] = {"run": self.config.run, "subscription": self._trainer.name, "batch": 0, "samples": 0}
        if last >= 0:
            path = self._file(f"state_{last}.json")
            if not path.exists():
                raise ConfigError(f"{path} is not there: rollout {last} was never saved. Load one that was.")
            state = json.loads(path.read_text(encoding="utf-8"))
        self._trainer.load_state_dict(state)
        self._open.clear()
        self._samples = int(state["samples"])
        self._next = last + 1
        return self._next

    def get_num_rollout_per_epoch(self) -> int:
        """Rollouts that one pass over the prompts makes. Blocks for one round trip.

        Raises ProtocolError before the producer has said how many prompts there are.
        """
        lines = self._trainer.source_lines()
        if lines is None:
            raise ProtocolError("The producer has not said yet how many prompts an epoch has: start it.")
        return lines // self.config.trainer.batch_groups

    # --- weights --------------------------------------------------------------------------------------------------

    def publish(self, weights: "torch.nn.Module | Mapping[str, torch.Tensor]", rollout_id: int) -> int:
        """Publish the weights that have seen everything up to ``rollout_id``; returns their version. Blocks.

        Before the first rollout, and after ``load``, that is the rollout before the next one. As in slime with
        ``--update-weights-interval``, call it after every ``trainer.batches_per_version`` rollouts.
        """
        self._commit(rollout_id)
        return self._trainer.publish(weights, step=rollout_id + 1)

    def _commit(self, rollout_id: int) -> None:
        """Everything up to ``rollout_id`` is trained. ProtocolError for a rollout that was not handed out."""
        if rollout_id >= self._next:
            raise ProtocolError(f"Rollout {rollout_id} was not generated yet; the next one is {self._next}.")
        for number in [number for number in self._open if number <= rollout_id]:
            batch = self._open[number]
            self._trainer.commit(batch)
            self._samples += len(batch.all_rows)
            del self._open[number]

    # --- parts ----------------------------------------------------------------------------------------------------

    def _share(self, batch: Batch, rank: int) -> dict[str, Any]:
        before = sum(len(one.all_rows) for one in self._open.values() if one.n < batch.n)
        share = batch.share(rank, self.dp_size)
        return train_data(share, first_index=self._samples + before, temperature=self.temperature, **self._options)

    def _file(self, name: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / name


def _write(path: Path, text: str) -> None:
    """All of it or nothing, on disk when this returns."""
    temporary = path.with_name(f".writing-{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
