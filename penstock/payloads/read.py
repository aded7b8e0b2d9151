"""Decoding of payload bytes into views, with all checks. See ``payloads``."""

import numpy as np

from penstock.errors import PayloadError
from penstock.payloads.format import (
    FLOAT32,
    INT32,
    MAGIC,
    MAX_SPANS,
    MAX_TOKENS,
    PRELUDE,
    UINT8,
    Payload,
    check,
    checksum_of,
    offsets,
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
