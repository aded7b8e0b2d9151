"""The reference trainer: GRPO on what the buffer cuts, exactly once, restartable at any instant.

    restore ─> publish ─> [ next ─> step ─> commit ─> publish ─> checkpoint ] x steps ─> last evaluation
       └── all steps are trained, the last evaluation is asked for ──────────────────────────^

It ends after ``trainer.steps``, at ``trainer.stop_at_accuracy``, or with the data (``data.epochs``).

One process per rank; rank 0 owns the subscription, publishes, checkpoints and reports. Ranks agree on what they are
about to train before every step, and no rank waits for data inside a collective.
"""

import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import multiprocessing

from consumers.batch import behaviour
from consumers.batch.batch import Batch
from consumers.batch.ledger import Ledger
from consumers.batch.replay import RecordingOver, Replay
from consumers.grpo import checkpoint
from consumers.grpo.evaluate import Evaluation
from consumers.grpo.step import GRPO
from consumers.trainer import Trainer
from consumers.weights.transports.sender import sender_of
from penstock.config import Config
from penstock.config.out_of_memory import trainer_error
from penstock.errors import ConfigError, DataEnded, PenstockError, WaitTimeout
from penstock.logs import set_up
from penstock.system.disk import append, until_room
from penstock.system.processes import EXIT_CONFIG, die_with_parent

log = logging.getLogger(__name__)

Verdict = Literal["train", "enough", "over", "stop"]

#: How late a stop is seen while waiting for a batch.
LOOK_S = 0.5


