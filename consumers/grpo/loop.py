"""The reference training loop: GRPO on the buffer's batches, exactly once, restartable at any time.

    restore ─> publish ─> [ next ─> step ─> commit ─> publish ─> checkpoint ] x steps ─> last evaluation
       └── all steps are trained, the last evaluation is asked for ──────────────────────────^

It ends after ``trainer.steps``, at ``trainer.stop_at_accuracy``, or with the data (``data.epochs``). Ranks agree on
what they are about to train before every step, and no rank waits for data inside a collective.
"""

import copy
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from penstock.config import Config
from penstock.consumers.batch import behaviour
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.replay import RecordingOver, Replay
from penstock.consumers.grpo import checkpoint
from penstock.consumers.grpo.hooks import TrainingHooks, check_alike
from penstock.consumers.grpo.pictures import auto_class
from penstock.consumers.grpo.policy import Policy
from penstock.consumers.grpo.process import compute_dtype, enable_tf32
from penstock.consumers.grpo.rounding_floor import RoundingFloor, engine_dtype
from penstock.consumers.grpo.shards import shard
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.grpo.totals import Figures
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.sources import Cast, State, Weights, float32_names
from penstock.errors import ConfigError, DataEnded, PenstockError, WaitTimeout
from penstock.system.disk import until_room

log = logging.getLogger(__name__)

T = TypeVar("T")
Verdict = Literal["train", "enough", "over", "stop"]

#: Delay of a stop during a wait for a batch, in seconds.
LOOK_S = 0.5


