"""The bytes of one sample: arrays after a fixed header, read without a copy.

    offset 0        magic ``PSP2``, number of tokens L, length of the prompt, number of spans S: uint32
    offset 16       spans: S x (start, end, version), int32
    next multiple   tokens int32 [L]; then, each at a multiple of 8 with zero bytes between and behind: logprobs
    of 8            float32 [L], mask uint8 [L] (bit 0: generated, bit 1: bears loss)

All little endian. Spans are half open and ascending; a token outside every span has version -1. 9 bytes per token.
Further arrays of a sample (routed experts, images) have keys of their own (``sides.py``).

Samples that are committed together share one key: their payloads are concatenated in it, each a multiple of 8 bytes.

All bytes that are read are checked; invalid ones raise PayloadError with one sentence that names the sample. Nothing
here blocks.
"""

from penstock.payloads.format import GENERATED, LOSS, MAX_TOKENS, Array, Payload, checksum_of, decode
from penstock.payloads.write import encode, pack

__all__ = ["GENERATED", "LOSS", "MAX_TOKENS", "Array", "Payload", "checksum_of", "decode", "encode", "pack"]
