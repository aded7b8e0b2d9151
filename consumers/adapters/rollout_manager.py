"""An equivalent of slime's ``RolloutManager``, for loops written for slime.

    manager.load(start - 1); manager.publish(model, start - 1)
    for rollout_id in range(start, num_rollout):
        shares = manager.generate(rollout_id)          # one Box of train data per data-parallel rank
        train(rollout_id, shares)
        save_model(rollout_id); manager.save(rollout_id)
        manager.publish(model, rollout_id)             # where slime calls actor_model.update_weights()

Rollout i is batch i + 1 of the subscription. A loop that generates ahead (slime's ``train_async``) calls
``generate(i + 1)`` before it has trained rollout i; a rollout is committed when ``publish`` or ``save`` names it.

slime's ``process_rollout_data`` reads a share by ``ray.get(shares[rank].inner)``: in a process connected to Ray (the
actor that slime's loop calls) ``inner`` is an object reference, elsewhere the dict itself.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.config import Config
from penstock.consumers.adapters.converting import Converter
from penstock.consumers.adapters.engine_metrics import EngineMetrics
from penstock.consumers.adapters.slime import lineage, train_shares
from penstock.consumers.adapters.slime_columns import METADATA
from penstock.consumers.batch import behaviour
from penstock.consumers.batch.batch import Batch
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol.engine_http import check_weights
from penstock.system.disk import fsync

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

#: Longest wait for an evaluation.
EVAL_TIMEOUT_S = 3600.0
#: Tags that slime's ``onload_kv`` restores.
KV_TAGS = ("kv_cache", "cuda_graph")


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """One rank's share of a rollout."""

    #: The train data (``penstock.consumers.adapters.slime``), or a Ray reference to it.
    inner: Any
    #: Origin of each sample, fillers included: job, k, versions, temperature and kind of the logprobs.
    lineage: list[dict[str, Any]] = field(default_factory=list)
    #: slime's ``train_metadata`` of each sample, a dict or None; [] if the batch has none. Kept apart from the train
    #: data, because slime averages every key that it does not know.
    metadata: list[dict[str, Any] | None] = field(default_factory=list)


