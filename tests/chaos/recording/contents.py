"""What weights are called in a history: by what their tensors are, wherever they lie, in a copy or in a folder.

Two sets of weights have one name exactly where names, dtypes, shapes and bytes of all tensors are equal; in which files
and in what order they lie is nothing of it. A folder is named by what its files hold.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import xxhash

Tensor = tuple[str, str, Sequence[int], int]


def name_of(tensors: Iterable[Tensor]) -> str:
    """The name of weights, from name, dtype (without ``torch.``), shape and XXH3-64 of each tensor."""
    told = sorted((name, dtype, tuple(shape), checksum) for name, dtype, shape, checksum in tensors)
    return blake2b(repr(told).encode(), digest_size=12).hexdigest()


def of_tensors(tensors: Iterable[tuple[str, Any]]) -> str:
    """That of torch's tensors in host memory."""
    return name_of(
        (name, str(one.dtype).removeprefix("torch."), tuple(one.shape), xxhash.xxh3_64_intdigest(_bytes_of(one)))
        for name, one in tensors
    )


def of_folder(folder: str, index: str) -> str:
    """That of a folder whose index has this digest; '' where there is no such index. Blocks for the disk."""
    from penstock.errors import PublishError
    from penstock.weights.index import read_index

    try:
        read_index(Path(folder), index)
        return of_files(Path(folder))
    except (PublishError, OSError):
        return ""


def of_files(folder: Path) -> str:
    """That of the tensors in a folder's files themselves, as an engine reads them; numpy knows their dtypes."""
    from safetensors.numpy import load_file

    found = {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}
    return name_of(
        (name, str(one.dtype), one.shape, xxhash.xxh3_64_intdigest(one.tobytes())) for name, one in found.items()
    )


def _bytes_of(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
