"""The bytes of a safetensors file: a header, then the tensors end to end. Knows no torch.

One function makes them for whoever writes a file and for whoever serves it out of memory, so that both have the same.
"""

import json
import math
from collections.abc import Mapping, Sequence

from penstock.errors import PublishError
from penstock.weights.index import DTYPE_BYTES, TensorEntry
from penstock.weights.safetensors_files import as_safetensors

#: Name -> dtype (torch's, without ``torch.``) and shape.
Layout = Mapping[str, tuple[str, tuple[int, ...]]]

#: Which file has which tensor, where there are several.
FILES_JSON = "model.safetensors.index.json"
#: What the length of a header is a multiple of, so that tensors are aligned.
_ALIGN_BYTES = 8


def order_of(layout: Layout) -> list[str]:
    """Names in the order of the file: those of larger elements first, so that each is aligned to its own."""
    return sorted(layout, key=lambda name: -DTYPE_BYTES.get(layout[name][0], 0))


def header_of(layout: Layout) -> bytes:
    """What comes before the tensors, which follow in ``order_of``. Raises PublishError on an unknown dtype."""
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
    """Of the files of a version that has so many."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}.safetensors" for number in range(1, count + 1)]


def files_json(entries: Sequence[TensorEntry]) -> bytes:
    """What ``FILES_JSON`` of a version of several files holds."""
    where, total = {one.name: one.file for one in entries}, sum(one.num_bytes for one in entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1).encode()
