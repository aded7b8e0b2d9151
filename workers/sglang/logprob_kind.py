"""Which logprobs a server returns: those it draws by (scaled), or those before temperature (original).

A server does not say; what it draws shows it. At a temperature as high as ``TEMPERATURE`` every id of the vocabulary is
drawn alike, so scaled logprobs are those of a fair choice, and original ones are so only where the model itself finds
everything equally likely: then the two hardly differ.
"""

import math
from collections.abc import Sequence

from penstock.protocol.records.sample import LogprobKind

#: Far above any spread of logits: these then differ by less than 0.1.
TEMPERATURE = 1000.0
#: Tokens that are looked at.
NUM_TOKENS = 16
#: What a scaled logprob may differ by from that of a fair choice.
TOLERANCE = 0.5


def kind_of(logprobs: Sequence[float], vocab_size: int) -> LogprobKind:
    """Kind of the ``logprobs`` [T] of tokens that were drawn at ``TEMPERATURE``."""
    fair = -math.log(vocab_size)
    return "scaled" if all(abs(logprob - fair) < TOLERANCE for logprob in logprobs) else "original"
