"""Names, dtypes and shapes in safetensors files, read from their headers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PublishError
from penstock.system.disk import open_plain
from penstock.weights.model_folder import read_config
from penstock.weights.safetensors_header import MAX_HEADER_BYTES, METADATA_BYTES, parse_header, take_header

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
    """Tensors of one safetensors file. Blocks for the disk.

    Args:
        max_bytes: most of its header.

    Raises:
        PublishError: it cannot be read, is not a safetensors file, or shorter or longer than its header says.
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
    """Tensors of all safetensors files of a folder; empty where there is none. Blocks for the disk.

    Args:
        rooms: most bytes of the header of each (``header_rooms``); None: what the format allows.

    Raises:
        PublishError: as ``read_header``.
    """
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        room = MAX_HEADER_BYTES if rooms is None else rooms.get(path.name, METADATA_BYTES)
        tensors.update(read_header(path, room))
    return tensors


def has_tied_embeddings(folder: Path) -> bool:
    """Whether the model in ``folder`` uses its input embeddings as output embeddings."""
    return bool(read_config(folder).get("tie_word_embeddings", False))


def as_safetensors(dtype: Any) -> str:
    """Safetensors name of a dtype given in either notation."""
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
