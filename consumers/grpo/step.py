"""Make GRPO optimizer steps on a batch, data parallel, with exact denominators.

    per batch                   minibatches x epochs optimizer steps; with several, log π_old of the batch first (T9)
    per optimizer step          a minibatch of complete groups, divided by its counts over all ranks           (T10)
    per rank and micro-batch    loss = dp_size * sum over this rank's loss tokens / denominator of all ranks
    over ranks                  gradients are averaged by the backward pass (shards), so that dp_size cancels
    then                        clip by norm, warm-up, optimizer; a non-finite norm skips the step

The split into ranks and micro-batches therefore only affects rounding.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.config import TrainerConfig
from penstock.config.trainer import KLEstimator
from penstock.consumers.batch import layout
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import losses, process, shards
from penstock.consumers.grpo.losses import TokenLoss, side_of
from penstock.consumers.grpo.pictures import add_images
from penstock.consumers.grpo.policy import Policy
from penstock.consumers.grpo.ranks import Ranks
from penstock.consumers.grpo.totals import Figures, Totals, mean
from penstock.consumers.grpo.train_rows import Ask, postprocess
from penstock.consumers.grpo.weight_changes import WeightChanges
from penstock.errors import ConfigError, PenstockError
from penstock.names import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from penstock.records.manifest import sample_numbers

log = logging.getLogger(__name__)


def check_reference(batch: Batch) -> None:
    """Raise PayloadError if a row whose reward counts lacks reference logprobs that others have.

    Checks the rows of all ranks, so that all raise. If no row has reference logprobs, ``side_of`` raises.
    """
    if batch.has_side(REFERENCE_LOGPROBS):
        layout.check_sides(batch.all_rows, [not row.masked for row in batch.all_rows], REFERENCE_LOGPROBS, batch.n)


def distances(
    batch: Batch, micros: Iterable[dict[str, Any]], kind: KLEstimator, device: torch.device | None = None
) -> Tensor:
    """Return [3, N] float64 on ``device`` for this rank's rows of the complete batch's N rows; 0 for other rows.

    Entries are the estimate summed over generated tokens, summed over loss tokens, and 1 if the payload is lost.

    Args:
        micros: all rows of this rank on that device, with reference logprobs.
    """
    found = torch.zeros(3, len(batch.all_rows), dtype=torch.float64, device=device)
    for micro in micros:
        reference = side_of(micro, REFERENCE_LOGPROBS, "trainer.kl")
        away = losses.estimate(micro["logprobs"], reference, micro["generated"], kind).double()
        real = micro["rows"] >= 0
        sums = torch.stack([away.sum(-1), (away * micro["loss_mask"]).sum(-1)])[:, real]
        found[:2].index_add_(1, micro["rows"][real], sums)
    lost = set(batch.lost)
    found[2, [i for i, row in zip(batch.indices, batch.rows, strict=True) if row.sample in lost]] = 1
    return found


def take_off(batch: Batch, found: Tensor, weight: float) -> Figures:
    """Subtract the distance to the reference policy from each reward of a batch (T11), equally on every rank.

        every rank, its own rows ─> distances ─> sum over the ranks ─> take_off ─> advantages of complete groups

    The distance of a sample is the sum over all generated tokens of its rows, including masked, expired and removed
    tokens, because its reward is for the complete answer; a distance over loss tokens would favour answers with more
    masked tokens. A sample with a lost payload has an unknown distance and is not compared with others.

    Args:
        found: ``distances``, added up over all ranks.

    Returns:
        ``ref_kl``: mean of the estimate over the loss tokens.
    """
    drawn, of_loss, lost = found.tolist()
    numbers = sample_numbers(batch.all_rows)
    of_samples = np.bincount(numbers, drawn)[numbers].tolist()
    rewards = [row.reward - weight * one for row, one in zip(batch.all_rows, of_samples, strict=True)]
    batch.set_rewards(rewards, unknown={i for i, one in enumerate(lost) if one})
    return {"ref_kl": mean(sum(of_loss), batch.counts["loss_tokens"])}


Micro = dict[str, Any]

#: Effect of rounding between a bfloat16 engine and a trainer on a sample's mean log ratio: 0.003 to 0.008 for
#: a model of 135M; the log ratio of a token changes by several times as much (docs/trainer.md).
ROUNDING = 5e-3
#: Number of consecutive batches with a skipped step (non-finite gradient) after which the run stops.
MAX_SKIPPED = 3


class GRPO:
    """Make optimizer steps on batches. Every rank passes its share of a batch to ``step``.

    Args:
        model: a Hugging Face causal language model without dropout, its weights float32 (bfloat16 weights lose small
            steps, which is warned of); with several ranks a ``Policy`` of it that ``shards.shard`` has split.
        optimizer: optimizer of its parameters, with the learning rates after the warm-up.
        config: loss, correction, clips, aggregation, warm-up, ``minibatches``, ``epochs``, ``max_tokens``, ``dtype``.
        dp_size: number of ranks; more than 1 needs torch.distributed to be initialised (gloo on CPU, nccl on GPU).
        process_group: group of these ranks; None: the default group.
        max_samples: maximum samples per micro-batch, in addition to ``config.max_tokens``.
        reference: reference policy of ``config.kl``, which is never trained; None: batches have its logprobs
        (``rollout.reference``).
    """

    def __init__(
        self,
        model: "torch.nn.Module | Policy",
        optimizer: torch.optim.Optimizer,
        config: TrainerConfig,
        *,
        dp_size: int = 1,
        process_group: dist.ProcessGroup | None = None,
        max_samples: int | None = None,
        reference: torch.nn.Module | None = None,
    ) -> None:
        self.reference = None if reference is None else reference.eval().requires_grad_(False)
        self.model = model.model if isinstance(model, Policy) else model
        self.optimizer = optimizer
        self.config = config
        self.dp_size = dp_size
        self.process_group = process_group
        self.max_samples = max_samples
        #: Number of optimizer steps.
        self.steps = 0
        #: Number of optimizer steps skipped for a non-finite gradient.
        self.skipped = 0
        #: Consecutive latest batches with a skipped optimizer step.
        self.skipped_in_a_row: list[int] = []
        self.device = next(model.parameters()).device
        #: Function of ``hooks.postprocess``, called with the rows of each batch before its first step (``train_rows``).
        self.postprocess: Ask | None = None
        #: dtype of the forward and backward pass.
        self.compute_dtype = process.compute_dtype(config.dtype, self.device)
        #: Computes log π_θ.
        self.policy = model if isinstance(model, Policy) else Policy(model, self.compute_dtype)
        #: Whether the weights are sharded over the ranks.
        self.is_sharded = shards.is_sharded(self.model)
        if dp_size > 1 and not self.is_sharded:
            raise ConfigError("The policy of several ranks is split over them: call shards.shard(policy) first.")
        self._reference_policy = None if self.reference is None else Policy(self.reference, self.compute_dtype)
        self._changes = WeightChanges(one for one in model.parameters() if one.requires_grad)
        self._ranks = Ranks(dp_size, process_group, self.device)
        #: Additional metrics of a step.
        wanted = {"teacher_kl": config.distill, "ref_kl": config.kl if self._penalty_in("loss") else None}
        self._means = tuple(name for name, of in wanted.items() if of is not None)
        self._lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _warn_of_narrow_clips(config)

    def step(self, batch: Batch) -> Figures:
        """Make all optimizer steps on a batch; return their metrics, equal on all ranks.

        With several ranks it blocks until all have called it, and a rank that fails to read its share stops all.
        ``postprocess`` is called first, if set; its errors are raised on every rank before training. Minibatches
        without loss tokens are skipped, and a batch without loss tokens changes nothing.

        Returns:
            ``loss`` (token mean over all steps), ``optimizer_steps``, ``grad_norm`` and ``grad_norm_max`` (before the
            clip; mean and largest over the steps that were made), ``tokens`` (loss tokens of the batch), ``entropy``
            (mean of -log π_θ of generated tokens, an estimate), ``lr``; as shares of the loss tokens ``clip_frac``, its
            parts ``clip_low_frac``, ``clip_high_frac``, ``clip_dual_frac``, and ``ratio_clamped_frac`` (``losses``);
            of r = π_θ / μ ``ess``, ``k3``, ``ratio_min``, ``_p01``, ``_p50``, ``_p99`` and ``_max`` (see ``totals``);
            ``logprob_diff_mean`` and ``_max`` (|log π_old - log μ|, what staleness and the difference between engine
            and trainer make of it; without a pass for π_old, of the tokens that the first optimizer step looks at: the
            later ones are seen by another policy), ``logprob_diff_fresh_mean`` and ``_max`` (of those at staleness 0:
            the difference between engine and trainer alone, if there is one batch per version), ``weight_capped_frac``
            (share of the loss tokens whose weight ``weight_cap`` changed), ``skipped`` (1: no weight was changed),
            ``skipped_steps`` (optimizer steps of this batch whose gradient was not finite) and ``skipped_steps_total``
            (of the run); with a teacher ``teacher_kl`` (mean of log p - log teacher over the loss tokens, an estimate
            of the reverse KL per token; see ``distillation``); with a reference ``ref_kl`` (mean of the estimate, of
            π_θ in the loss, of the behaviour policy in the reward; see ``kl``). ``check_skipped`` raises if such
            batches are frequent. A mean, share, quantile or maximum over no token is None.
        """
        if not batch.counts["loss_tokens"]:
            return self._figures_of_no_step()
        taken = self._take_off_rewards(batch) if self._penalty_in("reward") else {}
        parts = self._ranks.all_or_none(lambda: self._parts(batch), f"batch {batch.n}")
        if self.config.process is not None:
            process.give_advantages(batch, parts, self.config.process, self._ranks)
        olds: Sequence[Sequence[Tensor | None]] = [[None] * len(part) for part in parts]
        if self.postprocess is not None:
            olds = self.old_logprobs(parts)
            postprocess(self.postprocess, batch, parts, olds, self._ranks)
            kept = [at for at, part in enumerate(parts) if part[0]["counts"]["loss_tokens"]]
            parts, olds = [parts[at] for at in kept], [olds[at] for at in kept]
            if not parts:
                return self._figures_of_no_step()
        elif self.config.correction == "decoupled" and len(parts) * self.config.epochs > 1:
            # With one optimizer step in all, π_old is π_θ, which that step computes anyway.
            olds = self.old_logprobs(parts)
        totals, norms, before, begun = Totals(self.device, self._means), [], self.skipped, self.steps
        for epoch in range(self.config.epochs):
            for micros, of in zip(parts, olds, strict=True):
                self.optimizer.zero_grad(set_to_none=True)
                for micro, old in zip(micros, of, strict=True):
                    self._backward(micro, old, totals, first=epoch == 0, moved=self.steps > begun)
                norms.append(self.apply(batch))
        skipped = self.skipped - before
        self._count_batch(batch.n, skipped)
        told = [norm for norm in norms if math.isfinite(norm)] or norms
        return (
            totals.reduce(self.dp_size, self.process_group, passes=self.config.epochs)
            | taken
            | {
                "grad_norm": sum(told) / len(told),
                "grad_norm_max": max(told),
                "optimizer_steps": float(len(norms) - skipped),
                "lr": float(self.optimizer.param_groups[0]["lr"]),
                "skipped": float(skipped == len(norms)),
                "skipped_steps": float(skipped),
                "skipped_steps_total": float(self.skipped),
            }
        )

    def _figures_of_no_step(self) -> Figures:
        """Return the metrics of a batch without loss tokens."""
        return Totals(self.device, self._means).reduce(1, None) | {
            "grad_norm": None,
            "grad_norm_max": None,
            "optimizer_steps": 0.0,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "skipped": 1.0,
            "skipped_steps": 0.0,
            "skipped_steps_total": float(self.skipped),
        }

    def _parts(self, batch: Batch) -> list[list[Micro]]:
        """Return the micro-batches of each optimizer step on the device, without steps that have no loss tokens."""
        parts = [
            [to_device(micro, self.device) for micro in part]
            for part in batch.minibatches(self.config.minibatches, self.config.max_tokens, self.max_samples)
            if part[0]["counts"]["loss_tokens"] or self.postprocess is not None
        ]
        add_images(batch, parts)
        return [[self._with_reference(micro) for micro in part] for part in parts]

    def check_skipped(self) -> None:
        """Raise after too many skipped batches. Call it after the commit, or the last batch would be redelivered.

        Raises:
            PenstockError: ``MAX_SKIPPED`` consecutive batches had a skipped step; names the batches.
        """
        found = self.skipped_in_a_row
        if len(found) >= MAX_SKIPPED:
            raise PenstockError(
                f"{len(found)} batches in a row had a gradient that is not finite: {', '.join(map(str, found))}; no "
                "weight was changed by their optimizer steps of that kind, and the batches are committed. Look for a "
                "reward or a logprob in them that is far off and at whether the model's weights are finite, or lower "
                "trainer.lr."
            )

    @torch.no_grad()
    def old_logprobs(self, parts: Sequence[Sequence[Micro]]) -> list[list[Tensor]]:
        """Return log π_old of every micro-batch: one pass over the complete batch before its first step (T9)."""
        return [[self.logprobs(micro) for micro in part] for part in parts]

    def logprobs(self, micro: Micro) -> Tensor:
        """Return [B, L] log π_θ of the tokens at their sampling temperature, independent of padding."""
        found: Tensor = self.policy(micro)
        return found

    def token_loss(self, micro: Micro, logprobs: Tensor, old: Tensor | None) -> TokenLoss:
        """Return [B, L] loss per token with the configured loss, correction, and KL penalty if it is in the loss.

        Args:
            old: log π_old; None if π_θ still equals π_old.
        """
        found, to_reference = self._policy_loss(micro, logprobs, old), self.config.kl
        if to_reference is None or to_reference.place != "loss":
            return found
        return found._replace(loss=found.loss + to_reference.weight * self._estimate(micro, logprobs))

    def _policy_loss(self, micro: Micro, logprobs: Tensor, old: Tensor | None) -> TokenLoss:
        config = self.config
        cap = config.weight_cap or losses.DEFAULT_CAP
        behaviour, mask = micro["logprobs"], micro["loss_mask"]
        advantages = self.advantages(micro, logprobs, old)
        if config.correction == "truncated":
            return losses.truncated(logprobs, behaviour, advantages, mask, cap)
        # Only reinforce has no clips.
        clips = (config.clip_low or 0.0, config.clip_high or 0.0)
        how: Any = {"loss": losses.RATIO_LOSSES[config.loss], "dual_clip": config.dual_clip}
        if config.correction == "bypass":
            return losses.bypass(logprobs, behaviour, advantages, mask, *clips, **how)
        old = logprobs.detach() if old is None else old
        return losses.decoupled(logprobs, old, behaviour, advantages, mask, *clips, cap, **how)

    def advantages(self, micro: Micro, logprobs: Tensor, old: Tensor | None) -> Tensor:
        """Return [B, L] advantage of each token, from its sample's reward or the teacher.

        Args: see ``token_loss``.

        Raises:
            ProtocolError: a teacher is configured, but the batch lacks its logprobs.
        """
        given: Tensor = micro["advantages"]
        if self.config.distill is None:
            return given
        return losses.distilled(given, self._from_teacher(micro, logprobs, old), self.config.distill)

    def _from_teacher(self, micro: Micro, logprobs: Tensor, old: Tensor | None) -> Tensor:
        policy = self.proximal(micro, logprobs, old)
        teacher = losses.side_of(micro, TEACHER_LOGPROBS, "trainer.distill")
        return losses.reverse_kl(policy, teacher, micro["loss_mask"])

    def proximal(self, micro: Micro, logprobs: Tensor, old: Tensor | None) -> Tensor:
        """Return [B, L] log-probabilities of the proximal policy in the correction's ratio, without gradient."""
        if self.config.correction == "bypass":
            behaviour: Tensor = micro["logprobs"]
            return behaviour
        return logprobs.detach() if old is None or self.config.correction == "truncated" else old.detach()

    def _penalty_in(self, place: str) -> bool:
        return self.config.kl is not None and self.config.kl.place == place

    def _estimate(self, micro: Micro, logprobs: Tensor) -> Tensor:
        """Return [B, L] distance of ``logprobs`` to the reference on tokens that bear loss."""
        assert self.config.kl is not None
        reference = losses.side_of(micro, REFERENCE_LOGPROBS, "trainer.kl")
        return losses.estimate(logprobs, reference, micro["loss_mask"], self.config.kl.estimator)

    @torch.no_grad()
    def _with_reference(self, micro: Micro) -> Micro:
        """Add logprobs of this process's reference to a micro-batch if the penalty is in the loss."""
        if self._reference_policy is not None and self._penalty_in("loss"):
            micro[REFERENCE_LOGPROBS] = self._reference_policy(micro)
        return micro

    @torch.no_grad()
    def _take_off_rewards(self, batch: Batch) -> Figures:
        """Subtract the penalty from the rewards of the complete batch, and compute advantages (T11).

        Collective, because each rank has only its own tokens: with several ranks, blocks until all have called it.
        """
        assert self.config.kl is not None
        if self.reference is None:
            check_reference(batch)
        micros, kind = self._micros_with_reference(batch), self.config.kl.estimator
        found = self._ranks.all_or_none(lambda: distances(batch, micros, kind, self.device), f"batch {batch.n}")
        self._ranks.add_up(found)
        return take_off(batch, found, self.config.kl.weight)

    def _micros_with_reference(self, batch: Batch) -> Iterator[Micro]:
        for micro in batch.micro_batches(self.config.max_tokens, self.max_samples):
            moved = to_device(micro, self.device)
            add_images(batch, [[moved]])
            if self._reference_policy is not None:
                moved[REFERENCE_LOGPROBS] = self._reference_policy(moved)
            yield moved

    def denominator(self, micro: Micro) -> float:
        """Return the divisor of this rank's token sum, so that averaged gradients are the global mean (T10)."""
        whole = losses.denominator(micro["counts"], self.config.aggregation, self.config.constant_tokens)
        return whole / self.dp_size

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer and counts of steps: plain tensors and numbers; of a sharded policy this rank's."""
        return {
            "model": shards.own_part(self.model.state_dict()),
            "optimizer": shards.own_part(self.optimizer.state_dict()),
            "steps": self.steps,
            "skipped": self.skipped,
            "skipped_in_a_row": list(self.skipped_in_a_row),
        }

    def load_state_dict(self, state: dict[str, Any], *others: dict[str, Any]) -> None:
        """Restore ``state_dict()`` of all ranks that saved it, in order; there may be another number of ranks now."""
        shards.load(self.model, self.optimizer, (state, *others))
        self.steps = int(state["steps"])
        self.skipped = int(state.get("skipped", 0))
        self.skipped_in_a_row = list(dict.fromkeys(int(n) for n in state.get("skipped_in_a_row", ())))

    def _backward(self, micro: Micro, old: Tensor | None, totals: Totals, *, first: bool, moved: bool) -> None:
        """
        Args:
            first: the first pass over the batch.
            moved: an optimizer step of this batch was made, so that π_θ is π_old no more.
        """
        logprobs = self.logprobs(micro)
        token_loss = self.token_loss(micro, logprobs, old)
        weights = losses.token_weights(micro["loss_mask"], self.config.aggregation, generated=micro["generated"])
        loss = (token_loss.loss * weights).sum() / self.denominator(micro)
        loss.backward()  # type: ignore[no-untyped-call]
        now = logprobs.detach()
        before = (now if old is None and not moved else old) if first else None
        totals.add(micro["loss_mask"], micro["staleness"], now, micro["logprobs"], token_loss, before)
        if self.config.distill is not None:
            totals.add_mean("teacher_kl", self._from_teacher(micro, now, old))
        if self._penalty_in("loss"):
            totals.add_mean("ref_kl", self._estimate(micro, now))

    def apply(self, batch: Batch) -> float:
        """Clip, warm up and step, or skip the step if the norm is not finite; return the norm before the clip."""
        found = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        # All ranks must make the same decision, even if rounding makes their norms differ.
        if self._ranks.any(not math.isfinite(norm)):
            self._skip(batch, norm)
            return norm
        warmth = min(1.0, (self.steps + 1) / max(1, self.config.warmup_steps))
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * warmth
        if batch.dp_rank == 0:  # a sample of its own shards
            self._changes.before_step(max(group["lr"] for group in self.optimizer.param_groups))
        self.optimizer.step()
        self._changes.after_step()
        self.steps += 1
        return norm

    def _skip(self, batch: Batch, norm: float) -> None:
        """Skip the step and count it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += 1
        if batch.dp_rank == 0:
            log.warning("batch %d: the norm of its gradient is %s; this optimizer step is skipped", batch.n, norm)

    def _count_batch(self, n: int, skipped: int) -> None:
        """Count a batch once, regardless of its number of skipped steps and deliveries."""
        if not skipped:
            self.skipped_in_a_row.clear()
        elif n not in self.skipped_in_a_row:
            self.skipped_in_a_row.append(n)


def _warn_of_narrow_clips(config: TrainerConfig) -> None:
    widest = max(config.clip_low or 0.0, config.clip_high or 0.0)
    if config.loss == "gspo" and config.correction == "bypass" and widest < ROUNDING:
        log.warning(
            "trainer.loss gspo with trainer.correction bypass clips at %g and %g what rounding between engine and "
            "trainer alone moves by about %g (see logprob_diff_fresh_mean and clip_frac): choose correction decoupled, "
            "or give wider clip_low and clip_high",
            config.clip_low,
            config.clip_high,
            ROUNDING,
        )


def to_device(micro: Micro, device: torch.device) -> Micro:
    """Move the tensors of a micro-batch to a device."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in micro.items()}
