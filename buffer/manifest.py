"""Make the manifest of a batch: its rows, the denominators of the loss, and the staleness of its tokens."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any

from penstock.buffer.decision import Cut
from penstock.buffer.group import Group
from penstock.buffer.state import State
from penstock.buffer.subscription import Subscription
from penstock.protocol.partition import batch_seed
from penstock.protocol.staleness import Lineage
from penstock.records.disposal import Disposal
from penstock.records.manifest import Manifest, Row
from penstock.records.sample import SampleStatus
from penstock.records.sample_meta import Part, SampleMeta

#: Fields of a committed sample that are copied to its manifest row.
_STORED = attrgetter("token", "server", "checksum", "num_bytes")
_LENGTHS = attrgetter("length", "prompt_length", "num_generated")
_VERSIONS = attrgetter("oldest", "newest")
_AFTER = attrgetter("reward", "status", "temperature")
#: Reason of groups that were dropped unfinished because they timed out.
TIMED_OUT = "timed_out"


@dataclass(slots=True)
class Ages:
    """Sum up the staleness of a batch's tokens that bear loss (T2)."""

    lineage: Lineage
    train_version: int
    #: False if the subscription follows no model's versions: every staleness is 0.
    counts: bool
    #: Oldest version whose tokens bear loss.
    floor: int
    #: Whether only tokens of the newest version of their sample, or part, bear loss.
    newest_only: bool = False
    #: Whether truncated samples bear no loss.
    masks_truncated: bool = False
    lags: dict[int, int] = field(default_factory=dict)
    loss_tokens: int = 0
    weighted: int = 0
    worst: int = 0
    #: Sum over rows of the lag of their newest token that bears loss, and the number of these rows.
    newest: int = 0
    samples: int = 0
    #: Oldest and newest version of tokens that bear loss; -1 if none does.
    oldest_loss: int = -1
    newest_loss: int = -1

    def lag(self, version: int) -> int:
        if version not in self.lags:
            self.lags[version] = self.lineage.lag(version, self.train_version) if self.counts else 0
        return self.lags[version]

    def add(self, loss_by_version: list[list[int]], newest_generated: int) -> list[list[int]]:
        """Add a row; return its (version, tokens) pairs that bear loss."""
        floor = max(self.floor, newest_generated) if self.newest_only else self.floor
        versions = [pair for pair in loss_by_version if pair[0] >= floor]
        if not versions:
            return []
        oldest, newest = min(versions)[0], max(versions)[0]
        for version, tokens in versions:
            self.loss_tokens += tokens
            self.weighted += self.lag(version) * tokens
        self.worst = max(self.worst, self.lag(oldest))
        self.newest += self.lag(newest)
        self.samples += 1
        self.oldest_loss = oldest if self.oldest_loss < 0 else min(self.oldest_loss, oldest)
        self.newest_loss = max(self.newest_loss, newest)
        return versions


def make_manifest(state: State, sub: Subscription, cut: Cut) -> Manifest:
    """Make the manifest of the next batch of ``sub``. Blocks for a round trip or two."""
    definition, lineage = sub.definition, sub.position.lineage
    bounded = bool(definition.model)
    mask_below = cut.policy.mask_below(cut.floor)
    ages = Ages(lineage, cut.train_version, bounded, mask_below, definition.mask_offpolicy, definition.mask_truncated)
    rows, oldest = _rows(cut, ages, state.records.read([group.job for group in cut.groups]))
    return Manifest(
        sub=sub.name,
        n=sub.position.cut + 1,
        train_version=cut.train_version,
        bound=cut.policy.bound,
        on_expiry=definition.on_expiry,
        mode=definition.mode,
        mask_below=mask_below,
        mask_offpolicy=definition.mask_offpolicy,
        mask_truncated=definition.mask_truncated,
        rows=rows,
        num_loss_tokens=ages.loss_tokens,
        num_samples=len(rows),
        num_groups=len(cut.groups),
        num_first_use=sum(1 for group in cut.groups if not group.uses.get(sub.account)),
        staleness_max=ages.worst,
        staleness_mean=ages.weighted / ages.loss_tokens if ages.loss_tokens else 0.0,
        staleness_newest=ages.newest / ages.samples if ages.samples else 0.0,
        staleness_steps=_count_steps(state, sub, cut, ages.oldest_loss),
        version_min=ages.oldest_loss,
        version_max=ages.newest_loss,
        seed=batch_seed(definition.seed, sub.position.cut + 1),
        split=definition.split,
        cut_s=time.time(),
        abandoned=lineage.uncounted(oldest, cut.train_version) if bounded else [],
        ledger=_ledger(sub, state.timed_out(sub)),
        num_partial_groups=sum(1 for group in cut.groups if group.wanted > group.n),
        num_missing_samples=sum(group.wanted - group.n for group in cut.groups),
    )


