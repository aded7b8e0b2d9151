"""The reward of this run: a function of a finished sample. Change it, and the data, for a task of your own."""

from penstock import Sample


def is_sorted(sample: Sample) -> float:
    """Return 1 if the answer is the label, that is, the digits of the prompt in order."""
    return float(sample.text.strip() == sample.job.label)
