"""Read and write headers of safetensors files: names, dtypes and shapes. Knows no torch."""

import json
import math
import operator
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.errors import PublishError
from penstock.model.folder import read_config
from penstock.system.disk import open_plain
from penstock.weights.index import DTYPE_BYTES, TensorEntry

#: The format's own bound.
MAX_HEADER_BYTES = 100 * 1024 * 1024
#: Room in a header beside its tensors.
METADATA_BYTES = 64 * 1024


class TensorInfo(NamedTuple):
    """Describe one tensor as its header does."""

    #: Safetensors' name.
    dtype: str
    shape: tuple[int, ...]
    #: First byte, and the one behind the last, counted from the end of the header.
    start: int
    end: int


def header_rooms(entries: Iterable[TensorEntry]) -> dict[str, int]:
    """Return the most bytes of each file's safetensors header. A parsed header takes thirty times its bytes."""
    rooms: dict[str, int] = defaultdict(lambda: METADATA_BYTES)
    for entry in entries:
        # Each byte of a name may be escaped by six characters; a number of a shape has at most 15 digits.
        rooms[entry.file] += 6 * len(entry.name.encode(errors="replace")) + 20 * len(entry.shape) + 160
    return {name: min(room, MAX_HEADER_BYTES) for name, room in rooms.items()}


def take_header(file: BinaryIO, path: Path, max_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """Read the header of an open file, including its 8 bytes of length. Blocks for the disk.

    Raises:
        PublishError: no header, or longer than the file or ``max_bytes``; it was not read. OSError.
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
    """Return the tensors in the order of their bytes. All headers are parsed here.

    Args:
        header: including its 8 bytes of length; the caller has bounded its size.
        file: named in the error.

    Raises:
        PublishError: invalid header, or its tensors are not contiguous.
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


#: Name -> (safetensors dtype, shape).
Tensors = dict[str, tuple[str, tuple[int, ...]]]

#: torch's name -> that of the files.
_DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
#: Loading casts between these.
_PLAIN_FLOATS = {"F32", "F16", "BF16", "F64"}


def read_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> Tensors:
    """Return the tensors of one safetensors file. Blocks for the disk.

    Args:
        max_bytes: most bytes of its header.

    Raises:
        PublishError: the file cannot be read, is not a safetensors file, or has another length than its header says.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = take_header(file, path, max_bytes)
    except (OSError, ValueError) as exc:  # a path with a NUL is the latter
        raise PublishError(f"{path} cannot be read ({exc}): publish it again.") from exc
    infos = parse_header(header, path)
    end = len(header) + max((info.end for info in infos.values()), default=0)
    if end != size:
        raise PublishError(f"{path} has {size} bytes where its header says {end}: publish it again.")
    return {name: (info.dtype, info.shape) for name, info in infos.items()}


def read_folder(folder: Path, rooms: Mapping[str, int] | None = None) -> Tensors:
    """Return the tensors of all safetensors files of a folder. Blocks for the disk.

    Args:
        rooms: most bytes of each file's header (``header_rooms``); None: the format's limit.

    Raises:
        PublishError: as ``read_header``.
    """
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        room = MAX_HEADER_BYTES if rooms is None else rooms.get(path.name, METADATA_BYTES)
        tensors.update(read_header(path, room))
    return tensors


def has_tied_embeddings(folder: Path) -> bool:
    """Return whether the model in ``folder`` uses its input embeddings as output embeddings."""
    return bool(read_config(folder).get("tie_word_embeddings", False))


def as_safetensors(dtype: Any) -> str:
    """Return the safetensors name of a dtype given in either notation."""
    plain = str(dtype).removeprefix("torch.")
    return _DTYPES.get(plain, plain)


def compare_layouts(
    what: str, other: str, found: Tensors, wanted: Tensors, ignored: set[str], *, cast: bool = False
) -> None:
    """Raise PublishError, naming a tensor, unless both have the same names, shapes and dtypes.

    Args:
        what, other: words for ``found`` and ``wanted``.
        ignored: names that either may lack.
        cast: plain floats may differ: loading casts between them.
    """
    missing, extra = wanted.keys() - found.keys() - ignored, found.keys() - wanted.keys() - ignored
    if missing:
        instead = f", and has {len(extra)} others, such as {min(extra)!r}" if extra else ""
        raise PublishError(f"{what} lacks {len(missing)} tensors of {other}, such as {min(missing)!r}{instead}.")
    if extra:
        raise PublishError(f"{what} has {len(extra)} tensors that {other} does not have, such as {min(extra)!r}.")
    for name in wanted.keys() & found.keys():
        (dtype, shape), (other_dtype, other_shape) = found[name], wanted[name]
        if shape != other_shape:
            raise PublishError(f"{what}: {name} has shape {list(shape)}, {other} has {list(other_shape)}.")
        if dtype != other_dtype and not (cast and {dtype, other_dtype} <= _PLAIN_FLOATS):
            raise PublishError(f"{what}: {name} is {dtype}, {other} has {other_dtype}.")


#: Name -> dtype (torch's, without ``torch.``) and shape.
Layout = Mapping[str, tuple[str, tuple[int, ...]]]

#: Maps tensors to files, if the version has several.
FILES_JSON = "model.safetensors.index.json"
#: Headers are padded to a multiple of it, which aligns the tensors.
_ALIGN_BYTES = 8


def order_of(layout: Layout) -> list[str]:
    """Return the names in file order: larger elements first, so that each tensor is aligned to its element size."""
    return sorted(layout, key=lambda name: -DTYPE_BYTES.get(layout[name][0], 0))


def header_of(layout: Layout) -> bytes:
    """Return the header of a file whose tensors follow end to end in ``order_of``.

    Files on disk and files served from memory both use it, so their bytes are the same. Raises PublishError on an
    unknown dtype.
    """
    if unknown := {dtype for dtype, _ in layout.values()} - DTYPE_BYTES.keys():
        raise PublishError(f"There are tensors of {min(unknown)}, which no engine loads: publish another dtype.")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order_of(layout):
        dtype, shape = layout[name]
        end = at + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": as_safetensors(dtype), "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def file_names(count: int) -> list[str]:
    """Return the names of the files of a version with ``count`` files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}.safetensors" for number in range(1, count + 1)]


def files_json(entries: Sequence[TensorEntry]) -> bytes:
    """Return the content of ``FILES_JSON``."""
    where, total = {one.name: one.file for one in entries}, sum(one.num_bytes for one in entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1).encode()
