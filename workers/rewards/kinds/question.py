"""The input of a built-in reward: an answer, and its label and metadata."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.records.sample import Sample

#: Longest label, with all texts that count as one, that is read in the worker's event loop, in characters.
MAX_LABEL = 64 * 1024


@dataclass(frozen=True, slots=True)
class Question:
    """The fields of a sample that built-in rewards see; sent as JSON to the processes that check."""

    text: str
    #: The label as text; another type as JSON.
    label: str = ""
    #: The label as the dataset has it: text, or a number, list or map.
    raw_label: Any = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sample: Sample) -> "Question":
        return cls(sample.text, sample.job.label, sample.job.raw_label, sample.job.metadata)


def check_label(name: str, texts: Iterable[str], most: int = MAX_LABEL) -> None:
    """Raise ValueError if the texts that reward ``name`` compares answers with have more than ``most`` characters,
    each counted as one more."""
    if (count := sum(len(text) + 1 for text in texts)) > most:
        raise ValueError(
            f"reward {name}: the label has {count:,} characters, and at most {most:,} are read: shorten it"
        )
