"""Makes the offer of an object: the digest of each of its ranges. Reads all its bytes."""

from collections.abc import Callable, Mapping

from penstock.errors import PublishError
from penstock.protocol.records.offer import Offer, range_bytes_of, range_digest
from penstock.weights.http.blobs import AnyBlob, Read

#: Bytes that are read at once.
_CHUNK_BYTES = 4 * 1024**2


def make_offer(
    files: Mapping[str, AnyBlob],
    *,
    url: str,
    version: int,
    index: str,
    range_bytes: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Offer:
    """The offer of these files. Blocks for reading them all.

    Args:
        range_bytes: least bytes of a range.
        stopped: asked now and then; true ends it with PublishError.

    Raises:
        PublishError: a file cannot be read.
        ProtocolError: there are too many files.
    """
    sizes = {name: blob.size for name, blob in files.items()}
    length = range_bytes_of(list(sizes.values()), range_bytes)
    digests = bytearray()
    for name, blob in files.items():
        try:
            with blob.opened() as read:
                for start in range(0, max(blob.size, 1), length):
                    if stopped():
                        raise PublishError(f"version {version} is not offered: its trainer ends.")
                    digests += _digest_of(read, start, min(start + length, blob.size))
        except OSError as exc:
            raise PublishError(f"version {version} is not offered: {name} cannot be read ({exc}).") from exc
    return Offer(url, version, index, length, [[name, size] for name, size in sizes.items()], bytes(digests))


def _digest_of(read: Read, start: int, end: int) -> bytes:
    hasher = range_digest()
    while start < end:
        chunk = read(start, min(_CHUNK_BYTES, end - start))
        if not chunk:
            raise OSError("it became shorter")
        hasher.update(chunk)
        start += len(chunk)
    return hasher.digest()
