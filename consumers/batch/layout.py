"""How arrays of a batch lie: runs of versions, padding, tensors; and what a manifest may not claim. Nothing blocks."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.consumers.batch.behaviour import check_kinds
from penstock.errors import PayloadError, ProtocolError
from penstock.payloads import Payload
from penstock.protocol.records.manifest import Manifest, Row
from penstock.protocol.staleness import Lineage

if TYPE_CHECKING:
    import torch


def runs(payload: Payload | None, length: int) -> Iterator[tuple[int, int]]:
    """(tokens, version) of a sample from end to end; -1 where nothing was drawn."""
    at = 0
    for start, end, version in payload.spans if payload is not None else ():
        if start > at:
            yield start - at, -1
        yield end - start, version
        at = end
    if length > at:
        yield length - at, -1


def pad(flat: NDArray[Any], lengths: NDArray[np.int64], blank: float) -> NDArray[Any]:
    """[T] as [B, L], padded on the right; without a copy where all are of one length."""
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
    """Raise ProtocolError where a manifest contradicts itself, or breaks its own staleness bound (I6)."""
    what = f"batch {manifest.n} of {manifest.sub}"
    if (total := sum(row.num_loss for row in rows)) != manifest.num_loss_tokens:
        raise ProtocolError(f"{what}: its rows have {total} loss tokens, its manifest {manifest.num_loss_tokens}.")
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
                f"{what}: sample {row.sample} bears loss on version {row.oldest_loss}, which comes after version "
                f"{manifest.train_version}, the one it is trained at."
            )


def check_sides(rows: Sequence[Row], needed: Sequence[object], name: str, n: int) -> None:
    """Raise PayloadError where a row that is ``needed`` (truthy) has no side array ``name``, and is not lost.

    By rows alone: whoever calls it with those of all ranks has all ranks stop, and none wait for another.

    Args:
        n: number of the batch.
    """
    for row, is_needed in zip(rows, needed, strict=True):
        if is_needed and not row.lost and not any(side[0] == name for side in row.sides):
            raise PayloadError(
                f"sample {row.sample} has no side array {name!r}, and others of batch {n} have: it was drawn before "
                "the run asked for it; leave the key out, or begin the run anew."
            )


def tensors(arrays: dict[str, Any], device: "str | torch.device | None") -> dict[str, Any]:
    """Numpy arrays as torch tensors, on ``device`` (host memory if None); other values stay what they are."""
    import torch

    out = {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in arrays.items()}
    if device is None or torch.device(device).type == "cpu":
        return out
    # Pinned, so that the copies run beside the host.
    return {
        key: value.pin_memory().to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for key, value in out.items()
    }
