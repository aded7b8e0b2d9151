"""A facade with the methods of slime's ``RolloutManager``, so that a slime-shaped loop calls penstock.

    manager.load(start - 1); manager.publish(model, start - 1)
    for rollout_id in range(start, num_rollout):
        shares = manager.generate(rollout_id)          # one Box of train data per data-parallel rank
        train(rollout_id, shares)
        save_model(rollout_id); manager.save(rollout_id)
        manager.publish(model, rollout_id)             # where slime calls actor_model.update_weights()

Rollout i is batch i + 1 of the subscription. A loop that generates ahead (slime's ``train_async``) calls
``generate(i + 1)`` before it has trained rollout i; nothing is committed before ``publish`` or ``save`` names it.

What slime's ``process_rollout_data`` does with a share is ``ray.get(shares[rank].inner)``: in a process that has
joined Ray (the actor that slime's loop calls) ``inner`` is a reference in its object store, elsewhere the dict itself.
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
from penstock.system.disk import fsync
from penstock.system.engine_http import check_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

#: Longest wait for an evaluation.
EVAL_TIMEOUT_S = 3600.0
#: What slime's ``onload_kv`` brings back.
KV_TAGS = ("kv_cache", "cuda_graph")


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """One rank's share of a rollout."""

    #: The train data (``penstock.consumers.adapters.slime``), or Ray's reference to it.
    inner: Any
    #: Where each of its samples comes from: job, k, versions, temperature and kind of the logprobs; fillers too.
    lineage: list[dict[str, Any]] = field(default_factory=list)
    #: slime's ``train_metadata`` of each sample, a dict or None; [] if the batch has none. Beside the train data, for
    #: slime takes a mean of every key there that it does not know.
    metadata: list[dict[str, Any] | None] = field(default_factory=list)


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
        metrics_host: where ``get_metrics_router_addr`` listens.
        options: further arguments of ``penstock.consumers.adapters.slime.train_data``.

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
        #: Rollouts that were handed out and are not committed, by id; in their order.
        self._open: dict[int, Batch] = {}
        self._metrics_host = metrics_host
        self._metrics: EngineMetrics | None = None
        #: True while health checks are left out because this process asked for it.
        self._unwatched = False
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
        if self._metrics is not None:
            self._metrics.close()
        if self._unwatched:
            self.health_monitoring_resume()
        self._trainer.close()

    @property
    def version(self) -> int:
        """Version of the last publication; 0 before the first. Blocks for one round trip."""
        return self._trainer.version

    def generate(self, rollout_id: int) -> list[Box]:
        """Train data of a rollout, a ``Box`` per rank; blocks until its batch is cut. Health checks are resumed.

        Asked again before it is committed, it returns the same rollout.

        Raises:
            ProtocolError: ``rollout_id`` is neither the next one nor one that is not committed yet.
            ConfigError: not all of it was drawn at the run's temperature, or logprobs are from before it (T6).
            HookError: ``hooks.convert`` raised, or gave what cannot be taken.
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
        """Have the last publication evaluated: ``eval/DATASET`` -> mean reward. Blocks until it is.

        Raises:
            ConfigError: the run has no ``data.eval``.
            ProtocolError: nothing is published yet.
        """
        self.health_monitoring_resume()
        found = self._trainer.evaluations.evaluate(timeout_s=self.config.data.eval_timeout_s or EVAL_TIMEOUT_S)
        return {f"eval/{dataset}": value for dataset, value in found.accuracy.items()} if found is not None else {}

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

        Raises ProtocolError before the producer has said how many prompts there are, ConfigError where a batch is so
        many samples or tokens, which tells no number of prompts.
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
        """Publish the weights that have seen everything up to ``rollout_id``; returns their version. Blocks.

        Before the first rollout, and after ``load``, that is the rollout before the next one. As in slime with
        ``--update-weights-interval``, call it after every ``trainer.batches_per_version`` rollouts.
        """
        self._commit(rollout_id)
        return self._trainer.publish(weights, step=rollout_id + 1)

    def report(self, **figures: Any) -> None:
        """Add figures to the row of a rollout, see ``Trainer.report``."""
        self._trainer.report(**figures)

    def _commit(self, rollout_id: int) -> None:
        """Everything up to ``rollout_id`` is trained. ProtocolError for a rollout that was not handed out."""
        if rollout_id >= self._next:
            raise ProtocolError(f"Rollout {rollout_id} was not generated yet; the next one is {self._next}.")
        for number in [number for number in self._open if number <= rollout_id]:
            batch = self._open[number]
            self._trainer.commit(batch)
            self._samples += len(batch.all_rows)
            del self._open[number]

    def set_train_parallel_config(self, config: "Mapping[str, Any]") -> None:
        """How the trainer is split, as slime's first rank says it: ``dp_size``, ``vpp_size``,
        ``microbatch_group_size_per_vp_stage``."""
        dp_size = int(config["dp_size"])
        if dp_size < 1:
            raise ConfigError(f"dp_size is {dp_size}; it must be at least 1.")
        self.dp_size = dp_size
        if int(config.get("vpp_size") or 1) > 1:
            self._options["multiple"] = int(config["microbatch_group_size_per_vp_stage"])

    def offload(self) -> None:
        """Every engine gives up its GPU memory; running requests return first. Blocks until all have followed.

        Engines need ``enable-memory-saver``. Raises WaitTimeout; names the worker.
        """
        self._trainer.offload_engines()

    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Engines have that memory again, all of it without ``tags``; with weights they load the newest publication."""
        self._trainer.onload_engines(tags) if tags is not None else self._trainer.onload_engines()

    def onload_weights(self) -> None:
        """Memory for weights; what is published from now on is loaded into it."""
        self._trainer.onload_engines(("weights",))

    def onload_kv(self) -> None:
        """Memory for KV cache and CUDA graphs: engines go on."""
        self._trainer.onload_engines(KV_TAGS)

    def recover(self, timeout: float = 600.0) -> None:
        """Have engines that are lost started at once, and block until all serve; before the first rollout: nothing.

        Workers start them again without being asked; this cuts their waits short. Raises WaitTimeout.
        """
        if self._next > 0:
            self._trainer.revive_engines(timeout=timeout)

    #: slime's name for it.
    recover_updatable_engines = recover

    def health_monitoring_pause(self) -> None:
        """No health check of an engine counts until ``health_monitoring_resume``, ``generate`` or ``eval``. Blocks
        until all workers follow. One whose process ends is lost all the same."""
        self._trainer.watch_engines(False)
        self._unwatched = True

    def health_monitoring_resume(self) -> None:
        """Health checks count again. Nothing where this process had not paused them."""
        if self._unwatched:
            self._trainer.watch_engines(True)
            self._unwatched = False

    def check_weights(self, action: str) -> list[dict[str, Any]]:
        """Have each engine ``snapshot``, ``reset_tensors``, ``compare`` or ``checksum`` its weights; their answers.

        Raises:
            ConfigError: no such action, or it would reset weights that are served.
            EngineError: an engine refuses, or finds a difference.
        """
        return check_weights(self._trainer.workers(), action)

    def get_metrics_router_addr(self) -> str:
        """``http://HOST:PORT``, where ``/engine_metrics`` has those of all engines, until ``dispose``."""
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
    """Raise ConfigError for hooks that change what is trained and that only the reference trainer calls."""
    for key in ("rewards", "samples"):
        if (path := getattr(config.hooks, key)) is not None:
            raise ConfigError(
                f"hooks.{key} {path} is called by the reference trainer alone, and this one makes its own advantages "
                "and masks: use hooks.convert, or remove it."
            )


def _put(share: dict[str, Any]) -> Any:
    """In Ray's object store, where this process has joined one."""
    ray = sys.modules.get("ray")
    return ray.put(share) if ray is not None and ray.is_initialized() else share


def _write(path: Path, text: str) -> None:
    """All of it or nothing, on disk when this returns."""
    temporary = path.with_name(f".writing-{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)
