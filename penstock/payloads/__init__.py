"""The bytes of one sample: packed arrays after a msgpack header, read without a copy.

    offset 0        magic ``PSP1``
    offset 4        H, length of the header: uint32, little endian
    offset 8        msgpack map {length: L, prompt: P, spans: [start, end, version, ...],
                                 arrays: [[name, dtype, shape, offset], ...]}
    next multiple   arrays, little endian, each at a multiple of 8, zero bytes between; their offsets in the header
    of 8            count from here, so that they do not depend on the length of the header

Always present: ``tokens`` int32 [L], ``logprobs`` float32 [L] and ``mask`` uint8 [L] (bit 0: generated, bit 1: bears
loss). Versions are stored as spans, half open, ascending; a token outside every span has version -1. Any further array
is a side array (routed experts, teacher logprobs) and may have any shape. 9 bytes per token.

Samples that are committed together share one key: their payloads are concatenated in it, each a multiple of 8 bytes.

All bytes that are read are checked; invalid ones raise PayloadError with one sentence that names the sample. Nothing
here blocks.
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