class Reference:
    """One rank of the reference trainer."""

    def __init__(self, config: Config, rank: int, size: int) -> None:
        self.config = config
        self.rank = rank
        self.size = size
        if not config.debug.rollout_only:
            behaviour.check_config(config)
        self.trainer = _source(config, rank, size)
        self.learner = _learner(config, size)
        self.step = 0
        self._ledger = Ledger()
        self.evaluation: Evaluation | None = None
        self._stopping = False
        self._folder = config.run_dir / "checkpoints"
        self._published = 0
        #: Step of the last publication.
        self._published_at = 0
        #: True once the data has ended.
        self._over = False

    def stop(self) -> None:
        """Leave after the present step; safe in a signal handler."""
        self._stopping = True

    def run(self) -> int:
        """Train all steps. Returns 0 when they are done or the data has ended, 130 when stopped before. Blocks."""
        with self.trainer:
            self._restore()
            over = self._is_over()
            if not over:
                self._publish()
            if self.rank == 0 and self.config.data.eval and isinstance(self.trainer, Trainer):
                self.evaluation = Evaluation(self.config, self._file("eval.jsonl"))
                self.evaluation.start()
            try:
                while not over and self.step < self.config.trainer.steps:
                    batch = self._next()
                    if batch is None:
                        break
                    self._train(batch)
                if self._over and self.step > self._published_at:
                    self._publish(tick=self.config.debug.rollout_only)  # the data ended between two versions
                done = not self._stopping
                if not over:
                    self._save()
                done = done and self._last_evaluation()
            finally:
                if self.evaluation is not None:
                    self.evaluation.stop()
        return 0 if done else 130

    # --- one step -------------------------------------------------------------------------------------------------

    def _next(self) -> Batch | None:
        """The next batch, agreed on by all ranks; None to stop."""
        batch: Batch | None = None
        while batch is None and not self._stopping and not self._is_enough():
            try:
                batch = self.trainer.next(timeout=LOOK_S)
            except WaitTimeout:
                continue
            except DataEnded as exc:
                log.info("%s", exc)
                self._over = True
                break
            except RecordingOver as exc:
                log.info("%s", exc)
                return None
        verdict: Verdict = "over" if self._over else "train"
        if self._stopping or self._is_enough():
            verdict = "stop" if self._stopping else "enough"
        return batch if self._agree(verdict, batch) else None

    def _is_enough(self) -> bool:
        wanted = self.config.trainer.stop_at_accuracy
        return wanted is not None and self.evaluation is not None and self.evaluation.has_reached(wanted)

    def _agree(self, verdict: Verdict, batch: Batch | None) -> bool:
        """Every rank must be about to train the same batch, or none does (T14)."""
        verdicts = {verdict} if self.size == 1 else set(self.trainer.agree(batch, step=self.step, word=verdict))
        self._stopping = self._stopping or "stop" in verdicts
        return verdicts == {"train"}

    def _train(self, batch: Batch) -> None:
        config, trainer = self.config.trainer, self.trainer
        began = time.monotonic()
        rollout_only = self.config.debug.rollout_only
        metrics = {} if rollout_only else self.learner.step(batch)
        trained = time.monotonic()
        trainer.commit(batch)
        self.step += 1
        if self.step % config.batches_per_version == 0:
            self._publish(tick=rollout_only)
        published = time.monotonic()
        if self.step % config.checkpoint_every == 0:
            self._save()
        if self.rank == 0:
            self._report(batch, metrics, trained - began, published - trained)
        if not rollout_only:
            self._check_skipped()

    def _check_skipped(self) -> None:
        """Stop the run where gradients that are not finite have become the rule, behind the batches that had them.

        The checkpoint keeps them from coming again at the next start: those behind the last checkpoint do.
        """
        try:
            self.learner.check_skipped()
        except PenstockError:
            if self.step % self.config.trainer.checkpoint_every:
                self._save()
            # The first rank that ends has the others ended: none does before rank 0 has written.
            self._agree("stop", None)
            raise

    def _publish(self, *, tick: bool = False) -> None:
        """Publish the weights; ``tick``: those of the last publication."""
        trainer, step = self.trainer, self.step
        self._published = trainer.tick(step=step) if tick else trainer.publish(self.learner.model, step=step)
        self._published_at = step

    def _report(self, batch: Batch, metrics: dict[str, float], step_s: float, publish_s: float) -> None:
        manifest, rows = batch.manifest, batch.all_rows
        row: dict[str, Any] = {
            "step": self.step,
            "version": manifest.train_version,
            "batch": batch.n,
            "reward_mean": sum(one.reward for one in rows) / len(rows) if rows else 0.0,
            "staleness_max": manifest.staleness_max,
            "staleness_mean": manifest.staleness_mean,
            "samples": manifest.num_samples,
            "tokens": sum(one.length for one in rows),
            "generated_tokens": sum(one.num_generated for one in rows),
            "loss_tokens": manifest.num_loss_tokens,
            "wait_s": self.trainer.take_wait_s(),
            "step_s": step_s,
            "publish_s": publish_s,
            "time_s": time.time(),
            **metrics,
            **self._ledger.metrics(manifest),
        }
        text = json.dumps({key: _told(value) for key, value in row.items()}) + "\n"
        self._until_room(partial(append, self._file("steps.jsonl"), text))
        shown = {name: row[name] for name in ("step", "version", "reward_mean", "staleness_max", "staleness_mean")}
        total = row["wait_s"] + step_s + publish_s
        self.trainer.report(**shown, wait_share=row["wait_s"] / total if total else 0.0)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Take up the newest checkpoint; without one, whatever was cut comes again from the first batch."""
        fits = self.trainer.fits if isinstance(self.trainer, Trainer) else lambda state: True
        found = checkpoint.latest(self._folder, self.config.trainer.device, fits=fits)
        if found is None:
            self.trainer.load_state_dict({"run": self.config.run, "subscription": self.trainer.name, "batch": 0})
            return
        self.learner.load_state_dict(found.learner)
        found.restore_rng()
        self.step = found.step
        self.trainer.load_state_dict(found.trainer)
        log.info("restored step %d from %s", found.step, found.path)

    def _save(self) -> None:
        state = self.trainer.state_dict()
        if self.rank == 0:
            learner = self.learner.state_dict()
            self._until_room(partial(checkpoint.save, self._folder, step=self.step, learner=learner, trainer=state))
        self.trainer.checkpointed()

    def _until_room(self, work: Callable[[], object]) -> None:
        until_room(work, tell=self.trainer.tell_wait, stopped=lambda: self._stopping)

    def _is_over(self) -> bool:
        """Whether an earlier start has trained all there is to train, and nothing but the last evaluation may be left.

        Its version is the one that is waited for, then: another publication would have to be evaluated anew. Every rank
        reads the same, because nothing is published in between.
        """
        if not self.config.data.eval or not isinstance(self.trainer, Trainer):
            return False
        self._published = self.trainer.asked_last(self._end())
        return self._published > 0

    def _end(self) -> str:
        """Where training ended, and by which rule: with more steps to train, an earlier end is none."""
        epochs = self.config.data.epochs
        passes = "" if epochs is None else f", {epochs} passes"
        return f"{self.step} of {self.config.trainer.steps}, accuracy {self.config.trainer.stop_at_accuracy}{passes}"

    def _last_evaluation(self) -> bool:
        """Have the last version evaluated. Blocks until it is; False when stopped before."""
        if self.evaluation is None or not isinstance(self.trainer, Trainer):
            return True
        self.trainer.ask_evaluation(self._published, self._end())
        timeout_s = self.config.data.eval_timeout_s
        accuracy = self.evaluation.wait(self._published, timeout_s, stopped=lambda: self._stopping)
        if accuracy is None:
            return False
        log.info("version %d: %s", self._published, ", ".join(f"{k} {v:.3f}" for k, v in accuracy.items()))
        return True

    def _file(self, name: str) -> Path:
        self.config.run_dir.mkdir(parents=True, exist_ok=True)
        return self.config.run_dir / name


def _told(value: Any) -> Any:
    """JSON has no number that is not finite; a skipped step's norm is null there."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _source(config: Config, rank: int, size: int) -> Trainer | Replay:
    """The run's batches, or those of a recording."""
    if config.debug.load_batches is not None:
        return Trainer.replay(config.debug.load_batches, config, dp_rank=rank, dp_size=size)
    return Trainer(config, dp_rank=rank, dp_size=size)


