"""Turn rewards of steps into advantages of tokens: process supervision (Shao et al. 2024, arXiv 2402.03300, 4.1.3).

    step rewards of a group, on all ranks ─> r̃ = (r - m) / (s + 1e-6) ─> A_t = weight * sum of r̃ of steps that end at
    token t or later

m and s are the mean and the unbiased standard deviation of the rewards of all steps in a group, without samples that
never bore loss, independent of the split over ranks (T11). In a group with a single step, r̃ is 0.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.trainer import ProcessConfig
from penstock.consumers.batch import layout
from penstock.consumers.batch.advantages import EPSILON
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.ranks import Ranks
from penstock.errors import PayloadError, ProtocolError
from penstock.names import STEP_REWARDS
from penstock.payloads.format import are_step_rewards
from penstock.records.manifest import Row

#: Devices whose matrix units compute bfloat16.
_GPUS = ("cuda", "xpu", "npu", "hpu")


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the forward and backward pass for a value of ``trainer.dtype``.

        master weights, gradients, optimizer    float32, regardless of the engines' dtype
        forward and backward pass               trainer.dtype: bfloat16 autocast on a GPU, float32 elsewhere

    A bfloat16 weight has 8 significant bits: a step below 1/512 of its value changes nothing. At a learning rate of
    5e-6 one step changed 0.98 % of the weights of a bfloat16 model of 135M, and 99.97 % of those of a float32 one.
    """
    if name == "bfloat16" or (name == "auto" and device.type in _GPUS):
        return torch.bfloat16
    return torch.float32


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which modules with float32 weights compute in ``dtype``."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


def enable_tf32(name: str, device: torch.device) -> None:
    """Enable TF32 for float32 matrix products on a GPU, unless ``trainer.dtype`` is float32."""
    if name != "float32" and device.type in _GPUS:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


#: Row of the batch -> [S, 2] response index and reward of each step.
Steps = dict[int, NDArray[np.float64]]


def give_advantages(
    batch: Batch, parts: Sequence[Sequence[dict[str, Any]]], config: ProcessConfig, ranks: Ranks
) -> None:
    """Write the advantages of this rank's tokens into the micro-batches ``parts``.

    Collective: with several ranks, blocks until all have called it.

    Raises:
        ProtocolError: no sample of the batch has rewards of steps.
        PayloadError: a sample whose reward counts has no or invalid rewards of steps.
        PenstockError: another rank failed to read its share.
    """
    check_steps(batch)
    found = ranks.all_or_none(lambda: _steps_of(batch), f"batch {batch.n}")
    normalised = _normalised(found, _groups(batch), ranks)
    for micro in (micro for part in parts for micro in part):
        for at, index in enumerate(micro["rows"].tolist()):
            if index < 0:
                continue
            length = int(micro["lengths"][at])
            given = micro["advantages"][at, :length]
            values = torch.as_tensor(_advantages(batch.all_rows[index], length, normalised.get(index))).to(given)
            made = config.weight * values * micro["generated"][at, :length]
            given.copy_(given + made if config.with_rewards else made)


def check_steps(batch: Batch) -> None:
    """Raise if a row whose reward counts lacks rewards of steps; checks the rows of all ranks, so that all raise."""
    if not batch.has_side(STEP_REWARDS):
        raise ProtocolError(
            f"trainer.process needs the side array {STEP_REWARDS!r} of each sample, and those of batch {batch.n} have "
            "none: have the reward give step_rewards or token_rewards, and begin the run anew."
        )
    layout.check_sides(batch.all_rows, [not row.masked for row in batch.all_rows], STEP_REWARDS, batch.n)


def _steps_of(batch: Batch) -> Steps:
    """Return the steps of this rank's rows whose reward counts."""
    found = {}
    for index, row, array in zip(batch.indices, batch.rows, batch.side(STEP_REWARDS), strict=True):
        if array is None or row.masked:
            continue
        length = row.length - row.prompt_length
        if not are_step_rewards(array, length):
            raise PayloadError(
                f"sample {row.sample}: its side array {STEP_REWARDS!r} of shape {array.shape} is not the index of a "
                f"token behind its prompt, below {length} and rising, and a finite number, for each step."
            )
        found[index] = array.astype(np.float64)
    return found


def _groups(batch: Batch) -> list[int]:
    """Return the group number of each of ``all_rows``."""
    ids: dict[str, int] = {}
    return [ids.setdefault(row.job, len(ids)) for row in batch.all_rows]


def _normalised(steps: Steps, groups: Sequence[int], ranks: Ranks) -> Steps:
    """Replace each reward in ``steps`` by r̃."""
    number = max(groups) + 1

    def summed(values: dict[int, float]) -> NDArray[np.float64]:
        """Return [groups] sums over all ranks."""
        sums = torch.zeros(number, dtype=torch.float64, device=ranks.device)
        for index, value in values.items():
            sums[groups[index]] += value
        ranks.add_up(sums)
        return sums.cpu().numpy()

    count = summed({index: float(len(one)) for index, one in steps.items()})
    mean = summed({index: float(one[:, 1].sum()) for index, one in steps.items()}) / np.maximum(count, 1)
    centred = {index: one[:, 1] - mean[groups[index]] for index, one in steps.items()}
    squares = summed({index: float((one**2).sum()) for index, one in centred.items()})
    deviation = np.sqrt(squares / np.maximum(count - 1, 1)) + EPSILON
    return {
        index: np.stack([one[:, 0], centred[index] / deviation[groups[index]]], axis=1) for index, one in steps.items()
    }


def _advantages(row: Row, length: int, steps: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Return [L] the sum of r̃ of the steps that end at or after each token."""
    ends = np.zeros(length)
    if steps is not None:
        np.add.at(ends, row.prompt_length + steps[:, 0].astype(np.int64), steps[:, 1])
    return np.cumsum(ends[::-1])[::-1].copy()
