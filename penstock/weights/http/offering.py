"""Makes the offer of an object: the digest of each of its ranges. Reads all its bytes.

Those of a whole version are held to its index. What a delta makes is held to the index by whoever applies it.
"""

from collections.abc import Callable, Mapping

import xxhash

from penstock.errors import PublishError
from penstock.protocol.records.offer import Offer, range_bytes_of, range_digest
from penstock.weights.http.blobs import AnyBlob, Read
from penstock.weights.index import INDEX_FILE, MAX_INDEX_BYTES, digest, index_in

#: Bytes that are read at once.
_CHUNK_BYTES = 4 * 1024**2


def make_offer(
    files: Mapping[str, AnyBlob],
    *,
    url: str,
    version: int,
    index: str,
    range_bytes: int,
    is_whole: bool = True,
    stopped: Callable[[], bool] = lambda: False,
) -> Offer:
    """The offer of these files. Blocks for reading them all.

    Args:
        range_bytes: least bytes of a range.
        is_whole: whether it is a version, and no delta.
        stopped: asked now and then; true ends it with PublishError.

    Raises:
        PublishError: a file cannot be read, or is not what the index says: every worker would fetch it in vain.
        ProtocolError: there are too many files.
    """
    checksums = _checksums(files, version, index) if is_whole else {}
    sizes = {name: blob.size for name, blob in files.items()}
    length = range_bytes_of(list(sizes.values()), range_bytes)
    digests = bytearray()
    for name, blob in files.items():
        whole = xxhash.xxh3_64()
        try:
            with blob.opened() as read:
                for start in range(0, max(blob.size, 1), length):
                    if stopped():
                        raise PublishError(f"version {version} is not offered: its trainer ends.")
                    digests += _digest_of(read, start, min(start + length, blob.size), whole)
        except OSError as exc:
            raise PublishError(f"version {version} is not offered: {name} cannot be read ({exc}).") from exc
        if checksums.get(name, whole.intdigest()) != whole.intdigest():
            raise PublishError(f"version {version} is not offered: {name} is not what its index says; publish again.")
    return Offer(url, version, index, length, [[name, size] for name, size in sizes.items()], bytes(digests))


def _checksums(files: Mapping[str, AnyBlob], version: int, index: str) -> Mapping[str, int]:
    """XXH3-64 of each file but the index, as that says."""
    blob = files.get(INDEX_FILE)
    try:
        if blob is None or blob.size > MAX_INDEX_BYTES:
            raise PublishError(f"version {version} is not offered: it has no {INDEX_FILE} that can be read.")
        with blob.opened() as read:
            data = read(0, blob.size)
    except OSError as exc:
        raise PublishError(f"version {version} is not offered: {INDEX_FILE} cannot be read ({exc}).") from exc
    if digest(data) != index:
        raise PublishError(f"version {version} is not offered: its {INDEX_FILE} is not the one that was announced.")
    checksums = index_in(data, f"the index of version {version}").files
    if other := {*checksums, INDEX_FILE} ^ files.keys():
        raise PublishError(
            f"version {version} is not offered: its index and its files differ by {min(other)!r}; publish again."
        )
    return checksums


def _digest_of(read: Read, start: int, end: int, whole: xxhash.xxh3_64) -> bytes:
    hasher = range_digest()
    while start < end:
        chunk = read(start, min(_CHUNK_BYTES, end - start))
        if not chunk:
            raise OSError("it became shorter")
        hasher.update(chunk)
        whole.update(chunk)
        start += len(chunk)
    return hasher.digest()