class TrainingLoop:
    """One rank of the reference trainer.

    Args:
        trainer: source of batches, and target of publications.
        learner: makes optimizer steps of batches.
        rank, size: number of this rank and of all data-parallel ranks.
    """

    def __init__(self, config: Config, trainer: Trainer | Replay, learner: GRPO, rank: int = 0, size: int = 1) -> None:
        self.config = config
        self.trainer = trainer
        self.learner = learner
        self.rank = rank
        self.size = size
        #: Batches trained.
        self.step = 0
        #: Version of the last publication, and the step it was made at.
        self.published = self.published_at = 0
        self._folder = config.run_dir / "checkpoints"
        self._stopping = False
        #: Start of the present step (monotonic); None between steps. Seconds of the last step and checkpoint.
        self._step_began: float | None = None
        self._step_s: float | None = None
        self._save_s: float | None = None
        #: True once the data has ended.
        self._over = False
        self._hooks = TrainingHooks(config)
        self._floor = RoundingFloor(engine_dtype(config))
        learner.postprocess = self._hooks.postprocess
        self._report_evaluations()

    def stop(self) -> None:
        """Stop after the present step and its checkpoint, and log how long that may take. Thread-safe."""
        self._stopping = True
        if self.rank == 0:
            log.warning("stop requested: %s; a second Ctrl-C or SIGTERM ends the trainer at once", self._left())

    def _left(self) -> str:
        """Return what remains before the trainer ends, with the durations of the last step and checkpoint."""
        save = f"the checkpoint is written ({_about(self._save_s)})"
        if self._step_began is None:
            return save
        ran_s = time.monotonic() - self._step_began
        return f"step {self.step + 1} has run for {ran_s:.0f} s and is finished ({_about(self._step_s)}), then {save}"

    def run(self) -> int:
        """Train all steps. Return 0 when they are done or the data has ended, 130 when stopped before. Blocks."""
        with self.trainer:
            self.trainer.steps.total_steps = self.config.trainer.steps
            self._restore()
            over = self._is_over()
            if not over:
                self._publish()
            while not over and self.step < self.config.trainer.steps:
                batch = self._next()
                if batch is None:
                    break
                self._step_began = time.monotonic()
                self.train(batch)
                self._step_s, self._step_began = time.monotonic() - self._step_began, None
            if self._over and self.step > self.published_at:
                self._publish(tick=self.config.debug.rollout_only)  # the data ended between two versions
            done = not self._stopping
            if not over:
                self._save()
            done = done and self._last_evaluation()
            self.trainer.steps.interrupted = not done
        return 0 if done else 130

    def _next(self) -> Batch | None:
        """Return the next batch, agreed on by all ranks; None to stop."""
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
        return wanted is not None and self.trainer.evaluations.has_reached(wanted)

    def _agree(self, verdict: Verdict, batch: Batch | None) -> bool:
        """Check that every rank is about to train the same batch (T14)."""
        verdicts = {verdict} if self.size == 1 else set(self.trainer.agree(batch, step=self.step, word=verdict))
        self._stopping = self._stopping or "stop" in verdicts
        return verdicts == {"train"}

    def train(self, batch: Batch) -> None:
        """Run one step: train, commit, publish and save when due, report. Blocks."""
        config, trainer = self.config.trainer, self.trainer
        rollout_only = self.config.debug.rollout_only
        self._prepare(batch)
        metrics: Figures = {} if rollout_only else self.learner.step(batch)
        if not rollout_only and self.rank == 0:
            self._floor.measure(self.learner, batch)
            metrics["logprob_diff_floor"] = self._floor.value
            self._floor.compare(metrics)
        trainer.commit(batch)
        self.step += 1
        if self.step % config.batches_per_version == 0:
            self._publish(tick=rollout_only)
        if self.rank == 0:
            trainer.report(**metrics)
        if self.step % config.checkpoint_every == 0:
            self._save()
        trainer.steps.finish(lambda row: self._hooks.trained(self.step, row, batch, row["wait_s"]))
        self._hooks.tell_evaluations()
        if not rollout_only:
            self._check_skipped()

    def _prepare(self, batch: Batch) -> None:
        """Call the hooks, and check that they returned the same on every rank (T14). Raises HookError."""
        digest = self._hooks.prepare(batch)
        if digest and self.size > 1:
            check_alike(self.trainer.agree(batch, step=self.step, word=digest))

    def _check_skipped(self) -> None:
        """Stop the run if many successive batches had gradients that are not finite, after committing them.

        The checkpoint keeps them from being delivered again at the next start, unlike uncommitted batches.
        """
        try:
            self.learner.check_skipped()
        except PenstockError:
            if self.step % self.config.trainer.checkpoint_every:
                self._save()
            # The first rank that exits ends the others: none may before rank 0 has written.
            self._agree("stop", None)
            raise

    def _publish(self, *, tick: bool = False) -> None:
        """Publish the weights; ``tick``: those of the last publication."""
        trainer, step = self.trainer, self.step
        self.published = trainer.tick(step=step) if tick else trainer.publish(self._weights(), step=step)
        self.published_at = step

    def _weights(self) -> Weights:
        """Return the weights to publish, in the type of the engines if the configuration names one."""
        model, name = self.learner.model, self.config.model.dtype
        return model if name == "auto" else Cast(State(model), getattr(torch, name), float32_names(model, name))

    def _restore(self) -> None:
        """Load the newest checkpoint; without one, batches are delivered again from the first."""
        found = checkpoint.latest(self._folder, fits=self.trainer.fits)
        if found is None:
            self.trainer.load_state_dict({"run": self.config.run, "subscription": self.trainer.name, "batch": 0})
            return
        self.learner.load_state_dict(*found.learner)
        found.restore_rng()
        self.step = found.step
        self.trainer.load_state_dict(found.trainer)
        log.info("restored step %d from %s", found.step, found.path)

    def _save(self) -> None:
        began = time.monotonic()
        state, learner = self.trainer.state_dict(), self.learner.state_dict()
        name, names = "", [""]
        if self.rank:
            name = self._until_room(
                partial(checkpoint.save_shard, self._folder, step=self.step, rank=self.rank, learner=learner)
            )
        if self.size > 1:
            names = self.trainer.agree(None, word=name)
        if self.rank == 0:
            self._until_room(
                partial(checkpoint.save, self._folder, step=self.step, learner=learner, trainer=state, shards=names[1:])
            )
        self.trainer.checkpointed()
        self._save_s = time.monotonic() - began

    def _until_room(self, work: Callable[[], T]) -> T:
        return until_room(work, blocked_on=self.trainer.tell_wait, stopped=lambda: self._stopping)

    def _is_over(self) -> bool:
        """Return whether an earlier start has trained all steps, so that at most the last evaluation remains.

        Then its version is awaited: another publication would have to be evaluated anew. Every rank reads the same,
        because nothing is published in between.
        """
        if not self.config.data.eval:
            return False
        self.published = self.trainer.asked_last(self._end())
        return self.published > 0

    def _end(self) -> str:
        """Return the step and rule of the end of training: an earlier end does not count if more steps follow."""
        epochs = self.config.data.epochs
        passes = "" if epochs is None else f", {epochs} passes"
        return f"{self.step} of {self.config.trainer.steps}, accuracy {self.config.trainer.stop_at_accuracy}{passes}"

    def _report_evaluations(self) -> None:
        """Report evaluations that finish in this start to the hooks; those of an earlier start were reported then."""
        began_s = time.time()

        def report(rows: list[dict[str, Any]]) -> None:
            self._hooks.note_evaluation(row for row in rows if float(row.get("time_s", 0.0)) >= began_s)

        self.trainer.evaluations.listeners.append(report)

    def _last_evaluation(self) -> bool:
        """Have the last version evaluated. Blocks until it is; return False when stopped before."""
        if self.rank or not self.config.data.eval or not isinstance(self.trainer, Trainer):
            return True
        found = self.trainer.evaluations.evaluate(self.published, end=self._end(), stopped=lambda: self._stopping)
        if found is None:
            return False
        self._hooks.tell_evaluations()
        log.info(
            "evaluated version %d: %s", found.version, ", ".join(f"{k} {v:.3f}" for k, v in found.accuracy.items())
        )
        return True


