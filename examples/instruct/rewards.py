"""Whether an answer follows the instruction of its prompt.

Word salad passes no check by being lucky: the policy is unsure of it, so its mean log-probability is low. A policy that
becomes sure of other texts than the first policy pays for it by ``trainer.kl``.
"""

import re

from penstock import Sample

#: Fewest words of an answer, and of one of its sentences.
MIN_WORDS, MIN_WORDS_OF_PART = 8, 3
#: Lowest mean log-probability per token, in nats, of an answer that is no word salad.
MIN_LOGPROB = -1.8


def follows(sample: Sample) -> dict[str, float]:
    """``score``: 1 if the answer ended by itself and follows the instruction ``KIND NUMBER`` of its label, else 0.

    ``logprob`` is the mean log-probability per token under the policy that generated the answer.
    """
    drawn = [one for one, is_drawn in zip(sample.logprobs, sample.generated, strict=True) if is_drawn]
    logprob = sum(drawn) / max(1, len(drawn))
    return {"score": float(logprob >= MIN_LOGPROB and _follows(sample)), "logprob": logprob}


def _follows(sample: Sample) -> bool:
    kind, _, number = str(sample.job.label).partition(" ")
    text = sample.text.strip()
    if sample.finish_reason != "stop" or len(text.split()) < MIN_WORDS:
        return False
    return CHECKS[kind](text, int(number))


def has_sentences(text: str, count: int) -> bool:
    """Return whether the text is one paragraph of ``count`` sentences."""
    parts = [one for one in re.split(r"(?<=[.!?])\s+", text) if one]
    return len(parts) == count and "\n" not in text and text[-1] in ".!?" and all(map(is_long, parts))


def has_words(text: str, most: int) -> bool:
    """Return whether the text ends a sentence and has at most so many words."""
    return len(text.split()) <= most and text[-1] in ".!?"


def has_no_comma(text: str, _: int) -> bool:
    """Return whether the text ends a sentence and has no comma."""
    return "," not in text and text[-1] in ".!?"


def is_long(part: str) -> bool:
    return len(part.split()) >= MIN_WORDS_OF_PART


CHECKS = {"sentences": has_sentences, "words": has_words, "commas": has_no_comma}
