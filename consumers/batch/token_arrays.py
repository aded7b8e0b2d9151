"""Make the arrays of a rank's samples from their payloads, and check them against the manifest.

    payloads ─> flat [T] of concatenated samples, one array per key ─> padded [B, L], or packed [T] with bounds

Vectorized over all samples: Python work is per key, not per sample and key.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import payloads
from penstock.consumers.batch import layout
from penstock.consumers.batch.fetch import OpenedPayloads
from penstock.errors import PayloadError, ProtocolError
from penstock.names import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from penstock.payloads import Payload
from penstock.payloads.format import sum_runs
from penstock.protocol.staleness import Lineage
from penstock.records.manifest import Manifest, Row
from penstock.records.sample import SampleStatus


class LossTokens:
    """Select the tokens of a batch that bear loss by staleness, and compute the loss denominators (T10).

    All results come from the manifest, which every rank has. Nothing blocks.

    Args:
        rows: rows of the complete batch.
        max_staleness: tokens staler than this bear no loss here, regardless of the bound of the cut; None: no further
        masking.
    """

    def __init__(self, manifest: Manifest, rows: Sequence[Row], max_staleness: int | None = None) -> None:
        self.max_staleness = max_staleness
        self._rows = rows
        self._train_version = manifest.train_version
        self._lineage = Lineage(tuple((first, last) for first, last in manifest.abandoned))
        self._lags: dict[int, int] = {}
        #: Ids of samples whose loss was removed here.
        self.removed: set[str] = set()
        #: Loss tokens of each row of the complete batch.
        self.per_row = [self.of(row) for row in rows]

    def staleness(self, version: int) -> int:
        """Return the lineage steps from ``version`` to the train version (T2); -1 for tokens not generated."""
        if version not in self._lags:
            self._lags[version] = self._lineage.lag(version, self._train_version) if version >= 0 else -1
        return self._lags[version]

    def remove(self, indices: Collection[int]) -> None:
        """Remove the loss from these rows of the complete batch."""
        self.removed |= {self._rows[i].sample for i in indices}
        self.per_row = [self.of(row) for row in self._rows]

    def of(self, row: Row) -> int:
        """Return the number of loss tokens of a row."""
        if row.sample in self.removed:
            return 0
        if self.max_staleness is None or not row.num_loss:
            return row.num_loss
        by_version = row.loss_versions or [[row.oldest_loss, row.num_loss]]
        return sum(count for version, count in by_version if self.staleness(version) <= self.max_staleness)

    def counts(self, indices: Collection[int]) -> dict[str, int]:
        """Return the loss denominators over these rows of the complete batch, see ``Batch.counts``."""
        bearing = [self.per_row[i] for i in indices]
        return {
            "loss_tokens": sum(bearing),
            "loss_samples": sum(1 for count in bearing if count),
            "samples": len(bearing),
            "groups": len({self._rows[i].job for i in indices}),
        }


#: Key of an array with one entry per token -> fill value, dtype.
TOKEN_KEYS: dict[str, tuple[float, type]] = {
    "tokens": (0, np.int64),
    "loss_mask": (False, np.bool_),
    "generated": (False, np.bool_),
    "logprobs": (0.0, np.float32),
    "advantages": (0.0, np.float32),
    "versions": (-1, np.int32),
    "staleness": (-1, np.int32),
}
#: Side array that is a token key if samples of the batch have it -> fill value, dtype.
SIDE_KEYS: dict[str, tuple[float, type]] = {
    TEACHER_LOGPROBS: (0.0, np.float32),
    REFERENCE_LOGPROBS: (0.0, np.float32),
}
#: Key of an array with one entry per sample -> dtype.
SAMPLE_KEYS: dict[str, type] = {
    "lengths": np.int64,
    "temperatures": np.float32,
    "rewards": np.float32,
    "rows": np.int64,
}

#: Mask of a filler: one token without loss, so that every rank has input.
_NOTHING = np.zeros(1, np.uint8)


def wanted_keys(keys: Collection[str] | None, sides: Collection[str] = ()) -> Collection[str]:
    """Return the token keys to make, all if None. Raises ProtocolError for an unknown key.

    Args:
        sides: keys of side arrays that the complete batch has, the same on all ranks.
    """
    known = [*TOKEN_KEYS, *sides]
    if keys is None:
        return known
    if foreign := sorted(set(keys) - set(known)):
        raise ProtocolError(f"unknown array {', '.join(foreign)}: keys of a batch are {', '.join(known)}.")
    return keys


class TokenArrays:
    """Make the arrays of one rank's samples; ``members`` are positions in its rows, empty means one filler.

    Args:
        rows: rows of this rank.
        indices: index of each row in the complete batch.
        advantages: advantage of each row of the complete batch.
    """

    def __init__(
        self,
        manifest: Manifest,
        rows: Sequence[Row],
        indices: Sequence[int],
        opened: OpenedPayloads,
        loss: LossTokens,
        advantages: Sequence[float] | NDArray[np.float64],
    ) -> None:
        self._manifest = manifest
        self._rows = rows
        self._indices = indices
        self._opened = opened
        self._loss = loss
        #: Advantages of each row of the complete batch.
        self.advantages = advantages
        #: Side arrays read so far: name -> array of each row.
        self._sides: dict[str, list[NDArray[Any] | None]] = {}

    def padded(self, members: Sequence[int], keys: Collection[str]) -> dict[str, Any]:
        """Return [B, L] by token key, [B] by sample key: ``Batch.arrays`` without counts. Raises PayloadError."""
        flat, lengths = self._flat(members, keys)
        blanks = TOKEN_KEYS | SIDE_KEYS
        out = {key: layout.pad(array, lengths, blanks[key][0]) for key, array in flat.items()}
        return out | self._per_sample(lengths, members)

    def packed(self, members: Sequence[int], keys: Collection[str]) -> dict[str, Any]:
        """Return [T] by token key, [B] by sample key: ``Batch.packed`` without counts. Raises PayloadError."""
        flat, lengths = self._flat(members, keys)
        out: dict[str, Any] = flat | self._per_sample(lengths, members)
        out["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        out["position_ids"] = np.arange(lengths.sum()) - np.repeat(out["cu_seqlens"][:-1], lengths)
        out["max_length"] = int(lengths.max())
        return out

    def _per_sample(self, lengths: NDArray[np.int64], members: Sequence[int]) -> dict[str, Any]:
        rows = [self._rows[i] for i in members]
        values: dict[str, Any] = {
            "lengths": lengths,
            "temperatures": [row.temperature for row in rows] or [1.0],
            "rewards": [row.reward for row in rows] or [0.0],
            "rows": [self._indices[i] for i in members] or [-1],
        }
        return {key: np.array(values[key], dtype) for key, dtype in SAMPLE_KEYS.items()}

    def _flat(self, members: Sequence[int], keys: Collection[str]) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """Return checked token arrays [T] of concatenated ``members`` (one filler if empty), and lengths [B]."""
        found = [self._opened.all[i] for i in members] or [None]
        lengths = np.array([1 if payload is None else len(payload) for payload in found], np.int64)
        pairs = zip(found, lengths.tolist(), strict=True)
        runs = [run for payload, length in pairs for run in layout.runs(payload, length)]
        mask = np.concatenate([_NOTHING if payload is None else payload.mask for payload in found])
        generated, loss = (mask & payloads.GENERATED).view(np.bool_), (mask >> 1).view(np.bool_)
        make = self._makers(members, found, lengths, runs, generated)
        if self._manifest.mask_below >= 0:
            loss &= make["versions"]() >= self._manifest.mask_below
        if self._manifest.mask_offpolicy:
            newest = np.array([self._rows[i].newest for i in members] or [-1], np.int32)
            loss &= make["versions"]() == np.repeat(newest, lengths)
        if self._manifest.mask_truncated:
            kept = [self._rows[i].status != SampleStatus.TRUNCATED for i in members] or [True]
            loss &= np.repeat(np.array(kept, np.bool_), lengths)
        self._check(members, lengths, runs, generated, loss)
        if self._loss.removed:
            kept = [self._rows[i].sample not in self._loss.removed for i in members] or [True]
            loss &= np.repeat(np.array(kept), lengths)
        if self._loss.max_staleness is not None:
            loss &= make["staleness"]() <= self._loss.max_staleness
            self._check_masked(members, int(np.count_nonzero(loss)))
        make |= {"generated": lambda: generated, "loss_mask": lambda: loss}
        flat = {key: make[key]() for key in TOKEN_KEYS if key in keys}
        return flat | {key: self._side(key, members, lengths) for key in SIDE_KEYS if key in keys}, lengths

    def _side(self, name: str, members: Sequence[int], lengths: NDArray[np.int64]) -> NDArray[Any]:
        """Return a side array [T] with a number per token, or per token after the prompt. Raises PayloadError."""
        if name not in self._sides:
            self._sides[name] = self._opened.side(name)
        blank, dtype = SIDE_KEYS[name]
        out: NDArray[Any] = np.full(int(lengths.sum()), blank, dtype)
        end = 0
        for i, length in zip(members, lengths.tolist(), strict=False):
            row, array, begin, end = self._rows[i], self._sides[name][i], end, end + length
            if array is None:
                continue  # the row bears no loss (``layout.check_sides``)
            if array.shape not in ((length,), (length - row.prompt_length,)) or not np.isfinite(array).all():
                raise PayloadError(
                    f"sample {row.sample}: side array {name!r} of shape {array.shape} needs one finite number for each "
                    f"of its {length} tokens, or for each of the {length - row.prompt_length} after its prompt."
                )
            out[end - len(array) : end] = array
            out[begin : begin + row.prompt_length] = blank
        return out

    def _makers(
        self,
        members: Sequence[int],
        found: Sequence[Payload | None],
        lengths: NDArray[np.int64],
        runs: Sequence[tuple[int, int]],
        generated: NDArray[np.bool_],
    ) -> dict[str, Callable[[], NDArray[Any]]]:
        """Return a function per array, because making an array costs as much as reading the payloads."""
        counts = [count for count, _ in runs]

        def along(values: list[int]) -> NDArray[Any]:
            return np.repeat(np.array(values, np.int32), counts)

        def joined(name: str, dtype: type) -> NDArray[Any]:
            return np.concatenate(
                [_NOTHING if payload is None else getattr(payload, name) for payload in found], dtype=dtype
            )

        def advantages() -> NDArray[Any]:
            values = np.array([self.advantages[self._indices[i]] for i in members] or [0.0], np.float32)
            return np.multiply(generated, np.repeat(values, lengths), dtype=np.float32)

        return {
            "versions": lambda: along([version for _, version in runs]),
            "staleness": lambda: along([self._loss.staleness(version) for _, version in runs]),
            "tokens": lambda: joined("tokens", np.int64),
            "logprobs": lambda: joined("logprobs", np.float32),
            "advantages": advantages,
        }

    def _check(
        self,
        members: Sequence[int],
        lengths: NDArray[np.int64],
        runs: Sequence[tuple[int, int]],
        generated: NDArray[np.bool_],
        loss: NDArray[np.bool_],
    ) -> None:
        """Check that the payloads match the manifest."""
        if not members:
            return
        counts = np.array([count for count, _ in runs], np.int64)
        starts = np.cumsum(counts) - counts
        generated_by_run = sum_runs(generated, starts)
        # Usually all generated tokens bear loss, and comparing takes a fifth of the time of counting.
        num_bearing = generated_by_run if np.array_equal(generated, loss) else sum_runs(loss, starts)
        run = 0
        for i, left in zip(members, lengths.tolist(), strict=True):
            num_generated, num_loss, oldest = 0, 0, -1
            while left:
                count, version = runs[run]
                num_generated += generated_by_run[run]
                if num_bearing[run]:
                    num_loss += num_bearing[run]
                    oldest = version if oldest < 0 else min(oldest, version)
                left -= count
                run += 1
            self._check_row(self._rows[i], self._opened.all[i], num_generated, num_loss, oldest)

    def _check_row(self, row: Row, payload: Payload | None, num_generated: int, num_loss: int, oldest: int) -> None:
        if payload is None:
            return
        n = self._manifest.n
        found = (len(payload), payload.prompt_length, num_generated, num_loss)
        wanted = (row.length, row.prompt_length, row.num_generated, row.num_loss)
        if found != wanted:
            raise PayloadError(
                f"sample {row.sample}: length, prompt, generated and loss tokens are {found} in its payload, but "
                f"{wanted} in the manifest of batch {n}."
            )
        if oldest != row.oldest_loss:
            raise PayloadError(
                f"sample {row.sample}: the oldest version that bears loss is {oldest} in its payload, but "
                f"{row.oldest_loss} in the manifest of batch {n}."
            )

    def _check_masked(self, members: Sequence[int], found: int) -> None:
        """Check that the payloads have as many loss tokens as the manifest, which gives the denominators."""
        wanted = sum(self._loss.of(self._rows[i]) for i in members if self._opened.all[i] is not None)
        if found != wanted:
            raise PayloadError(
                f"batch {self._manifest.n}: {found} tokens bear loss at staleness {self._loss.max_staleness} or less, "
                f"but {wanted} in its manifest, because the buffer that cut it does not count loss tokens by version: "
                "restart the buffer."
            )
