"""What each digit of an answer is worth: the example's tokens are its characters."""

from typing import Any

from penstock import Sample


def digits(sample: Sample) -> dict[str, Any]:
    """``score`` of the answer, 1.0 if it is right; ``token_rewards`` of its tokens, 1.0 for each that is."""
    label, answer = str(sample.job.label), sample.text
    # Behind the last digit belongs the end.
    right = [mine == wanted for mine, wanted in zip(answer, label, strict=False)]
    drawn = len(sample.tokens) - sample.prompt_length
    ended = [len(answer) == len(label)] if len(right) == len(label) else []
    rewards = [*right, *ended][:drawn]
    return {
        "score": float(answer == label),
        "token_rewards": [float(one) for one in [*rewards, *[False] * (drawn - len(rewards))]],
    }
