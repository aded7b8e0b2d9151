"""Detect which logprobs a server returns: those it samples by (scaled), or those before temperature (original).

Servers do not report it. At a temperature as high as ``TEMPERATURE`` sampling is uniform over the vocabulary, so scaled
logprobs are those of a uniform distribution. Original ones are so only if the model itself is uniform: then the two
hardly differ.
"""

import math
from collections.abc import Sequence

from penstock.protocol.records.sample import LogprobKind

#: Far above any spread of logits: these then differ by less than 0.1.
TEMPERATURE = 1000.0
#: Number of tokens to compare.
NUM_TOKENS = 16
#: Largest difference of a scaled logprob from that of a uniform distribution.
TOLERANCE = 0.5


def kind_of(logprobs: Sequence[float], vocab_size: int) -> LogprobKind:
    """Return the kind of the ``logprobs`` [T] of tokens sampled at ``TEMPERATURE``."""
    uniform = -math.log(vocab_size)
    return "scaled" if all(abs(logprob - uniform) < TOLERANCE for logprob in logprobs) else "original"
