"""Definitions shared by writer and reader of a payload: constants, dtypes, the decoded value, its checksum."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import PayloadError


def are_step_rewards(array: NDArray[Any], length: int) -> bool:
    """Return whether an array is a valid side array ``step_rewards``, [steps, 2], of a response of ``length`` tokens.

    It has the index of each step's last token in the response, rising integers, and the step's finite reward.
    """
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        return False
    ends = array[:, 0].astype(np.float64)
    return bool(((ends >= 0) & (ends < length) & (ends % 1 == 0)).all() and (np.diff(ends) > 0).all())


MAGIC = b"PSP1"
#: Most bytes of the header; 64k spans stay below it.
MAX_HEADER_BYTES = 1024 * 1024
#: Most tokens of one sample.
MAX_TOKENS = 64 * 1024 * 1024
#: Most arrays of one payload, including the three that are always present.
MAX_ARRAYS = 64
#: Most dimensions of one array; numpy takes 64.
MAX_DIMENSIONS = 16

GENERATED = 1
LOSS = 2

PRELUDE = struct.Struct("<4sI")
DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")
}
#: Arrays that are always present, and their dtypes.
CORE: Mapping[str, str] = {"tokens": "int32", "logprobs": "float32", "mask": "uint8"}

Span = tuple[int, int, int]
Array = NDArray[Any]


# Not frozen, since creating a frozen instance takes three times as long, for every sample. Do not change it.
@dataclass(slots=True, eq=False)
class Payload:
    """Arrays of one sample; read-only views into the bytes they came from, which they keep alive."""

    #: [L] int32, prompt and everything after it.
    tokens: Array
    #: [L] float32, log-probability with which the token was generated; 0 for tokens not generated (T6).
    logprobs: Array
    #: [L] uint8, bit 0 generated, bit 1 bears loss.
    mask: Array
    #: (start, end, version), half open, ascending, not overlapping.
    spans: tuple[Span, ...]
    prompt_length: int
    #: Further arrays by name.
    sides: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> Array:
        """[L] uint8, 1 on tokens that the policy generated. A new array at every call."""
        return self.mask & GENERATED

    @property
    def loss_mask(self) -> Array:
        """[L] uint8, 1 on tokens to train. A new array at every call."""
        return self.mask >> 1

    @property
    def versions(self) -> Array:
        """[L] int32, version that generated the token, -1 for tokens not generated. A new array at every call."""
        versions = np.full(len(self.tokens), -1, np.int32)
        for start, end, version in self.spans:
            versions[start:end] = version
        return versions

    def cut(self, begin: int, end: int) -> "Payload":
        """Return tokens ``begin`` to ``end``, one part of a sample, as views; its prompt ends at a generated token.

        Side arrays are left out, see ``sides.cut``.
        """
        mask, prompt_length = self.mask[begin:end], self.prompt_length
        if begin:
            generated = np.flatnonzero(mask & GENERATED)
            prompt_length = int(generated[0]) if len(generated) else end - begin
        clipped = ((max(start, begin) - begin, min(stop, end) - begin, version) for start, stop, version in self.spans)
        spans = tuple(span for span in clipped if span[0] < span[1])
        return Payload(self.tokens[begin:end], self.logprobs[begin:end], mask, spans, prompt_length)


def checksum_of(data: bytes | memoryview) -> int:
    """Compute XXH3-64 of payload bytes: against damage and mix-ups, not adversaries. 23 KB take 0.6 us (CRC-32: 6)."""
    return xxhash.xxh3_64_intdigest(data)


def sum_runs(mask: Array, starts: Sequence[int] | Array) -> list[int]:
    """Count the ones of a uint8 or bool mask [T] in each run; runs begin at ``starts``, ascending, without gaps."""
    if not len(starts):
        return []
    sums: list[int] = np.add.reduceat(mask.view(np.uint8), starts, dtype=np.int64).tolist()
    return sums


def check_spans(flat: Any, length: int, sample_id: str) -> tuple[Span, ...]:
    """Parse spans (start, end, version, start, ...); raise PayloadError if they overlap or exceed the tokens."""
    if not isinstance(flat, list) or len(flat) % 3:
        raise PayloadError(f"sample {sample_id}: its version spans are not triples of start, end and version.")
    last = 0
    spans = []
    for start, end, version in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        if not (type(start) is type(end) is type(version) is int and last <= start < end <= length):
            raise PayloadError(
                f"sample {sample_id}: version span {start!r} to {end!r} is empty, overlaps the one before "
                f"(which ends at {last}), or leaves its {length} tokens."
            )
        if not 0 <= version < 2**31:
            raise PayloadError(f"sample {sample_id}: version {version} is not one (0 to {2**31 - 1}).")
        spans.append((start, end, version))
        last = end
    return tuple(spans)
