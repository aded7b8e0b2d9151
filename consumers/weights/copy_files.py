"""Serve a copy in memory as the files that its folder will have, byte for byte, until the folder is complete.

copy ─buckets─> files of tensors ─┬─> blobs, which read the copy a piece at a time
model's folder ─> config, tokenizer ┘    and the index, whose digest names the version
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from penstock.consumers.weights.copies import Copy
from penstock.consumers.weights.http.serving import CopyFiles
from penstock.consumers.weights.publish import companions, layout_of, parts_of, require_config
from penstock.consumers.weights.sources import buckets
from penstock.protocol.records.copied import Copied
from penstock.redis.control import Control
from penstock.system.checksum import bytes_xxh3
from penstock.weights.http.blobs import AnyBlob, BufferBlob
from penstock.weights.index import INDEX_FILE, TensorEntry, digest, index_bytes
from penstock.weights.tensor_file import FILES_JSON, file_names, files_json, order_of

#: Bytes for which a later copy may have to wait.
_CHUNK_BYTES = 4 * 1024**2


class ServedCopy:
    """A copy of an announced version that is served until its folder is complete (``http/serving.py``).

    Args:
        model, max_bucket_bytes: as of ``files_of_copy``.
        tell: has workers look for it, by the given connection; whether they may.
    """

    def __init__(
        self, version: int, copy: Copy, model: Path, max_bucket_bytes: int, tell: Callable[[Control, Copied], bool]
    ) -> None:
        self.version = version
        self._copy, self._model, self._max_bucket_bytes, self._tell = copy, model, max_bucket_bytes, tell

    @property
    def is_gone(self) -> bool:
        """Whether its memory went to a later one."""
        return self._copy.is_gone

    def files(self) -> CopyFiles:
        """Make the files, see ``files_of_copy``."""
        return files_of_copy(self._copy, self._model, self._max_bucket_bytes)

    def tell(self, control: Control, index: str) -> bool:
        """Have workers look for it; whether they may. Blocks for a round trip."""
        return self._tell(control, Copied(self.version, index))


def files_of_copy(copy: Copy, model: Path, max_bucket_bytes: int) -> CopyFiles:
    """Return the files that ``write_weights`` makes of a copy. Blocks for reading all of it once.

    Args:
        model: folder of the first policy.
        max_bucket_bytes: as the folder is written with.

    Raises:
        PublishError: the model's folder has no config.json.
        OSError: the copy is gone, or a file of the model's folder cannot be read.
    """
    files: dict[str, AnyBlob] = {}
    checksums: dict[str, int] = {}
    for path in companions(model):
        data = path.read_bytes()
        files[path.name], checksums[path.name] = BufferBlob([data]), bytes_xxh3(data)
    entries: list[TensorEntry] = []
    filled = list(buckets(copy, require_config(model), max_bucket_bytes))
    for name, bucket in zip(file_names(len(filled)), filled, strict=True):
        tensors = dict(bucket)
        parts = parts_of(tensors)
        files[name] = BufferBlob(parts, copy.kept)
        checksums[name], each = _checksums(copy, parts)
        of = dict(zip(order_of(layout_of(tensors)), each, strict=True))
        for tensor, (dtype, shape) in layout_of(tensors).items():
            entries.append(TensorEntry(tensor, dtype, shape, of[tensor], name))
    if len(filled) > 1:
        data = files_json(entries)
        files[FILES_JSON], checksums[FILES_JSON] = BufferBlob([data]), bytes_xxh3(data)
    index = index_bytes(entries, checksums, {name: blob.size for name, blob in files.items()})
    files[INDEX_FILE] = BufferBlob([index])
    return CopyFiles(digest(index), files)


def _checksums(copy: Copy, parts: Sequence[bytes | memoryview]) -> tuple[int, list[int]]:
    """XXH3-64 of all parts together, and of each but the first, which is a header."""
    whole = xxhash.xxh3_64(parts[0])
    found = []
    for part in parts[1:]:
        own = xxhash.xxh3_64()
        for start in range(0, len(part), _CHUNK_BYTES):
            with copy.kept():
                own.update(part[start : start + _CHUNK_BYTES])
                whole.update(part[start : start + _CHUNK_BYTES])
        found.append(own.intdigest())
    return whole.intdigest(), found
