"""The layout of a payload, its decoded value, and its checks and checksum."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
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


MAGIC = b"PSP2"
#: Seconds after which payloads that are not committed expire, and those of incomplete groups if their server's clock is
#: set ahead by as much: three days, since clocks are often wrong by one day in either direction.
PAYLOAD_TTL_S = 259_200
#: Most tokens of one sample.
MAX_TOKENS = 64 * 1024 * 1024
#: Most spans of one sample: each turn, and each change of the weights within one, begins another.
MAX_SPANS = 65_536

GENERATED = 1
LOSS = 2
#: All values of a mask, since tokens that bear loss were generated (T8), and those of generated tokens.
_MASKS = bytes((0, GENERATED, GENERATED | LOSS))
_GENERATED_MASKS = bytes((GENERATED, GENERATED | LOSS))

#: Magic, tokens, tokens of the prompt, spans.
PRELUDE = struct.Struct("<4sIII")
INT32, FLOAT32, UINT8 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")

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


def offsets(length: int, num_spans: int) -> tuple[int, int, int, int]:
    """Return the offsets of tokens, logprobs and mask in a payload, and the number of its bytes."""
    tokens = _aligned(PRELUDE.size + 12 * num_spans)
    logprobs = _aligned(tokens + 4 * length)
    mask = _aligned(logprobs + 4 * length)
    return tokens, logprobs, mask, _aligned(mask + length)


def _aligned(offset: int) -> int:
    return offset + -offset % 8


def check(payload: Payload, sample_id: str) -> None:
    """Check what the loss relies on (T6, T8, I7); raise PayloadError if it does not hold."""
    mask = payload.mask.tobytes()
    if mask.translate(None, _MASKS):
        raise PayloadError(
            f"sample {sample_id}: its mask has undefined bits, or loss on a token that was not generated."
        )
    if len(payload.spans) > MAX_SPANS:
        raise PayloadError(
            f"sample {sample_id}: {len(payload.spans)} version spans are more than the {MAX_SPANS} allowed."
        )
    covered = last = 0
    for start, end, version in payload.spans:
        if not last <= start < end <= len(mask):
            raise PayloadError(
                f"sample {sample_id}: version span {start} to {end} is empty, overlaps the one before (which ends at "
                f"{last}), or leaves its {len(mask)} tokens."
            )
        if version < 0:
            raise PayloadError(f"sample {sample_id}: version {version} is not one (0 to {2**31 - 1}).")
        if start < payload.prompt_length or mask[start:end].translate(None, _GENERATED_MASKS):
            raise PayloadError(
                f"sample {sample_id}: version {version} is given to tokens {start} to {end}, not all of them generated "
                f"after the prompt of {payload.prompt_length}."
            )
        covered += end - start
        last = end
    if mask.find(GENERATED | LOSS) < 0:
        return
    if covered != np.count_nonzero(payload.mask):
        raise PayloadError(f"sample {sample_id}: it bears loss, but not every generated token has a version (I7).")
    is_finite = np.isfinite(payload.logprobs)
    if not is_finite.all():
        at = int(is_finite.argmin())
        raise PayloadError(f"sample {sample_id}: the logprob of token {at} is {payload.logprobs[at]}; it bears loss.")
    is_given = (payload.mask == 0) & (payload.logprobs != 0)
    if is_given.any():
        at = int(is_given.argmax())
        raise PayloadError(
            f"sample {sample_id}: token {at} was not generated, and its logprob is {payload.logprobs[at]}."
        )


def decode(data: bytes | memoryview, sample_id: str, checksum: int | None = None) -> Payload:
    """Decode ``data`` into views without a copy; do not change ``data`` while they are in use.

    Args:
        data: result of ``encode``. Views are aligned when the buffer is (a ``bytes`` always is).
        sample_id: named in errors.
        checksum: expected ``checksum_of`` the bytes; None: not checked.

    Raises:
        PayloadError: the bytes are not a result of ``encode``.
    """
    view = memoryview(data).toreadonly()
    if checksum is not None and (found := checksum_of(view)) != checksum:
        raise PayloadError(
            f"sample {sample_id}: its payload has checksum {found:#018x} where its record says {checksum:#018x}; "
            "the bytes were changed or are another sample's."
        )
    if len(view) < PRELUDE.size:
        raise PayloadError(f"sample {sample_id}: its payload has {len(view)} bytes, too few for any.")
    magic, length, prompt, num_spans = PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise PayloadError(f"sample {sample_id}: its payload begins with {magic!r}, not {MAGIC!r}.")
    if length > MAX_TOKENS or prompt > length or num_spans > min(length, MAX_SPANS):
        raise PayloadError(
            f"sample {sample_id}: its payload claims a prompt of {prompt} of {length} tokens, and {num_spans} spans."
        )
    tokens, logprobs, mask, size = offsets(length, num_spans)
    if len(view) != size:
        raise PayloadError(f"sample {sample_id}: its payload has {len(view)} bytes where its header needs {size}.")
    spans = np.frombuffer(view, INT32, 3 * num_spans, PRELUDE.size).tolist()
    payload = Payload(
        np.frombuffer(view, INT32, length, tokens),
        np.frombuffer(view, FLOAT32, length, logprobs),
        np.frombuffer(view, UINT8, length, mask),
        tuple(zip(spans[::3], spans[1::3], spans[2::3], strict=True)),
        prompt,
    )
    check(payload, sample_id)
    return payload
