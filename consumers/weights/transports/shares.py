"""Divide a copy in shared memory among parameter servers: written by the trainer, read by the servers.

    trainer    copy ─> shares ─> tables (name, dtype, shape, offset) in the copy's memory ─> their locations
    server     location of its table ─> tensors in the trainer's memory, mapped read-only

The tables are not sent through pipes, because a stalled server would block the trainer once a pipe is full.
"""

import json
import math
import mmap
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from penstock.consumers.weights.copies import Copy
from penstock.consumers.weights.shared_memory import SharedMemory
from penstock.consumers.weights.sources import buckets, dtype_name
from penstock.consumers.weights.transfer import Bucket
from penstock.errors import PublishError
from penstock.weights.index import MAX_DIMENSIONS

#: Location of a share: descriptor of the memory file, and offset and bytes of the table.
Span = list[int]


def shares_of(copy: Copy, num_servers: int, max_bucket_bytes: int) -> list[Bucket]:
    """Return the tensors of each server, the same as if it loaded files of a folder.

    checkpoint-engine reuses pinned memory only for a share with the same tensors, and a trainer's first version is
    loaded from files.
    """
    filled = list(buckets(copy, {}, max_bucket_bytes))
    return [[entry for bucket in filled[rank::num_servers] for entry in bucket] for rank in range(num_servers)]


def put(memory: SharedMemory, shares: list[Bucket]) -> list[Span]:
    """Write the tables of a copy's shares to ``memory``; return their locations. Raises PublishError: no memory."""
    tables = [
        json.dumps(
            [(name, dtype_name(tensor), tuple(tensor.shape), memory.offset_of(tensor)) for name, tensor in share]
        ).encode()
        for share in shares
    ]
    try:
        start = memory.put(b"".join(tables))
    except OSError as exc:
        raise PublishError(f"There is no memory for the tables of the parameter servers: {exc}.") from exc
    spans = []
    for table in tables:
        spans.append([memory.fd, start, len(table)])
        start += len(table)
    return spans


def read(span: Span) -> dict[str, Tensor]:
    """Return the tensors of a share, by name: read-only memory of the trainer, which will reuse it.

    Raises:
        ValueError: there is no such share.
    """
    fd, start, num_bytes = span
    bound = os.fstat(fd).st_size
    if not (0 <= start <= bound and 0 < num_bytes <= bound - start):
        raise ValueError(f"no table of a share is at {span}")
    mapped = mmap.mmap(fd, bound, prot=mmap.PROT_READ)
    found = {}
    for entry in json.loads(mapped[start : start + num_bytes]):
        name, tensor = _tensor(mapped, bound, entry)
        found[name] = tensor
    return found


def _tensor(mapped: mmap.mmap, bound: int, entry: Any) -> tuple[str, Tensor]:
    name, dtype, shape, offset = entry
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not (
        isinstance(name, str)
        and isinstance(kind, torch.dtype)
        and len(shape) <= MAX_DIMENSIONS
        and all(isinstance(one, int) and 0 <= one <= bound for one in (*shape, offset))
    ):
        raise ValueError(f"a share of a copy has no tensor like {entry!r:.200}")
    num_bytes = math.prod(shape) * kind.itemsize
    if num_bytes > bound - offset:
        raise ValueError(f"{name} is not in the memory that its share is of")
    if not num_bytes:
        return name, torch.empty(shape, dtype=kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=offset)
    return name, flat.view(kind).view(shape)
