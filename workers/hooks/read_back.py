"""Copy back the fields that user code set on its copy of a sample; ignore other changes."""

from typing import Any

from penstock.hooks.slime import as_list, sample_class
from penstock.records.sample import Sample
from penstock.text import safe_repr


def field_of(given: Sample, name: str) -> Any:
    """Return a field of a copy; None if user code deleted it."""
    return getattr(given, name, None)


def read_seen(given: Sample, sample: Sample) -> None:
    """Copy back slime's sample object for later hooks of this worker."""
    seen = field_of(given, "seen")
    if seen is not None and all(isinstance(one, sample_class()) for one in as_list(seen)):
        sample.seen = seen


def read_mask(mask: Any, before: list[int]) -> list[int]:
    """Validate a loss mask that user code set.

    Raises:
        ValueError: the mask is not a list with a 0 or 1 per token, or adds loss to tokens that ``before`` excludes.
    """
    if not isinstance(mask, list) or len(mask) != len(before) or any(new not in (0, 1) for new in mask):
        raise ValueError(f"set an invalid loss_mask: it needs a 0 or 1 for each of {len(before)} tokens.")
    if any(new and not old for new, old in zip(mask, before, strict=True)):
        raise ValueError("added loss to tokens without loss: only remove loss.")
    return [int(new) for new in mask]


def read_back(given: Sample, sample: Sample) -> None:
    """Copy ``reward``, ``reward_info``, ``loss_mask`` and ``sides`` from an environment's copy of a sample.

    A field that is None or was deleted keeps its value. ``sample`` is unchanged if a field is invalid.

    Raises:
        ValueError: a field has a wrong type, or the mask adds loss.
    """
    set_ = {name: field_of(given, name) for name in ("reward_info", "sides")}
    for name, value in set_.items():
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"set {name} to {safe_repr(value)}: set a map.")
    mask = field_of(given, "loss_mask")
    if mask is not None:
        sample.loss_mask = read_mask(mask, sample.loss_mask)
    sample.reward = field_of(given, "reward")
    for name, value in set_.items():
        if value is not None:
            setattr(sample, name, value)
    read_seen(given, sample)
