"""Read headers of safetensors files: names, dtypes and shapes. Knows no torch."""

import json
import operator
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PublishError
from penstock.model.folder import read_config
from penstock.system.disk import open_plain
from penstock.weights.index import TensorEntry

#: The format's own bound.
MAX_HEADER_BYTES = 100 * 1024 * 1024
#: Room in a header beside its tensors.
METADATA_BYTES = 64 * 1024


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


def header_rooms(entries: Iterable[TensorEntry]) -> dict[str, int]:
    """Return the most bytes of each file's safetensors header. A parsed header takes thirty times its bytes."""
    rooms: dict[str, int] = defaultdict(lambda: METADATA_BYTES)
    for entry in entries:
        # Each byte of a name may be escaped by six characters; a number of a shape has at most 15 digits.
        rooms[entry.file] += 6 * len(entry.name.encode(errors="replace")) + 20 * len(entry.shape) + 160
    return {name: min(room, MAX_HEADER_BYTES) for name, room in rooms.items()}


def read_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> Tensors:
    """Return the tensors of one safetensors file; a header of more than ``max_bytes`` is not read. Blocks for the disk.

    Raises PublishError: the file cannot be read, is not a safetensors file, or has another length than its header says.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            num_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < num_bytes <= min(max_bytes, size - 8):
                raise ValueError(f"a header of {num_bytes} bytes in a file of {size}")
            header = file.read(num_bytes)
    except OSError as exc:
        raise PublishError(f"{path} cannot be read ({exc}): publish it again.") from exc
    except ValueError as exc:  # also a path with a NUL
        raise PublishError(f"{path} is not a whole safetensors file ({exc}): publish it again.") from exc
    tensors, end = _parse(header, path)
    if 8 + num_bytes + end != size:
        raise PublishError(f"{path} has {size} bytes where its header says {8 + num_bytes + end}: publish it again.")
    return tensors


def _parse(header: bytes, path: Path) -> tuple[Tensors, int]:
    """Return the tensors of an untrusted header, and the number of their bytes, which must be contiguous."""
    try:
        claimed: dict[str, Any] = dict(json.loads(header))
        claimed.pop("__metadata__", None)
        spans = {name: tuple(map(operator.index, claim["data_offsets"])) for name, claim in claimed.items()}
        at = 0
        for name, (start, end) in sorted(spans.items(), key=lambda one: one[1]):
            if not start == at <= end:
                raise ValueError(f"{name!r:.200} is not at byte {at}, where what is before it ends")
            at = end
        return {
            name: (str(claim["dtype"]), tuple(map(operator.index, claim["shape"]))) for name, claim in claimed.items()
        }, at
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as exc:
        raise PublishError(f"{path} is not a whole safetensors file ({exc}): publish it again.") from exc


def read_folder(folder: Path, rooms: Mapping[str, int] | None = None) -> Tensors:
    """Return the tensors of all safetensors files of a folder. Blocks for the disk. Raises as ``read_header``.

    Args:
        rooms: most bytes of each file's header (``header_rooms``); None: the format's limit.
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
