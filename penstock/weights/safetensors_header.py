"""What stands before the tensors of a safetensors file: 8 bytes of length, then JSON. Read within bounds."""

import json
import operator
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.errors import PublishError
from penstock.weights.index import TensorEntry

#: The format's own bound.
MAX_HEADER_BYTES = 100 * 1024 * 1024
#: Room in a header beside its tensors.
METADATA_BYTES = 64 * 1024


class TensorInfo(NamedTuple):
    """What a header says of one tensor."""

    #: Safetensors' name.
    dtype: str
    shape: tuple[int, ...]
    #: Of its bytes, from the end of the header on.
    start: int
    end: int


def header_rooms(entries: Iterable[TensorEntry]) -> dict[str, int]:
    """File -> most bytes of its safetensors header, whoever wrote it: once it is read it takes thirty times as many."""
    rooms: dict[str, int] = defaultdict(lambda: METADATA_BYTES)
    for entry in entries:
        # Of a name every byte may be escaped by six characters; a number of a shape has no more than 15 digits.
        rooms[entry.file] += 6 * len(entry.name.encode(errors="replace")) + 20 * len(entry.shape) + 160
    return {name: min(room, MAX_HEADER_BYTES) for name, room in rooms.items()}


def take_header(file: BinaryIO, path: Path, max_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """The header of an open file, from its 8 bytes of length on; its tensors are next. Blocks for the disk.

    Raises:
        PublishError: there is none, or it is longer than the file or ``max_bytes``; nothing of it was read. OSError.
    """
    size, length = os.fstat(file.fileno()).st_size, file.read(8)
    num_bytes = int.from_bytes(length, "little")
    if not 0 < num_bytes <= min(max_bytes, size - 8):
        raise PublishError(
            f"{path} is not a whole safetensors file (a header of {num_bytes} bytes in a file of {size}): "
            "publish it again."
        )
    return length + file.read(num_bytes)


def parse_header(header: bytes, file: Path | str) -> dict[str, TensorInfo]:
    """Tensors in the order of their bytes; a header is parsed here alone.

    Args:
        header: from its 8 bytes of length on, held to a bound by whoever took it.
        file: named in the error.

    Raises:
        PublishError: it is no header, or its tensors do not lie end to end, as the format has them.
    """
    try:
        claimed: dict[str, Any] = dict(json.loads(header[8:]))
        claimed.pop("__metadata__", None)
        infos = sorted(((name, _info(claim)) for name, claim in claimed.items()), key=lambda one: one[1][2:])
        at = 0
        for name, info in infos:
            if not info.start == at <= info.end:
                raise ValueError(f"{name!r:.200} is not at byte {at}, where what is before it ends")
            at = info.end
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as exc:
        raise PublishError(f"{file} is not a whole safetensors file ({exc}): publish it again.") from exc
    return dict(infos)


def _info(claim: dict[str, Any]) -> TensorInfo:
    start, end = map(operator.index, claim["data_offsets"])
    return TensorInfo(str(claim["dtype"]), tuple(map(operator.index, claim["shape"])), start, end)
