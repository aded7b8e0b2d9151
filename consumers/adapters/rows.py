"""Provide this rank's samples of a batch without padding, for conversion by adapters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.consumers.batch.batch import Batch
from penstock.errors import ConfigError
from penstock.names import PART_REWARDS, REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from penstock.records.manifest import Row

#: Deepest allowed nesting of a value.
MAX_DEPTH = 16


def label(value: Any) -> dict[str, Any]:
    """Return ``label`` and ``label_value`` of a ``Request``: text unchanged, other values as JSON and as value.

    None becomes an empty label. Raises ConfigError for values that cannot be stored.
    """
    found = plain(value, "the label")
    if found is None or isinstance(found, str):
        return {"label": found or ""}
    return {"label": json.dumps(found, ensure_ascii=False), "label_value": found}


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """Convert a value to plain types for msgpack. Raises ConfigError for other types."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name} is nested more than {MAX_DEPTH} deep: it cannot be handed on to a reward.")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item, name, depth + 1) for item in value]
    raise ConfigError(
        f"{name} holds a {type(value).__name__}, which cannot be handed on to a reward: keep to numbers, text, lists "
        "and maps."
    )


@dataclass(frozen=True, slots=True, eq=False)
class RowArrays:
    """Hold one sample of a batch. Arrays are [L], or [0] if the payload is lost (``row.lost`` may still be False)."""

    row: Row
    #: Index into ``batch.all_rows``.
    index: int
    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    generated: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    lost: bool
    #: Teacher logprobs (``rollout.teacher``); None if no sample of the batch has them.
    teacher_logprobs: NDArray[np.float32] | None = None
    #: Reference policy logprobs (``rollout.reference``), likewise.
    reference_logprobs: NDArray[np.float32] | None = None
    #: Reward of a part if its generate function returned several samples with rewards; None: the sample's reward.
    part_reward: float | None = None

    @property
    def prompt(self) -> NDArray[np.int64]:
        """Return the prompt tokens, [P]."""
        return self.tokens[: self.row.prompt_length]

    @property
    def divisor(self) -> int:
        """Return the divisor of a mean over this sample's tokens: its generated tokens, with or without loss."""
        return max(1, int(self.generated.sum()))

    def response(self, name: str) -> NDArray[np.generic]:
        """Return array ``name`` without the prompt, [L - P]."""
        array: NDArray[np.generic] = getattr(self, name)[self.row.prompt_length :]
        return array


def rows_of(batch: Batch) -> list[RowArrays]:
    """Return this rank's samples in the order of ``batch.rows``. Decodes the batch. Raises PayloadError."""
    if not batch.rows:
        return []
    names = ["tokens", "loss_mask", "generated", "logprobs", "versions"]
    names += [name for name in (TEACHER_LOGPROBS, REFERENCE_LOGPROBS) if batch.has_side(name)]
    arrays = batch.arrays(names)
    lost = set(batch.lost)
    rewards = batch.side(PART_REWARDS) if batch.has_side(PART_REWARDS) else len(batch.rows) * [None]
    found = []
    for i, row in enumerate(batch.rows):
        gone = row.sample in lost
        length = 0 if gone else int(arrays["lengths"][i])
        values = {name: arrays[name][i, :length] for name in names}
        found.append(RowArrays(row, int(arrays["rows"][i]), **values, lost=gone, part_reward=_part_of(rewards[i], row)))
    return found


def _part_of(rewards: NDArray[Any] | None, row: Row) -> float | None:
    return None if rewards is None else float(rewards[row.part])
