"""The bytes of one sample: packed arrays behind a msgpack header, read without a copy.

    offset 0        magic ``PSP1``
    offset 4        H, length of the header: uint32, little endian
    offset 8        msgpack map {length: L, prompt: P, spans: [start, end, version, ...],
                                 arrays: [[name, dtype, shape, offset], ...]}
    next multiple   arrays, little endian, each at a multiple of 8, zero bytes between; their offsets in the header
    of 8            count from here, so that they do not depend on the length of the header

Always there: ``tokens`` int32 [L], ``logprobs`` float32 [L] and ``mask`` uint8 [L] (bit 0: generated, bit 1: bears
loss). Versions travel as spans, half open, ascending; a token outside every span has version -1. Any further array is
a side array (routed experts, teacher logprobs) and may have any shape. 9 bytes per token.

Samples that are committed together share one key: their payloads lie end to end in it, each a multiple of 8 bytes.

Everything that is read is bounds checked; what cannot be right raises PayloadError with one sentence that names the
sample. Nothing here blocks.
"""

from penstock.payloads.format import (
    GENERATED,
    LOSS,
    MAGIC,
    MAX_ARRAYS,
    MAX_HEADER_BYTES,
    MAX_TOKENS,
    Array,
    Payload,
    Span,
    checksum_of,
)
from penstock.payloads.read import decode
from penstock.payloads.write import encode, encode_arrays, pack

__all__ = [
    "GENERATED",
    "LOSS",
    "MAGIC",
    "MAX_ARRAYS",
    "MAX_HEADER_BYTES",
    "MAX_TOKENS",
    "Array",
    "Payload",
    "Span",
    "checksum_of",
    "decode",
    "encode",
    "encode_arrays",
    "pack",
]