def bearing_of(manifest: Manifest, jobs: Iterable[str]) -> list[str]:
    """Return, for each of ``jobs``, the generated tokens that bear loss, ``K:TOKENS,...``, without given answers."""
    by_job: dict[str, dict[int, int]] = {}
    for row in manifest.rows:
        if row.num_loss and row.status != SampleStatus.GIVEN:
            by_k = by_job.setdefault(row.job, {})
            by_k[row.k] = by_k.get(row.k, 0) + row.num_loss
    return [",".join(f"{k}:{tokens}" for k, tokens in by_job.get(job, {}).items()) for job in jobs]


def _ledger(sub: Subscription, timed_out: int) -> dict[str, Any]:
    """Return the counts of what ``sub`` has not trained so far; {} if there are none."""
    position = sub.position
    dropped = dict(position.dropped) | ({TIMED_OUT: timed_out} if timed_out else {})
    if not dropped and not position.filter_raised:
        return {}
    return {
        "dropped": dropped,
        "raised": position.filter_raised,
        "rejected_samples": position.rejected_samples,
        "rejected_reward": position.rejected_reward,
        "aged_samples": position.aged_samples,
        "aged_tokens": position.aged_tokens,
    }


def _rows(cut: Cut, ages: Ages, found: Sequence[Sequence[SampleMeta]]) -> tuple[list[Row], int]:
    """Make the rows by group, then by k; return them with their oldest version (at most the train version)."""
    rows: list[Row] = []
    oldest = cut.train_version
    for group, records in zip(cut.groups, found, strict=True):
        # Sort: rows must not depend on the order of the commits.
        for record in sorted(records, key=attrgetter("k")):
            if record.oldest >= 0:
                oldest = min(oldest, record.oldest)
            rows += rows_of(group, record, ages)
    return rows, oldest


def rows_of(group: Group, record: SampleMeta, ages: Ages) -> list[Row]:
    """Return the row of an ordinary sample, or one for each part: those that bore loss when the sample was committed.

    If none did, the first part has a row, so that the sample is in the batch.
    """
    if not record.parts:
        return [_row_of(group, record, ages)]
    parts = record.all_parts
    begins = accumulate((part.length for part in parts), initial=0)
    found = list(zip(range(len(parts)), parts, begins, strict=False))
    bearing = [one for one in found if one[1].num_loss] or found[:1]
    return [_row_of(group, record, ages, *one) for one in bearing]


def _row_of(
    group: Group, record: SampleMeta, ages: Ages, index: int = 0, part: Part | None = None, begin: int = -1
) -> Row:
    k, of = record.k, record if part is None else part
    lost = k in group.lost
    is_cut_off = ages.masks_truncated and record.status == SampleStatus.TRUNCATED
    bearing = [] if lost or is_cut_off else ages.add(of.loss_by_version, of.newest)
    num_loss = sum([tokens for _, tokens in bearing])
    oldest_loss = min([version for version, _ in bearing], default=-1)
    # Positional arguments, in the order of Row's fields: keywords take five times as long.
    return Row(
        group.job, k, *_STORED(record), *_LENGTHS(of), num_loss, *_VERSIONS(of), oldest_loss, *_AFTER(record),
        lost, bearing if len(bearing) > 1 else [], record.shared, record.sides, record.logprob_kind,
        record.num_unproven, not record.num_loss, index, begin,
    )  # fmt: skip


def why_no_loss(group: Group, records: Sequence[SampleMeta], *, masks_truncated: bool = False) -> Disposal:
    """Return why no token of a group bears loss, for the ledger: its tokens are stale, its payloads are lost, or no
    sample (with ``masks_truncated``: no untruncated one) ever had a token that bears loss (``no_loss``)."""
    bearing = [
        record
        for record in records
        if record.num_loss and not (masks_truncated and record.status == SampleStatus.TRUNCATED)
    ]
    if not bearing:
        return Disposal.NO_LOSS
    gone = all(record.k in group.lost for record in bearing)
    return Disposal.PAYLOAD_LOST if gone else Disposal.STALE


def _count_steps(state: State, sub: Subscription, cut: Cut, oldest_loss: int) -> int:
    """Return how many batches were trained after the version of the oldest token that bears loss; -1 if unknown."""
    model = sub.definition.model
    before = state.batches_behind(model, oldest_loss) if model and oldest_loss >= 0 else None
    if before is None:
        return -1
    now = sub.position.cut if sub.definition.driving else state.batches_behind(model, cut.clock)
    return -1 if now is None else max(0, now - before)
