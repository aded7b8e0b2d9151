"""Let one replica read the payloads of a share and broadcast them to its other replicas (T14).

Each replica reads the manifest itself, and replicas synchronize outside the collective, so that no rank waits for data
inside a collective. ``torch.distributed`` carries only bytes, never objects.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.consumers.batch.fetch import Bytes
from penstock.errors import ConfigError, PayloadError
from penstock.records.manifest import Row

#: Largest broadcast, in bytes.
CHUNK_BYTES = 256 * 1024 * 1024
_GONE, _FAILED = -1, -2

Read = Callable[[Sequence[Row]], dict[str, Bytes | None]]


def check_group(group: Any, replica: int, num_replicas: int) -> None:
    """Raise ConfigError unless ``group`` contains the replicas in order and supports host memory."""
    if dist.get_world_size(group) != num_replicas or dist.get_rank(group) != replica:
        raise ConfigError(
            f"replica_group has {dist.get_world_size(group)} ranks with this process at {dist.get_rank(group)}, but "
            f"this is replica {replica} of {num_replicas}: pass the group of the replicas of one dp_rank, in order."
        )
    if "gloo" not in str(dist.get_backend(group)):
        raise ConfigError(
            f"replica_group uses {dist.get_backend(group)}, which does not support host memory: create it with "
            "torch.distributed.new_group(ranks, backend='gloo')."
        )


def share(group: Any, rows: Sequence[Row], read: Read) -> dict[str, Bytes | None]:
    """Return the payloads of ``rows`` by sample id on every replica; only the first replica calls ``read``.

    Collective, blocks.

    Raises:
        PayloadError: the first replica failed to read, and raised the original error.
    """
    first = dist.get_global_rank(group, 0)
    sizes = torch.full((len(rows) + 1,), _FAILED, dtype=torch.int64)
    if dist.get_rank(group) == 0:
        try:
            found = read(rows)
            sizes[0] = 0
            for i, row in enumerate(rows):
                data = found[row.payload_id]
                sizes[i + 1] = _GONE if data is None else len(data)
        finally:
            dist.broadcast(sizes, first, group=group)
        joined = b"".join(data for row in rows if (data := found[row.payload_id]) is not None)
        _broadcast(torch.from_numpy(np.frombuffer(bytearray(joined), np.uint8)), first, group)
        return found
    dist.broadcast(sizes, first, group=group)
    counts = sizes.tolist()
    if counts[0] == _FAILED:
        raise PayloadError("The replica that reads payloads failed: stop all replicas, and check its log.")
    whole = torch.empty(sum(max(count, 0) for count in counts[1:]), dtype=torch.uint8)
    _broadcast(whole, first, group)
    view, at = memoryview(whole.numpy().data), 0
    out: dict[str, Bytes | None] = {}
    for row, count in zip(rows, counts[1:], strict=True):
        out[row.payload_id] = None if count == _GONE else view[at : at + count]
        at += max(count, 0)
    return out


def _broadcast(data: torch.Tensor, first: int, group: Any) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        dist.broadcast(data[start : start + CHUNK_BYTES], first, group=group)
