"""Convert side arrays, images, columns and rollouts of samples to slime's train data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.consumers.adapters.rows import RowArrays
from penstock.consumers.batch.batch import Batch
from penstock.errors import ConfigError, ProtocolError
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.records.manifest import Row
from penstock.text import safe_repr

#: Side arrays with a key in slime: name -> key.
SIDES = {"routed_experts": "rollout_routed_experts", "teacher_logprobs": "teacher_log_probs"}

#: dtypes of slime's tensors; experts are not uint8, which would divide by zero in a model with 256 experts.
DTYPES = {
    "tokens": torch.int64,
    "loss_masks": torch.int32,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "rollout_routed_experts": torch.int32,
}
#: Keys whose entries may be None, for samples without images or without ``train_metadata``.
MULTIMODAL, METADATA = "multimodal_train_inputs", "metadata"
#: Columns that replace default values of a share.
ROLLOUT_IDS, RAW_REWARD = "rollout_ids", "raw_reward"

#: Key -> sample id -> value.
Columns = Mapping[str, Mapping[str, Any]]


def slime_tensor(key: str, values: Any) -> Tensor:
    """Copy values to a tensor of slime's dtype."""
    return torch.tensor(np.asarray(values), dtype=DTYPES[key])


def sides_of(batch: Batch, rows: Sequence[RowArrays]) -> dict[str, dict[str, Tensor]]:
    """Return key -> sample id -> tensor, for the side arrays that any sample has."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, key in SIDES.items():
        arrays = zip(rows, batch.side(name), strict=True)
        if values := {row.row.sample: _side(key, row, array) for row, array in arrays if array is not None}:
            found[key] = values
    return found


def images_of(batch: Batch, rows: Sequence[RowArrays]) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Return the image inputs for a model by sample, if the batch has images."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in (PIXEL_VALUES, IMAGE_GRID):
        for row, array in zip(rows, batch.side(name) if batch.has_side(name) else (), strict=False):
            if array is not None:
                found.setdefault(row.row.sample, {})[name] = torch.tensor(array)
    return {MULTIMODAL: found} if found else {}


def check_sides(batch: Batch, rows: Sequence[RowArrays], sides: Columns) -> None:
    """Raise ProtocolError if a sample that bears loss lacks a side array that others have."""
    for name, values in ((name, sides[key]) for name, key in SIDES.items() if key in sides):
        for row in rows:
            if row.row.sample not in values and not row.lost and row.loss_mask.any():
                raise ProtocolError(
                    f"sample {row.row.sample} has no side array {name!r}, and others of batch {batch.n} have: slime "
                    "takes it of every sample or of none. Name it in rollout.sides, so that a sample without it fails."
                )


def _side(key: str, row: RowArrays, array: NDArray[Any] | Sequence[float]) -> Tensor:
    """Convert one sample's side array for slime. Raises ProtocolError if its length is wrong."""
    length, response = row.row.length, row.row.length - row.row.prompt_length
    # Teacher logprobs may cover the complete sequence or only the response.
    wanted = {length, response} if key == "teacher_log_probs" else {length - 1}
    if len(array) not in wanted:
        raise ProtocolError(
            f"sample {row.row.sample}: {key} has {len(array)} entries for {length} tokens, {response} of them in the "
            f"response; it needs {' or '.join(map(str, sorted(wanted)))}."
        )
    whole = key == "teacher_log_probs" and len(array) == length
    return slime_tensor(key, array[row.row.prompt_length :] if whole else array)


def checked_columns(rows: Sequence[RowArrays], columns: Columns) -> dict[str, Mapping[str, Any]]:
    """Check that slime can average the columns; return columns that some sample has. Raises ConfigError."""
    found: dict[str, Mapping[str, Any]] = {}
    for key, values in columns.items():
        if not values:
            continue
        if key in (MULTIMODAL, METADATA):
            if wrong := [one for one in values if not isinstance(values[one], Mapping)]:
                raise ConfigError(
                    f"columns[{key!r}] has {safe_repr(values[wrong[0]])} for sample {wrong[0]}: give a dict."
                )
            found[key] = values
            continue
        found[key] = {row.row.sample: _column(key, row, values) for row in rows if not row.lost}
    return found


def _column(key: str, row: RowArrays, values: Mapping[str, Any]) -> Any:
    value = values.get(row.row.sample)
    if value is None:
        raise ConfigError(
            f"columns[{key!r}] has no value for sample {row.row.sample}: slime takes a mean over all, so give one for "
            "every sample, or leave the column out."
        )
    if key in DTYPES and np.ndim(value):
        return _side(key, row, value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return value
    array = np.asarray(value)
    if array.dtype.kind != "f" or not array.ndim:
        raise ConfigError(
            f"columns[{key!r}]: sample {row.row.sample} has a value of {type(value).__name__}; slime takes means, so "
            "give numbers, or arrays of floats."
        )
    return torch.tensor(array, dtype=torch.float32)


def rollouts_of(
    rows: Sequence[Row], given: Mapping[str, Any] | None, first_index: int
) -> tuple[list[int], Mapping[int, int]]:
    """Return the rollout of each sample, and the divisor of each rollout; by default a sample is a rollout."""
    if given is None:
        return [first_index + index for index in range(len(rows))], {}
    ids, sums = [], dict[int, int]()
    for row in rows:
        number = given.get(row.sample)
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise ConfigError(
                f"columns['rollout_ids'] has {safe_repr(number)} for sample {row.sample}: give an "
                "integer for every sample."
            )
        ids.append(int(number))
        sums[ids[-1]] = max(1, sums.get(ids[-1], 0) + (0 if row.lost else row.num_generated))
    return ids, sums


def finite_number(key: str, row: Row, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not np.isfinite(value):
        raise ConfigError(f"columns[{key!r}] has {safe_repr(value)} for sample {row.sample}: give a finite number.")
    return float(value)
