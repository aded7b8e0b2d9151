"""Add evaluation metadata to a sample beside its reward: its final answer, and the category of its prompt."""

from collections.abc import Iterable
from typing import Any

from penstock.config import DatasetConfig
from penstock.names import Lane
from penstock.protocol.records.sample import Sample
from penstock.text import utf8_safe
from penstock.workers.rewards.kinds.box import last_box

#: Entries of ``reward_info``. A reward that reports which answer it read sets the first itself.
PRED, CATEGORY = "pred", "category"
#: Longest of either, in characters: a longer text is no final answer.
MAX_PRED, MAX_CATEGORY = 256, 64


def note(sample: Sample, datasets: Iterable[DatasetConfig]) -> None:
    """Add both to a scored sample of lane ``eval``; the final answer only if its prompt has several samples, to vote.

    Args:
        datasets: the held-out ones.
    """
    job = sample.job
    if job.lane != Lane.EVAL:
        return
    if job.n > 1 and PRED not in sample.reward_info:
        sample.reward_info[PRED] = result_of(sample.text)
    key = next((one.category_key for one in datasets if one.name == job.dataset), None)
    if key is not None and (category := _name(job.metadata.get(key))):
        sample.reward_info[CATEGORY] = category


def result_of(text: str) -> str:
    r"""Return the final answer: the content of the last ``\boxed{}``, else all of a short answer; '' if none."""
    found = last_box(text)
    spelled = " ".join((text if found is None else found).split())
    return utf8_safe(spelled) if len(spelled) <= MAX_PRED else ""


def _name(value: Any) -> str:
    """Return a category as text; '' if it is neither text nor a number."""
    return utf8_safe(str(value))[:MAX_CATEGORY].strip() if isinstance(value, str | int | float) else ""
