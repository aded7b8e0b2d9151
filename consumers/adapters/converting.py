"""Call ``hooks.convert``, a user function that changes a batch's train data for a slime-shaped trainer, key by key.

The function may set rewards, remove loss from tokens and add keys; generated tokens and their data must stay unchanged
(T6, T8).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import Config
from penstock.consumers.adapters.rows import RowArrays
from penstock.consumers.batch.batch import Batch
from penstock.errors import HookError
from penstock.hooks.signatures import load_hook
from penstock.hooks.slime import args_of, of_row
from penstock.records.job import JobFailure
from penstock.system.user_code import staying_alive
from penstock.text import format_exc, safe_repr

#: Keys that the function may return, as slime's default does, but must not change.
_SAME = ("tokens", "response_lengths", "rollout_log_probs", "sample_indices", "source_names")
#: Divisors of slime's loss, which penstock computes itself from the generated tokens.
_SUMS = "rollout_mask_sums"
#: Side arrays of samples, by slime's names: key -> sample id -> tensor.
Sides = Mapping[str, Mapping[str, Tensor]]
#: Keys with one finite number per sample.
_NUMBERS = ("rewards", "raw_reward", "truncated")


@dataclass(frozen=True, slots=True)
class Converted:
    """Hold the function's result; omitted keys keep penstock's values."""

    #: ``rewards``, ``raw_reward``, ``truncated`` -> [N] values of the complete batch.
    numbers: Mapping[str, list[float]] = field(default_factory=dict)
    #: Samples with the function's loss masks.
    rows: Sequence[RowArrays] = ()
    #: Additional keys: name -> sample id -> value.
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Converter:
    """Call the ``hooks.convert`` function.

    Raises:
        ConfigError: the function cannot be imported, or has a wrong signature.
    """

    def __init__(self, config: Config, path: str) -> None:
        self._hook = load_hook("convert", path)
        self._args = args_of(config)

    def __call__(self, batch: Batch, rows: Sequence[RowArrays], first_index: int, sides: Sides) -> Converted:
        """Call the function with a complete batch and its ``rows`` in the order of ``batch.all_rows``. Blocks.

        Args:
            first_index: index of the first sample.
            sides: side arrays of the samples, which the function must not change.

        Raises:
            HookError: the function raised, or returned an invalid value.
        """
        samples = [_sample(row, first_index, sides) for row in rows]
        data = self._ask(batch, samples)
        for key in data.keys() & {*_SAME, *sides}:
            self._check_same(key, data[key], rows, samples, sides)
        masks = data.get("loss_masks")
        left = rows if masks is None else [self._masked(row, mask) for row, mask in zip(rows, masks, strict=True)]
        if _SUMS in data:
            self._check_sums(data[_SUMS], left, [str(one) for one in data.get("rollout_ids", range(len(left)))])
        known = {*_SAME, *_NUMBERS, *sides, "loss_masks", _SUMS}
        return Converted(
            {key: self._numbers(key, data[key]) for key in _NUMBERS if key in data},
            left,
            {
                key: {row.row.sample: value for row, value in zip(rows, values, strict=True) if value is not None}
                for key, values in data.items()
                if key not in known
            },
        )

    def _ask(self, batch: Batch, samples: list[Any]) -> dict[str, list[Any]]:
        hook = self._hook
        try:
            with staying_alive():
                data = hook.function(self._args, samples) if hook.form.is_slime else hook.function(batch)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            raise HookError(JobFailure.HOOK_RAISED, f"{hook.name} raised {format_exc(exc)}.") from exc
        if not isinstance(data, Mapping):
            raise self._wrong(f"gave {safe_repr(data)}, not a map of keys to a list with an entry for each sample.")
        found = {}
        for key, values in data.items():
            try:
                found[str(key)] = list(values)
            except TypeError as exc:
                raise self._wrong(f"gave {safe_repr(values)} for {key}, which is no list.") from exc
            if len(found[str(key)]) != len(samples):
                raise self._wrong(f"gave {len(found[str(key)])} entries for {key} of {len(samples)} samples.")
        return found

    def _check_same(
        self, key: str, values: Sequence[Any], rows: Sequence[RowArrays], samples: Sequence[Any], sides: Sides
    ) -> None:
        """Raise HookError if the function changed generated data or values that penstock computes."""
        attribute = {"response_lengths": "response_length", "sample_indices": "index"}
        for row, sample, value in zip(rows, samples, values, strict=True):
            wanted: Any = {
                "tokens": row.tokens,
                "rollout_log_probs": row.response("logprobs"),
                "source_names": _source(row),
                **{name: of.get(row.row.sample) for name, of in sides.items()},
            }.get(key, getattr(sample, attribute.get(key, ""), None))
            if not row.lost and not np.array_equal(_array(value, wanted), wanted):
                raise HookError(
                    JobFailure.HOOK_UNPROVEN,
                    f"{self._hook.name} changed {key} of sample {row.row.sample}: it may change rewards and take loss "
                    "off tokens, and add keys.",
                )

    def _check_sums(self, values: Sequence[Any], rows: Sequence[RowArrays], rollouts: Sequence[str]) -> None:
        """Check that ``values`` are sums of a rollout's loss masks, as in slime's default, or of its generated tokens,
        penstock's divisor."""
        sums: dict[str, tuple[int, int]] = {}
        for row, rollout in zip(rows, rollouts, strict=True):
            num_loss, generated = sums.get(rollout, (0, 0))
            sums[rollout] = (num_loss + int(row.loss_mask.sum()), generated + (0 if row.lost else row.divisor))
        for row, rollout, value in zip(rows, rollouts, values, strict=True):
            if not row.lost and not any(np.array_equal(_array(value, one), one) for one in sums[rollout]):
                raise HookError(
                    JobFailure.HOOK_UNPROVEN,
                    f"{self._hook.name} gave {safe_repr(value)} as {_SUMS} of sample {row.row.sample}, "
                    "and the loss masks "
                    f"of its rollout have {sums[rollout][0]} tokens: leave the key out, generated tokens are counted.",
                )

    def _masked(self, row: RowArrays, value: Any) -> RowArrays:
        at = row.row.prompt_length
        before = row.loss_mask[at:]
        if row.lost:
            return row
        mask = _array(value, before)
        if mask.shape != before.shape or not np.isin(mask, (0, 1)).all():
            raise HookError(
                JobFailure.HOOK_UNPROVEN,
                f"{self._hook.name} made a loss mask of sample {row.row.sample} that has no 0 or 1 for each of the "
                f"{len(before)} tokens of its response.",
            )
        mask = mask.astype(np.bool_)
        if (mask & ~before).any():
            raise HookError(
                JobFailure.HOOK_UNPROVEN,
                f"{self._hook.name} put loss on tokens of sample {row.row.sample} that had none.",
            )
        return replace(row, loss_mask=np.concatenate([row.loss_mask[:at], mask]))

    def _numbers(self, key: str, values: Sequence[Any]) -> list[float]:
        try:
            found = [float(value) for value in values]
        except (TypeError, ValueError, OverflowError) as exc:
            raise self._wrong(f"gave {key} that are no numbers: {format_exc(exc)}") from exc
        if not np.isfinite(found).all():
            raise self._wrong(f"gave {key} of which one is not finite.")
        return found

    def _wrong(self, what: str) -> HookError:
        return HookError(JobFailure.HOOK_RAISED, f"{self._hook.name} {what}")


def _array(value: Any, like: Any) -> NDArray[Any]:
    """Convert to a numpy array, or to an empty array if that is impossible."""
    try:
        return np.asarray(value, np.asarray(like).dtype if np.asarray(like).dtype.kind == "f" else None)
    except (TypeError, ValueError, OverflowError):
        return np.zeros(0)


def _source(row: RowArrays) -> str:
    """Return the name of the dataset."""
    return row.row.job.rsplit("/", 2)[0]


def _sample(row: RowArrays, first_index: int, sides: Sides) -> Any:
    """Make a slime ``Sample`` without texts, and without tokens if its payload is lost."""
    of, number = row.row, first_index + row.index
    made = of_row(
        of,
        number,
        0 if row.lost else of.length - of.prompt_length,
        rollout_id=number,
        tokens=row.tokens.tolist(),
        loss_mask=[int(one) for one in row.response("loss_mask").tolist()],
        rollout_log_probs=row.response("logprobs").tolist(),
        remove_sample=row.lost,
    )
    for name, arrays in sides.items():
        # Copy, so that the function cannot modify the original.
        setattr(made, name, arrays[of.sample].clone() if of.sample in arrays else None)
    return made
