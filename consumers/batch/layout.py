"""Lay out arrays of a batch (version runs, padding, tensors) and check its manifest. Nothing blocks."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.consumers.batch.behaviour import check_kinds
from penstock.errors import PayloadError, ProtocolError
from penstock.payloads import Payload
from penstock.protocol.staleness import Lineage
from penstock.records.manifest import Manifest, Row

if TYPE_CHECKING:
    import torch


def runs(payload: Payload | None, length: int) -> Iterator[tuple[int, int]]:
    """Yield the version runs (tokens, version) of a sample; version -1 for tokens that were not generated."""
    at = 0
    for start, end, version in payload.spans if payload is not None else ():
        if start > at:
            yield start - at, -1
        yield end - start, version
        at = end
    if length > at:
        yield length - at, -1


def pad(flat: NDArray[Any], lengths: NDArray[np.int64], blank: float) -> NDArray[Any]:
    """Reshape [T] to [B, L], padded on the right, without a copy if all lengths are equal."""
    longest = int(lengths.max())
    if len(flat) == len(lengths) * longest:
        return flat.reshape(len(lengths), longest)
    padded: NDArray[Any] = np.full((len(lengths), longest), blank, flat.dtype)
    end = 0
    for i, length in enumerate(lengths.tolist()):
        padded[i, :length] = flat[end : end + length]
        end += length
    return padded


def check_manifest(manifest: Manifest, rows: Sequence[Row]) -> None:
    """Raise ProtocolError if a manifest is inconsistent or violates its staleness bound (I6)."""
    what = f"batch {manifest.n} of {manifest.sub}"
    if (total := sum(row.num_loss for row in rows)) != manifest.num_loss_tokens:
        raise ProtocolError(f"{what}: rows have {total} loss tokens, but the manifest has {manifest.num_loss_tokens}.")
    check_kinds(rows, what)
    lineage = Lineage(tuple((first, last) for first, last in manifest.abandoned))
    for row in rows:
        if row.lost and row.num_loss:
            raise ProtocolError(f"{what}: sample {row.sample} is lost, but {row.num_loss} of its tokens bear loss.")
        if not row.num_loss or manifest.bound < 0:
            continue
        staleness = lineage.lag(row.oldest_loss, manifest.train_version)
        if staleness > manifest.bound:
            raise ProtocolError(
                f"{what}: sample {row.sample} bears loss on version {row.oldest_loss}, which is {staleness} living "
                f"versions behind {manifest.train_version}; the bound is {manifest.bound} (I6)."
            )
        if row.oldest_loss > manifest.train_version:
            raise ProtocolError(
                f"{what}: sample {row.sample} bears loss on version {row.oldest_loss}, which is newer than its train "
                f"version {manifest.train_version}."
            )


def check_sides(rows: Sequence[Row], needed: Sequence[object], name: str, n: int) -> None:
    """Raise PayloadError if a row that is ``needed`` (truthy) and not lost lacks side array ``name``.

    Called with the rows of all ranks, it raises on all ranks, so that none waits for another.

    Args:
        n: number of the batch.
    """
    for row, is_needed in zip(rows, needed, strict=True):
        if is_needed and not row.lost and not any(side[0] == name for side in row.sides):
            raise PayloadError(
                f"sample {row.sample} lacks side array {name!r}, which other samples of batch {n} have, because it was "
                "generated before the array was configured: omit the key, or start a new run."
            )


def tensors(arrays: dict[str, Any], device: "str | torch.device | None") -> dict[str, Any]:
    """Convert numpy arrays to torch tensors on ``device`` (host memory if None); keep other values."""
    import torch

    out = {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in arrays.items()}
    if device is None or torch.device(device).type == "cpu":
        return out
    # Pin the memory for asynchronous copies.
    return {
        key: value.pin_memory().to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in out.items()
    }
