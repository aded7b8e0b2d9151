"""A use of a group by a batch, recorded in the group in a run with a history: manifests may be deleted before it.

The field ``h:SUB`` of the hash ``group:JOB`` is ``N:CUT_MS:TRAIN:MASK_BELOW:MASKS:ABANDONED`` of each, separated by
``;``; what follows CUT_MS comes from the leader (``note``), the rest from ``cut.lua``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ProtocolError
from penstock.protocol.records.manifest import Manifest
from penstock.protocol.records.sample import SampleStatus
from penstock.protocol.records.sample_meta import SampleMeta
from penstock.text import safe_repr

#: Most characters of one group's uses by one subscription.
MAX_USES_BYTES = 1024 * 1024
#: MASKS is a sum of these.
_NEWEST_ONLY, _NO_TRUNCATED = 1, 2
#: Largest number: float64, as in Lua, is exact up to it.
MAX_NUMBER = 2**53


@dataclass(frozen=True, slots=True)
class BatchUse:
    """One batch that contained a group."""

    batch: int
    #: When it was cut (Unix time, seconds).
    cut_s: float
    #: Version that the trainer held at its first step; -1: no clock bounds the batch, and nothing ages.
    train_version: int
    #: Tokens of versions below this bore no loss; -1: any did.
    mask_below: int
    #: Tokens older than the newest of their sample bore no loss.
    newest_only: bool = False
    #: Ranges (first, last) of versions that age nothing.
    abandoned: tuple[tuple[int, int], ...] = ()
    #: Samples that ended at a limit bore no loss.
    no_truncated: bool = False

    def bearing(self, meta: SampleMeta) -> list[list[int]]:
        """Return the pairs (version, tokens) of a sample that bore loss in this batch, unless its payload was lost."""
        if self.no_truncated and meta.status == SampleStatus.TRUNCATED:
            return []
        floor = max(self.mask_below, meta.newest) if self.newest_only else self.mask_below
        return [pair for pair in meta.loss_by_version if pair[0] >= floor]

    def staleness(self, version: int) -> int:
        """Return the versions that changed the weights between ``version`` and the batch (T2); 0 if nothing ages."""
        if self.train_version < 0 or version < 0:
            return 0
        uncounted = sum(
            max(0, min(last, self.train_version) - max(first, version + 1) + 1) for first, last in self.abandoned
        )
        return max(0, self.train_version - version - uncounted)


def note(manifest: Manifest, *, clocked: bool) -> str:
    """Return the leader's part of the record when a batch is cut. ``clocked``: a model's clock bounds it."""
    train = manifest.train_version if clocked else -1
    abandoned = ",".join(f"{first}-{last}" for first, last in manifest.abandoned)
    masks = _NEWEST_ONLY * manifest.mask_offpolicy | _NO_TRUNCATED * manifest.mask_truncated
    return f"{train}:{manifest.mask_below}:{masks}:{abandoned}"


def uses_of(text: bytes, what: str) -> list[BatchUse]:
    """Parse the uses in a field ``h:SUB``. Raises ProtocolError, which begins with ``what``."""
    try:
        if len(text) > MAX_USES_BYTES:
            raise ValueError("too long")
        return [_use(one.split(":")) for one in text.decode("ascii").split(";")]
    except ValueError as exc:
        raise ProtocolError(f"{what} holds uses that no cut wrote: {safe_repr(text[:200])}.") from exc


def _use(parts: Sequence[str]) -> BatchUse:
    batch, cut_ms, train, mask_below, masks, abandoned = parts
    return BatchUse(
        _whole(batch),
        _whole(cut_ms) / 1000,
        _whole(train),
        _whole(mask_below),
        bool(_whole(masks) & _NEWEST_ONLY),
        tuple(_span(span) for span in abandoned.split(",") if span),
        no_truncated=bool(_whole(masks) & _NO_TRUNCATED),
    )


def _whole(text: str) -> int:
    number = int(text)
    if not -1 <= number <= MAX_NUMBER:
        raise ValueError("too large")
    return number


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last)
