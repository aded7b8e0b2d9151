"""``hooks.postprocess``: call a user function with each rank's samples before they are trained.

log π_old ─> rows of this rank ─> function ─> loss removed, advantages of tokens ─> denominators of all ranks (T10)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.ranks import Ranks
from penstock.errors import HookError
from penstock.hooks.signatures import Hook
from penstock.records.job import JobFailure
from penstock.records.manifest import Row

Micro = dict[str, Any]


@dataclass(slots=True, eq=False)
class TrainRow:
    """One sample of this rank; arrays are [L], prompt included. Only the fields marked below may be changed."""

    row: Row
    #: Index into ``batch.all_rows``.
    index: int
    tokens: NDArray[np.int64]
    generated: NDArray[np.bool_]
    #: Behaviour log-probability of each token, 0 for tokens not generated; and that of the present policy.
    logprobs: NDArray[np.float32]
    old_logprobs: NDArray[np.float32]
    #: -1 for tokens not generated.
    versions: NDArray[np.int32]
    staleness: NDArray[np.int32]
    #: May be cleared, but not set.
    loss_mask: NDArray[np.bool_]
    #: May be set: finite numbers, of tokens that bear loss.
    advantages: NDArray[np.float32]

    @property
    def prompt_length(self) -> int:
        return min(self.row.prompt_length, len(self.tokens))


#: Calls the function, which modifies the rows.
Ask = Callable[[Batch, list[TrainRow]], None]


def rows_of_micros(batch: Batch, parts: Sequence[Sequence[Micro]], olds: Sequence[Sequence[Tensor]]) -> list[TrainRow]:
    """Copy this rank's rows in the order of ``batch.rows``, without fillers; a lost one is a token without loss.

    Args:
        parts: all micro-batches of the batch, padded; ``olds`` [B, L] log π_old of each.
    """
    found: dict[int, TrainRow] = {}
    for micro, old in _pairs(parts, olds):
        for at, index in enumerate(micro["rows"].tolist()):
            if index < 0:
                continue
            length = int(micro["lengths"][at])
            of = {
                name: micro[name][at, :length].cpu().numpy().copy()
                for name in ("tokens", "generated", "logprobs", "versions", "staleness", "loss_mask", "advantages")
            }
            values = old[at, :length].float().cpu().numpy().copy()
            found[index] = TrainRow(batch.all_rows[index], index, old_logprobs=values, **of)
    return [found[index] for index in batch.indices]


def postprocess(
    ask: Ask, batch: Batch, parts: Sequence[Sequence[Micro]], olds: Sequence[Sequence[Tensor]], ranks: Ranks
) -> None:
    """Call the function, write its changes into ``parts``, and update their ``counts`` over all ranks (T10).

    Blocks while it runs, and with several ranks until all have called theirs.

    Raises:
        HookError: it raised, or made an invalid change.
        PenstockError: it did so on another rank.
    """

    def asked() -> None:
        rows = rows_of_micros(batch, parts, olds)
        ask(batch, rows)
        _write(parts, {row.index: row for row in rows})

    ranks.all_or_none(asked, f"batch {batch.n}")
    left = torch.tensor([_bearing(part) for part in parts], dtype=torch.float64, device=ranks.device)
    ranks.add_up(left)
    for part, (tokens, samples) in zip(parts, left.tolist(), strict=True):
        for micro in part:
            micro["counts"] = {**micro["counts"], "loss_tokens": int(tokens), "loss_samples": int(samples)}


def asking(hook: Hook, args: Any, call: Callable[..., Any]) -> Ask:
    """Wrap a function of either form. ``call`` calls it, and raises HookError for its errors."""

    def ask(batch: Batch, rows: list[TrainRow]) -> None:
        before = {row.index: row.loss_mask.copy() for row in rows}
        if hook.form.is_slime:
            data = _as_slime_has_it(rows)
            call(hook, args, batch.n - 1, data)
            _take(hook, rows, data)
        else:
            call(hook, batch, rows)
        for row in rows:
            _check(hook, row, before[row.index])

    return ask


def _pairs(parts: Sequence[Sequence[Micro]], olds: Sequence[Sequence[Tensor]]) -> list[tuple[Micro, Tensor]]:
    return [pair for part, of in zip(parts, olds, strict=True) for pair in zip(part, of, strict=True)]


def _bearing(part: Sequence[Micro]) -> tuple[int, int]:
    """Return the number of tokens that bear loss, and of samples with any."""
    masks = [micro["loss_mask"] for micro in part]
    return sum(int(mask.sum()) for mask in masks), sum(int(mask.any(-1).sum()) for mask in masks)


def _write(parts: Sequence[Sequence[Micro]], rows: dict[int, TrainRow]) -> None:
    for micro in (micro for part in parts for micro in part):
        for at, index in enumerate(micro["rows"].tolist()):
            if index < 0:
                continue
            row, length = rows[index], int(micro["lengths"][at])
            for name in ("loss_mask", "advantages"):
                micro[name][at, :length] = torch.as_tensor(getattr(row, name)).to(micro[name])


def _check(hook: Hook, row: TrainRow, before: NDArray[np.bool_]) -> None:
    """Raise HookError if a row holds invalid values; convert its arrays to their declared types."""
    try:
        mask, values = np.asarray(row.loss_mask), np.asarray(row.advantages, np.float32)
    except (TypeError, ValueError) as exc:
        raise HookError(JobFailure.HOOK_RAISED, f"{hook.name} made arrays of no numbers: {exc}.") from exc
    what = f"of sample {row.row.sample}"
    if mask.shape != before.shape or not np.isin(mask, (0, 1)).all():
        raise HookError(JobFailure.HOOK_UNPROVEN, f"{hook.name} made a loss mask {what} without a 0 or 1 a token.")
    mask = mask.astype(np.bool_)
    if (mask & ~before).any():
        raise HookError(JobFailure.HOOK_UNPROVEN, f"{hook.name} put loss on tokens {what} that had none.")
    if values.shape != before.shape or not np.isfinite(values[mask]).all():
        raise HookError(
            JobFailure.HOOK_RAISED, f"{hook.name} gave advantages {what} that are no finite number for each token."
        )
    row.loss_mask, row.advantages = mask, np.where(mask, values, 0).astype(np.float32)


def _as_slime_has_it(rows: Sequence[TrainRow]) -> dict[str, Any]:
    """Return slime's form: a list entry per sample; tensors [L] of ``tokens``, [R] of the response, and numbers."""

    def response(name: str, dtype: torch.dtype) -> list[Tensor]:
        return [torch.tensor(getattr(row, name)[row.prompt_length :], dtype=dtype) for row in rows]

    return {
        "tokens": [torch.tensor(row.tokens) for row in rows],
        "total_lengths": [len(row.tokens) for row in rows],
        "response_lengths": [len(row.tokens) - row.prompt_length for row in rows],
        "sample_indices": [row.index for row in rows],
        "loss_masks": response("loss_mask", torch.int32),
        "log_probs": response("old_logprobs", torch.float32),
        "rollout_log_probs": response("logprobs", torch.float32),
        "advantages": response("advantages", torch.float32),
        "raw_reward": [row.row.reward for row in rows],
    }


def _take(hook: Hook, rows: Sequence[TrainRow], data: dict[str, Any]) -> None:
    """Copy ``loss_masks`` and ``advantages`` back from slime's form."""
    for key, name in (("loss_masks", "loss_mask"), ("advantages", "advantages")):
        values = data.get(key)
        if values is None or len(values) != len(rows):
            raise HookError(JobFailure.HOOK_RAISED, f"{hook.name} left no {key} with an entry for each sample.")
        for row, value in zip(rows, values, strict=True):
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
            setattr(row, name, np.concatenate([getattr(row, name)[: row.prompt_length], array]))
