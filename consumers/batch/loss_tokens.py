"""Decide which tokens of a batch bear loss here, from their staleness, and compute the loss denominators (T10).

Everything is computed from the manifest, which every rank has. Nothing here blocks.
"""

from collections.abc import Collection, Sequence

from penstock.protocol.records.manifest import Manifest, Row
from penstock.protocol.staleness import Lineage


class LossTokens:
    """Loss tokens of the rows of one batch.

    Args:
        rows: of the complete batch.
        max_staleness: tokens staler than this bear no loss here, whatever the bound of the cut was; None: mask no
            more.
    """

    def __init__(self, manifest: Manifest, rows: Sequence[Row], max_staleness: int | None = None) -> None:
        self.max_staleness = max_staleness
        self._rows = rows
        self._train_version = manifest.train_version
        self._lineage = Lineage(tuple((first, last) for first, last in manifest.abandoned))
        self._lags: dict[int, int] = {}
        #: Ids of samples that bear no loss here, whatever the manifest says.
        self.removed: set[str] = set()
        #: Loss tokens of each row of the complete batch.
        self.per_row = [self.of(row) for row in rows]

    def staleness(self, version: int) -> int:
        """Return steps of the lineage from ``version`` to the train version (T2); -1 for tokens not generated."""
        if version not in self._lags:
            self._lags[version] = self._lineage.lag(version, self._train_version) if version >= 0 else -1
        return self._lags[version]

    def remove(self, indices: Collection[int]) -> None:
        """Remove the loss from these rows of the complete batch."""
        self.removed |= {self._rows[i].sample for i in indices}
        self.per_row = [self.of(row) for row in self._rows]

    def of(self, row: Row) -> int:
        """Return the number of a row's tokens that bear loss here."""
        if row.sample in self.removed:
            return 0
        if self.max_staleness is None or not row.num_loss:
            return row.num_loss
        by_version = row.loss_versions or [[row.oldest_loss, row.num_loss]]
        return sum(count for version, count in by_version if self.staleness(version) <= self.max_staleness)

    def counts(self, indices: Collection[int]) -> dict[str, int]:
        """Return denominators of the loss over these rows of the complete batch, see ``Batch.counts``."""
        bearing = [self.per_row[i] for i in indices]
        return {
            "loss_tokens": sum(bearing),
            "loss_samples": sum(1 for count in bearing if count),
            "samples": len(bearing),
            "groups": len({self._rows[i].job for i in indices}),
        }
