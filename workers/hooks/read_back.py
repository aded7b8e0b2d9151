"""Read the fields that user code set on its copy of a sample. Other changes are ignored."""

from typing import Any

from penstock.hooks.slime import as_list, sample_class
from penstock.records.sample import Sample
from penstock.text import safe_repr


def field_of(given: Sample, name: str) -> Any:
    """Return a field of a copy, or None if user code deleted it."""
    return getattr(given, name, None)


def read_seen(given: Sample, sample: Sample) -> None:
    """Keep what slime functions wrote to their sample for later ones of this worker."""
    seen = field_of(given, "seen")
    if seen is not None and all(isinstance(one, sample_class()) for one in as_list(seen)):
        sample.seen = seen


def read_mask(mask: Any, before: list[int]) -> list[int]:
    """Return a loss mask that user code set.

    Raises:
        ValueError: it is not a list of one 0 or 1 per token, or has 1 where ``before`` has 0.
    """
    if not isinstance(mask, list) or len(mask) != len(before) or any(new not in (0, 1) for new in mask):
        raise ValueError(f"made a loss_mask that has no 0 or 1 for each of {len(before)} tokens.")
    if any(new and not old for new, old in zip(mask, before, strict=True)):
        raise ValueError("put loss on tokens that had none.")
    return [int(new) for new in mask]


def read_back(given: Sample, sample: Sample) -> None:
    """Set ``reward``, ``reward_info``, ``loss_mask`` and ``sides`` as an environment set them on its copy.

    A field that is None or was deleted keeps its value. ``sample`` is unchanged if a field is refused.

    Raises:
        ValueError: a field is not of its type, or the mask puts loss on tokens that had none.
    """
    set_ = {name: field_of(given, name) for name in ("reward_info", "sides")}
    for name, value in set_.items():
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"set {name} to {safe_repr(value)}, which is not a map.")
    mask = field_of(given, "loss_mask")
    if mask is not None:
        sample.loss_mask = read_mask(mask, sample.loss_mask)
    sample.reward = field_of(given, "reward")
    for name, value in set_.items():
        if value is not None:
            setattr(sample, name, value)
    read_seen(given, sample)
