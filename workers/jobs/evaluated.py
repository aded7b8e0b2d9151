"""What evaluations are told of an answer beside its reward: what it comes to, and the category of its prompt."""

from collections.abc import Iterable
from typing import Any

from penstock.config import DatasetConfig
from penstock.names import Lane
from penstock.protocol.records.sample import Sample
from penstock.words import writable
from penstock.workers.rewards.kinds.box import last_box

#: Entries of ``reward_info``. A reward that says what it took an answer for says it as the first.
PRED, CATEGORY = "pred", "category"
#: Most characters of either: a longer text is no result.
MAX_PRED, MAX_CATEGORY = 256, 64


def note(sample: Sample, datasets: Iterable[DatasetConfig]) -> None:
    """Add both to a scored sample of lane ``eval``: the first where its prompt has several, for the vote.

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
    r"""What an answer comes to: the content of its last ``\boxed{}``, else all of a short one; '' where it has none."""
    found = last_box(text)
    spelled = " ".join((text if found is None else found).split())
    return writable(spelled) if len(spelled) <= MAX_PRED else ""


def _name(value: Any) -> str:
    """A category as text; '' where it is none."""
    return writable(str(value))[:MAX_CATEGORY].strip() if isinstance(value, str | int | float) else ""