def _learner(config: Config, size: int) -> GRPO:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    dtype = torch.float32 if config.model.dtype == "auto" else getattr(torch, config.model.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"model.dtype {config.model.dtype!r} is not a torch dtype: use float32 or bfloat16.")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path {config.model.path} holds no model that can be loaded: {exc}") from exc
    model.to(config.trainer.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.trainer.lr)
    return GRPO(model, optimizer, config.trainer, dp_size=size)


def _rank_main(rank: int, config: Config, store: str) -> None:
    die_with_parent()
    set_up(f"trainer/{rank}")
    size = config.trainer.dp_size
    backend = "gloo" if config.trainer.device == "cpu" else "nccl"
    if config.trainer.device == "cuda":
        # "cuda" names the present device: one for each rank, or all would share the first.
        torch.cuda.set_device(rank)
    if (sender := sender_of(config.trainer.transport)) is not None:
        sender.set_up()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        code = _run_rank(config, rank, size)
    except PenstockError as exc:
        # A rank is a process of its own: nobody above it says the sentence.
        log.error("%s", exc)
        code = EXIT_CONFIG if isinstance(exc, ConfigError) else 1
    finally:
        dist.destroy_process_group()
    sys.exit(code)


def _run_rank(config: Config, rank: int, size: int) -> int:
    try:
        reference = Reference(config, rank, size)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: reference.stop())
        return reference.run()
    except (RuntimeError, MemoryError) as exc:
        if said := trainer_error(exc, config.trainer):
            raise said from exc
        raise


def main(config: Config) -> int:
    """Train. Blocks; returns 0 when all steps are done or the data has ended."""
    size = config.trainer.dp_size
    if size == 1:
        return _run_rank(config, 0, 1)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=_rank_main, args=(rank, config, store)) for rank in range(size)]
        for rank in ranks:
            rank.start()

        def stop(*_: object) -> None:
            for rank in ranks:
                if rank.is_alive():
                    rank.terminate()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        return _join(ranks)


def _join(ranks: list[Any]) -> int:
    """Wait for all ranks; one that fails ends the others, which would wait for it for ever."""
    while any(rank.is_alive() for rank in ranks):
        for rank in ranks:
            rank.join(0.2)
            if rank.exitcode not in (None, 0):
                for other in ranks:
                    other.kill()
                log.error("rank %s ended with %s; the others were stopped", rank.name, rank.exitcode)
                return int(rank.exitcode) if rank.exitcode and rank.exitcode > 0 else 1
    return max(int(rank.exitcode or 0) for rank in ranks)