class RolloutManager:
    """Rollouts of a run for a slime-shaped loop; one per run, on the driver.

    Args:
        config, run, name: as of ``Trainer``.
        dp_size: number of data-parallel ranks; ``generate`` returns a share for each. This process reads the payloads
            of all ranks, as in slime.
        folder: where ``save`` writes; None: the run's ``rollout`` folder.
        prefetch: batches cut and fetched ahead, see ``Trainer``.
        temperature: temperature by which slime's trainer divides logits, ``--rollout-temperature``; None: that of the
            run's ``rollout.sampling``. Any other is rejected here, and batches of another by ``generate``.
        metrics_host: address at which ``get_metrics_router_addr`` listens.
        options: further arguments of ``penstock.consumers.adapters.slime.train_data``.

    The constructor acquires the subscription; ``dispose`` (or the end of a ``with`` block) releases it. Not
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
        metrics_host: str = "127.0.0.1",
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
        _check_hooks(self.config)
        if (path := self.config.hooks.convert) is not None:
            self._options["convert"] = Converter(self.config, path)
        self._folder = folder or self.config.run_dir / "rollout"
        #: Uncommitted rollouts handed out, by id, in order.
        self._open: dict[int, Batch] = {}
        self._metrics_host = metrics_host
        self._metrics: EngineMetrics | None = None
        #: True while health checks are paused by this process.
        self._unwatched = False
        self._trainer.__enter__()
        self._next = self._trainer.position
        #: Samples of all rollouts handed out before ``_next``, if this process knows.
        self._samples = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.dispose()

    def dispose(self) -> None:
        """Release the subscription; uncommitted rollouts are generated again. Blocks shortly."""
        if self._metrics is not None:
            self._metrics.close()
        if self._unwatched:
            self.health_monitoring_resume()
        self._trainer.close()

    @property
    def version(self) -> int:
        """Return the version of the last publication; 0 before the first. Blocks for one round trip."""
        return self._trainer.version

    def generate(self, rollout_id: int) -> list[Box]:
        """Return a rollout's train data, a ``Box`` per rank; blocks until its batch is cut. Resumes health checks.

        Called again before the commit, it returns the same rollout.

        Raises:
            ProtocolError: ``rollout_id`` is neither the next one nor an uncommitted one.
            ConfigError: a sample has another temperature than the run's, or logprobs from before it was applied (T6).
            HookError: ``hooks.convert`` raised, or returned an invalid value.
        """
        self.health_monitoring_resume()
        batch = self._open.get(rollout_id)
        if batch is None:
            if rollout_id != self._next:
                raise ProtocolError(
                    f"Rollout {rollout_id} was asked for, but the next one of subscription {self._trainer.name!r} is "
                    f"{self._next}: call load() with the rollout that the weights have last seen, or begin there."
                )
            batch = self._open[rollout_id] = self._trainer.next()
            self._next = rollout_id + 1
        return self._shares(batch)

    def eval(self, rollout_id: int) -> dict[str, float]:
        """Evaluate the last publication; return ``eval/DATASET`` -> mean reward. Blocks until all is evaluated.

        Raises:
            ConfigError: the run has no ``data.eval``.
            ProtocolError: nothing is published yet.
        """
        self.health_monitoring_resume()
        found = self._trainer.evaluations.evaluate(timeout_s=EVAL_TIMEOUT_S)
        return {f"eval/{dataset}": value for dataset, value in found.accuracy.items()} if found is not None else {}

    def save(self, rollout_id: int) -> Path:
        """Commit and write down the position once the trainer's own checkpoint of ``rollout_id`` is on disk.

        Returns the file written. Groups behind it are retired. Blocks shortly.
        """
        self._commit(rollout_id)
        state = self._trainer.state_dict() | {"samples": self._samples}
        path = self._file(f"state_{rollout_id}.json")
        _write(path, json.dumps(state) + "\n")
        self._trainer.checkpointed()
        return path

    def load(self, rollout_id: int | None = None) -> int:
        """Rewind to the state after ``rollout_id`` (-1 or None: the beginning); return the next rollout's id.

        The weights must be those saved with it, and ``publish`` must be the next call. Blocks shortly.

        Raises:
            ConfigError: ``save`` was never called with this rollout.
            ProtocolError: the buffer no longer holds the groups that follow it.
        """
        last = -1 if rollout_id is None else rollout_id
        state: dict[str, Any] = {"run": self.config.run, "subscription": self._trainer.name, "batch": 0, "samples": 0}
        if last >= 0:
            path = self._file(f"state_{last}.json")
            if not path.exists():
                raise ConfigError(f"{path} does not exist: rollout {last} was never saved. Load a saved one.")
            state = json.loads(path.read_text(encoding="utf-8"))
        self._trainer.load_state_dict(state)
        self._open.clear()
        self._samples = int(state["samples"])
        self._next = last + 1
        return self._next

    def get_num_rollout_per_epoch(self) -> int:
        """Return the number of rollouts in one pass over the prompts. Blocks for one round trip.

        Raises ProtocolError before the producer has reported the number of prompts, ConfigError if batches are sized in
        samples or tokens, which determines no number of prompts.
        """
        groups = self.config.trainer.groups_per_batch
        if not groups:
            unit = self.config.trainer.subscription.unit
            raise ConfigError(f"How many rollouts an epoch makes is not known for batches in {unit}: use groups.")
        lines = self._trainer.source_lines()
        if lines is None:
            raise ProtocolError("The producer has not said yet how many prompts an epoch has: start it.")
        return lines // groups

    def publish(self, weights: "torch.nn.Module | Mapping[str, torch.Tensor]", rollout_id: int) -> int:
        """Publish weights trained on all rollouts up to ``rollout_id``; return their version. Blocks.

        Before the first rollout, and after ``load``, that is the one before the next. As in slime with
        ``--update-weights-interval``, call it after every ``trainer.batches_per_version`` rollouts.
        """
        self._commit(rollout_id)
        return self._trainer.publish(weights, step=rollout_id + 1)

    def report(self, **figures: Any) -> None:
        """Add metrics to the row of a rollout, see ``Trainer.report``."""
        self._trainer.report(**figures)

    def _commit(self, rollout_id: int) -> None:
        """Commit all rollouts up to ``rollout_id``. Raises ProtocolError for one that was not handed out."""
        if rollout_id >= self._next:
            raise ProtocolError(f"Rollout {rollout_id} was not generated yet; the next one is {self._next}.")
        for number in [number for number in self._open if number <= rollout_id]:
            batch = self._open[number]
            self._trainer.commit(batch)
            self._samples += len(batch.all_rows)
            del self._open[number]

    def set_train_parallel_config(self, config: "Mapping[str, Any]") -> None:
        """Set the trainer's parallelism, as reported by slime's first rank: ``dp_size``, ``vpp_size``,
        ``microbatch_group_size_per_vp_stage``."""
        dp_size = int(config["dp_size"])
        if dp_size < 1:
            raise ConfigError(f"dp_size is {dp_size}; it must be at least 1.")
        self.dp_size = dp_size
        if int(config.get("vpp_size") or 1) > 1:
            self._options["multiple"] = int(config["microbatch_group_size_per_vp_stage"])

    def offload(self) -> None:
        """Release the GPU memory of every engine, after running requests have returned. Blocks until all have done so.

        Engines need ``enable-memory-saver``. Raises WaitTimeout, which names the worker.
        """
        self._trainer.offload_engines()

    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Restore engine memory, all of it without ``tags``; with weights, engines load the newest publication."""
        self._trainer.onload_engines(tags) if tags is not None else self._trainer.onload_engines()

    def onload_weights(self) -> None:
        """Restore memory for weights; publications from now on are loaded into it."""
        self._trainer.onload_engines(("weights",))

    def onload_kv(self) -> None:
        """Restore memory for KV cache and CUDA graphs, and resume the engines."""
        self._trainer.onload_engines(KV_TAGS)

    def recover(self, timeout: float = 600.0) -> None:
        """Restart lost engines at once, and block until all serve; before the first rollout, do nothing.

        Workers restart them anyway; this skips their backoff. Raises WaitTimeout.
        """
        if self._next > 0:
            self._trainer.revive_engines(timeout=timeout)

    #: slime's name for it.
    recover_updatable_engines = recover

    def health_monitoring_pause(self) -> None:
        """Ignore failed health checks until ``health_monitoring_resume``, ``generate`` or ``eval``. Blocks until all
        workers have applied it. An engine whose process exits is lost all the same."""
        self._trainer.watch_engines(False)
        self._unwatched = True

    def health_monitoring_resume(self) -> None:
        """Resume health checks. Does nothing unless this process has paused them."""
        if self._unwatched:
            self._trainer.watch_engines(True)
            self._unwatched = False

    def check_weights(self, action: str) -> list[dict[str, Any]]:
        """Have each engine ``snapshot``, ``reset_tensors``, ``compare`` or ``checksum`` its weights; return answers.

        Raises:
            ConfigError: no such action, or it would reset weights that are being served.
            EngineError: an engine refuses, or finds a difference.
        """
        return check_weights(self._trainer.workers(), action)

    def get_metrics_router_addr(self) -> str:
        """Return ``http://HOST:PORT``; ``/engine_metrics`` there serves all engines' metrics until ``dispose``."""
        if self._metrics is None:
            self._metrics = EngineMetrics(self._trainer.workers, self._metrics_host)
        return self._metrics.address

    def _shares(self, batch: Batch) -> list[Box]:
        before = sum(len(one.all_rows) for one in self._open.values() if one.n < batch.n)
        made: dict[str, Any] = {"first_index": self._samples + before, "temperature": self.temperature}
        shares = train_shares(batch, self.dp_size, **self._options | made)
        metadata = [share.pop(METADATA, []) for share in shares]
        boxes = zip(shares, metadata, strict=True)
        return [Box(_put(share), lineage(batch, share), more) for share, more in boxes]

    def _file(self, name: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / name


def _check_hooks(config: Config) -> None:
    """Raise ConfigError for hooks that change the training data and are called by the reference trainer only."""
    for key in ("rewards", "samples"):
        if (path := getattr(config.hooks, key)) is not None:
            raise ConfigError(
                f"hooks.{key} {path} is called by the reference trainer alone, and this one makes its own advantages "
                "and masks: use hooks.convert, or remove it."
            )


def _put(share: dict[str, Any]) -> Any:
    """Put a share into Ray's object store, if this process is connected to Ray."""
    ray = sys.modules.get("ray")
    return ray.put(share) if ray is not None and ray.is_initialized() else share


def _write(path: Path, text: str) -> None:
    """Write a file atomically and durably."""
    temporary = path.with_name(f".writing-{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)
