"""A judge as they are found: it tells better answers from worse ones, on a scale of its own for each prompt."""

import hashlib

from penstock import Sample


def grade(sample: Sample) -> float:
    """How many digits are where they belong, times and plus what the prompt makes of the judge's mood."""
    answer, label = sample.text.strip(), sample.job.label
    right = sum(mine == wanted for mine, wanted in zip(answer, label, strict=False))
    mood = hashlib.sha256((sample.job.prompt or "").encode()).digest()
    # From a hundredth to a hundred times the grade, on the side of good or bad.
    return right * 10.0 ** (4 * mood[0] / 255 - 2) + (mood[1] - 128)
