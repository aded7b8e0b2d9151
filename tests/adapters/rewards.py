"""Rewards for trainers in tests."""

from penstock.records.sample import Sample


def last_digit(sample: Sample) -> float:
    """Of the sum of all token ids: a number that answers to one prompt seldom share."""
    return float(sum(sample.tokens) % 10)


def last_digit_and_length(sample: Sample) -> dict[str, float]:
    return {"score": last_digit(sample), "length": float(sum(sample.generated))}
