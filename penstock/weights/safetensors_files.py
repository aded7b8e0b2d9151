"""Names, dtypes and shapes in safetensors files, read from their headers (8 bytes of length, then JSON)."""

import json
import operator
import os
from pathlib import Path
from typing import Any

from penstock.errors import PublishError
from penstock.system.disk import open_plain
from penstock.weights.model_folder import read_config

#: Name -> (safetensors dtype, shape).
Tensors = dict[str, tuple[str, tuple[int, ...]]]

MAX_HEADER_BYTES = 100 * 1024 * 1024
#: torch's name -> that of the files.
_DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
#: Loading casts between these.
_PLAIN_FLOATS = {"F32", "F16", "BF16", "F64"}


def read_header(path: Path) -> Tensors:
    """Tensors of one safetensors file.

    Raises:
        PublishError: it cannot be read, is not a safetensors file, or shorter or longer than its header says.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header: dict[str, Any] = dict(json.loads(file.read(length)))
        header.pop("__metadata__", None)
        end = max((operator.index(entry["data_offsets"][1]) for entry in header.values()), default=0)
        shapes = {name: tuple(map(operator.index, entry["shape"])) for name, entry in header.items()}
        tensors = {name: (str(entry["dtype"]), shapes[name]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as exc:
        raise PublishError(f"{path} is not a whole safetensors file ({exc}): publish it again.") from exc
    except OSError as exc:
        raise PublishError(f"{path} cannot be read ({exc}): publish it again.") from exc
    if 8 + length + end != size:
        raise PublishError(f"{path} has {size} bytes where its header says {8 + length + end}: publish it again.")
    return tensors


def read_folder(folder: Path) -> Tensors:
    """Tensors of all safetensors files of a folder; empty where there is none."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(read_header(path))
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
