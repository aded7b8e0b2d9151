"""What a reward by name is asked: an answer, and what it is held against."""

from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.records.sample import Sample


@dataclass(frozen=True, slots=True)
class Question:
    """What rewards by name see of a sample; as JSON it goes to the processes that check."""

    text: str
    #: As text; a label of another type as JSON.
    label: str = ""
    #: The label as the dataset has it: text, or a number, list or map.
    raw_label: Any = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sample: Sample) -> "Question":
        return cls(sample.text, sample.job.label, sample.job.raw_label, sample.job.metadata)