def _about(seconds: float | None) -> str:
    return "it is the first, so its time is unknown" if seconds is None else f"the last one took {seconds:.0f} s"


def make_loop(config: Config, rank: int, size: int) -> TrainingLoop:
    """Make the loop of one rank, by the run's configuration. Blocks while the model is loaded and for Redis."""
    if not config.debug.rollout_only:
        behaviour.check_config(config)
    return TrainingLoop(config, source_of(config, rank, size), learner_of(config, size), rank, size)


def source_of(config: Config, rank: int, size: int) -> Trainer | Replay:
    """Open the run's batches, or those of a recording."""
    if config.debug.load_batches is not None:
        return Replay(config.debug.load_batches, config, dp_rank=rank, dp_size=size, records=True)
    return Trainer(config, dp_rank=rank, dp_size=size)


def learner_of(config: Config, size: int) -> GRPO:
    """Load the model with float32 weights, split over several ranks. Blocks, for other ranks too.

    Raises ConfigError if ``model.path`` holds none.
    """
    torch.manual_seed(config.seed)
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    enable_tf32(config.trainer.dtype, torch.device(config.trainer.device))
    try:
        # Master weights, whatever type the engines use: a step of RL is too small for bfloat16.
        model: Any = auto_class(config.model.path).from_pretrained(
            config.model.path, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path {config.model.path} holds no model that can be loaded: {exc}") from exc
    device = torch.device(config.trainer.device)
    # Before a checkpoint is restored into it: the reference is the initial policy, at every start.
    own = config.trainer.kl is not None and config.rollout.reference is None
    reference = copy.deepcopy(model).to(device) if own else None
    policy = Policy(model, compute_dtype(config.trainer.dtype, device))
    if size > 1:
        shard(policy, device)
    else:
        policy.to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.trainer.lr, fused=True)
    return GRPO(policy, optimizer, config.trainer, dp_size=size, reference=reference)
