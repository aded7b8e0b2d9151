"""Represent one rank's samples of a cut batch as arrays, with statistics of the complete batch.

A rank decodes only its own payloads. Statistics of the complete batch come from the manifest, which every rank has:
advantages (T11), loss denominators (T10), and the number of micro-batches. This module neither blocks nor reads Redis;
the caller passes the bytes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.consumers.batch import advantages, behaviour, columns, layout
from penstock.consumers.batch.fetch import OpenedPayloads, Payloads, ReadSides
from penstock.consumers.batch.token_arrays import SIDE_KEYS, LossTokens, TokenArrays, wanted_keys
from penstock.errors import ProtocolError
from penstock.protocol import partition
from penstock.records.manifest import Manifest, Row
from penstock.text import safe_repr

if TYPE_CHECKING:
    import torch


def rank_rows(manifest: Manifest, dp_rank: int, dp_size: int) -> list[Row]:
    """Return one rank's rows, without lost ones, whose payloads it has to fetch for its ``Batch``."""
    rows = manifest.samples()
    return [rows[i] for i in partition.split(rows, dp_size, manifest.seed, manifest.split)[dp_rank] if not rows[i].lost]


class Batch:
    """Hold one rank's share of a cut batch.

    Args:
        manifest: record of the batch that every rank reads.
        digest: digest of the manifest's bytes (``Manifest.digest``), sent with commits.
        payloads: bytes by sample id, or a callable that returns them for a row (may block). Called once per sample of
        this rank, without lost ones, when arrays are first used. The value None marks a payload that was lost after
        the cut: its rows become fillers and are listed in ``lost``.
        dp_rank, dp_size: index and number of shares (T14).
        advantage: kind of advantages, see ``penstock.consumers.batch.advantages``.
        max_staleness: tokens staler than this bear no loss here, regardless of the bound of the cut; None: no further
        masking. ``counts`` and advantages cover the remaining tokens of the complete batch (T10).
        store: store of columns (T13); None keeps them in this object.
        read_sides: reads side arrays that have their own keys; None if there are none.

    Raises:
        ProtocolError: the manifest is inconsistent, or violates its staleness bound (I6).
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        digest: str,
        payloads: Payloads,
        dp_rank: int = 0,
        dp_size: int = 1,
        advantage: advantages.Kind = "grpo",
        max_staleness: int | None = None,
        store: columns.Store | None = None,
        read_sides: ReadSides | None = None,
    ) -> None:
        self.manifest = manifest
        self.digest = digest
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        #: Rows of the complete batch, ordered by group.
        self.all_rows = manifest.samples()
        layout.check_manifest(manifest, self.all_rows)
        self._shares = partition.split(self.all_rows, dp_size, manifest.seed, manifest.split)
        self._indices = self._shares[dp_rank]
        #: This rank's rows.
        self.rows = [self.all_rows[i] for i in self._indices]
        #: The argument ``payloads``.
        self.payloads = payloads
        #: Store for columns.
        self.store = store if store is not None else columns.LocalColumns()
        #: Result of ``Trainer(prepare=...)``.
        self.prepared: Any = None
        #: False for batches that are not trained, such as evaluations, whose logprobs may be of any kind.
        self.trained = True
        self._read_sides = read_sides
        self._advantage = advantage
        #: Column -> rows without a value; column -> all rows that were read.
        self._without_value: dict[str, set[int]] = {}
        self._got: dict[str, set[int]] = {}
        self._loss = LossTokens(manifest, self.all_rows, max_staleness)
        self._counts = self._loss.counts(range(len(self.all_rows)))
        #: Loss tokens of each row at the cut: tokens removed later still count for advantages.
        self._weights = tuple(self._loss.per_row)
        self._opened = OpenedPayloads(manifest.n, self.rows, payloads, read_sides)
        given = self._advantages_of([row.reward for row in self.all_rows])
        self._arrays = TokenArrays(manifest, self.rows, self._indices, self._opened, self._loss, given)

    def _advantages_of(self, rewards: Sequence[float], unknown: Collection[int] = ()) -> NDArray[np.float64]:
        masked = [row.masked or i in unknown for i, row in enumerate(self.all_rows)]
        return advantages.row_advantages(self.all_rows, rewards, self._advantage, self._weights, masked)

    @property
    def n(self) -> int:
        """Return the number of the batch, 1, 2, ..."""
        return self.manifest.n

    @property
    def train_version(self) -> int:
        """Return the trainer's version at the batch's first optimizer step (T2)."""
        return self.manifest.train_version

    @property
    def counts(self) -> dict[str, int]:
        """Return the loss denominators over all ranks: ``loss_tokens``, ``loss_samples`` (with at least one loss
        token), ``samples``, ``groups`` (T10)."""
        return self._counts

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Return [N] the advantage of each of ``all_rows``."""
        return np.asarray(self._arrays.advantages, np.float64)

    def set_advantages(self, values: Sequence[float]) -> None:
        """Replace the advantages of ``all_rows``, equally on every rank (T11). Call before using arrays.

        Raises:
            ProtocolError: the number of values is wrong, or a value is not finite in float32.
        """
        found = np.asarray(values, np.float64)
        if found.shape != (len(self.all_rows),) or not (np.abs(found) <= advantages.LARGEST).all():
            raise ProtocolError(
                f"{self._what} needs a finite advantage for each of {len(self.all_rows)} samples, not "
                f"{safe_repr(values)}."
            )
        self._arrays.advantages = found

    def set_rewards(self, values: Sequence[float], unknown: Collection[int] = ()) -> None:
        """Recompute advantages from other rewards; call it like ``set_advantages``.

        The first row of a sample of several parts determines its reward.

        Args:
            unknown: rows with an unknown reward, whose samples get advantage 0 and do not count in their groups.
        """
        self.set_advantages(self._advantages_of(values, unknown).tolist())

    def remove(self, indices: Collection[int]) -> None:
        """Remove the loss from some of ``all_rows``, equally on every rank. ``counts`` exclude these rows, advantages
        include them (T10). Call before using arrays.

        Raises:
            ProtocolError: a row does not exist.
        """
        if wrong := [i for i in indices if not 0 <= i < len(self.all_rows)]:
            raise ProtocolError(f"{self._what} has {len(self.all_rows)} samples, invalid indices: {wrong[:10]}.")
        self._loss.remove(indices)
        self._counts = self._loss.counts(range(len(self.all_rows)))

    @property
    def indices(self) -> Sequence[int]:
        """Return the index into ``all_rows`` of each of this rank's rows."""
        return self._indices

    @property
    def shares(self) -> Sequence[Sequence[int]]:
        """Return the ``indices`` of every rank."""
        return self._shares

    @property
    def temperature(self) -> float:
        """Return the common temperature of all samples of the complete batch that bear loss; 1 if none does.

        For trainers that divide all logits by one number; ``arrays()["temperatures"]`` has the temperature per sample.
        Raises ConfigError if they differ.
        """
        return behaviour.temperature_of(self.all_rows, self._what)

    @property
    def _what(self) -> str:
        return f"batch {self.n} of {self.manifest.sub}"

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Batch(n={self.n}, samples={len(self)} of {len(self.all_rows)}, rank={self.dp_rank}/{self.dp_size})"

    def arrays(self, keys: Collection[str] | None = None) -> dict[str, Any]:
        """Return this rank's samples as numpy arrays; torch is not needed.

        Args:
            keys: [B, L] arrays to make (``TOKEN_KEYS`` in token_arrays.py), as omitted arrays cost nothing; None makes
            all. Checks do not depend on it.

        Returns:
            ``tokens`` int64, ``loss_mask``, ``generated`` bool, ``logprobs``, ``advantages`` float32, ``versions``,
            ``staleness`` int32, each [B, L] padded on the right (mask 0, version and staleness -1); ``lengths`` int64,
            ``temperatures``, ``rewards`` float32, ``rows`` int64 (index into ``all_rows``; -1 for a filler), each [B];
            ``counts``, the global denominators. Advantages are set on generated tokens. Staleness is the train version
            minus the token's, -1 for tokens that were not generated. A lost row is one token with mask 0. A rank
            without rows has one filler.

        Raises:
            PayloadError: a payload does not match its row.
            ProtocolError: a key is unknown.
            ConfigError: logprobs are requested, but a sample that bears loss, on any rank, has logprobs before a
            temperature other than 1 (T6), which cannot be trained on.
        """
        return self._arrays.padded(range(len(self.rows)), self._wanted(keys)) | {"counts": self.counts}

    def padded(self, device: "str | torch.device | None" = None, keys: Collection[str] | None = None) -> dict[str, Any]:
        """Return ``arrays(keys)`` as torch tensors, on ``device`` (host memory if None); ``counts`` stay numbers."""
        return layout.tensors(self.arrays(keys), device)

    def packed(
        self, max_tokens: int, device: "str | torch.device | None" = None, keys: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return micro-batches of concatenated samples, without padding, of at most ``max_tokens`` tokens.

        Every rank gets the same number of micro-batches; missing ones are fillers of one token with mask 0 (T10). A
        sample longer than ``max_tokens`` gets its own micro-batch.

        Returns:
            dicts like ``padded()``, but with token keys [T], plus ``cu_seqlens`` int32 [B + 1] (start of each sample,
            and T), ``position_ids`` int64 [T] (from 0 in each sample) and ``max_length`` (a number).
        """
        split, wanted = self._members(max_tokens, None, padded=False), self._wanted(keys)
        made = (self._arrays.packed(members, wanted) | {"counts": self.counts} for members in split)
        return [layout.tensors(arrays, device) for arrays in made]

    def micro_batches(
        self,
        max_tokens: int | None = None,
        max_samples: int | None = None,
        device: "str | torch.device | None" = None,
        keys: Collection[str] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield ``padded()`` in micro-batches; ``max_tokens`` includes padding. Every rank gets the same number."""
        wanted = self._wanted(keys)
        for members in self._members(max_tokens, max_samples, padded=True):
            yield layout.tensors(self._arrays.padded(members, wanted) | {"counts": self.counts}, device)

    def _wanted(self, keys: Collection[str] | None) -> Collection[str]:
        wanted = wanted_keys(keys, [name for name in SIDE_KEYS if self.has_side(name)])
        for name in SIDE_KEYS.keys() & wanted:
            layout.check_sides(self.all_rows, self._loss.per_row, name, self.n)
        if self.trained and "logprobs" in wanted:
            # Check the rows of all ranks, so that all ranks raise and none blocks in a collective.
            behaviour.check_comparable(self.all_rows, self._what)
        return wanted

    def minibatches(
        self,
        count: int,
        max_tokens: int | None = None,
        max_samples: int | None = None,
        device: "str | torch.device | None" = None,
        keys: Collection[str] | None = None,
    ) -> Iterator[list[dict[str, Any]]]:
        """Split this batch into ``count`` optimizer steps; yield the micro-batches of each step.

        Groups are not split, and all ranks assign groups to steps equally (``partition.minibatches``). ``counts`` of a
        micro-batch cover its step over all ranks, as denominators of the step's loss (T10); all ranks must skip a step
        without loss tokens. Advantages come from the complete batch. A rank without rows in a step runs fillers.

        Args:
            Other arguments: see ``micro_batches``.
        """
        wanted = self._wanted(keys)
        for part in partition.minibatches(self.all_rows, count, self.manifest.seed):
            counts, of = self._loss.counts(part), frozenset(part)
            yield [
                layout.tensors(self._arrays.padded(members, wanted) | {"counts": counts}, device)
                for members in self._members(max_tokens, max_samples, padded=True, of=of)
            ]

    def decode(self) -> None:
        """Check and open the payloads now, in the calling thread, instead of on first use of arrays."""
        _ = self._opened.all

    def put(self, name: str, array: Any, *, micro: Mapping[str, Any] | None = None) -> None:
        """Write a column for the other roles of this batch, before the commit (T13). Blocks for two round trips.

        Args:
            name: 1 to 64 letters, digits, '_.-'.
            array: numpy or torch array (bfloat16 is stored as float32) with the layout of ``arrays()`` or ``padded()``:
            [B, L] or [B, L, W] per token, or [B] per sample. Padding is not stored.
            micro: dict from ``packed()`` or ``micro_batches()`` whose layout ([T] or [T, W] if packed) and rows
            ``array`` has. Put every micro-batch of the rank.

        Raises:
            ProtocolError: the shape or dtype is wrong, the batch is already committed, other values were already put,
            or there are too many columns.
            OwnershipLost: the subscription was rewound or taken over meanwhile.
        """
        of = self._layout(micro)
        self.store.write(name, columns.split(array, of, self._lost, f"batch {self.n} of this rank", name))

    def get(self, name: str, *, micro: Mapping[str, Any] | None = None, timeout: float = 600.0) -> NDArray[Any]:
        """Read a column of another role. Blocks, with a reported wait, until every row of this rank has a value.

        Args:
            micro: as in ``put``; only its rows are read, in its layout.
            timeout: seconds.

        Returns:
            numpy array [B, L] (or [B, L, W]) or [B], as put; 0 on padding, fillers, and payloads lost here or by the
            writer (rows: ``no_value``). ``torch.from_numpy`` shares its memory.

        Raises:
            WaitTimeout: values are missing. OwnershipLost: the batch was discarded. PayloadError: a value is damaged.
        """
        of = self._layout(micro)
        wanted = [row for row in of.rows if row >= 0]
        values = self.store.read(name, wanted, timeout) if wanted else {}
        out = columns.join(values, of, self.all_rows, self._lost, name)
        self._got.setdefault(name, set()).update(wanted)
        if missing := columns.rows_without_value(values) - self._lost:
            self._without_value.setdefault(name, set()).update(missing)
            self.store.report_lost(name, sorted(missing))
        return out

    def no_value(self, name: str, *, micro: Mapping[str, Any] | None = None) -> NDArray[np.bool_]:
        """Return [B] True on rows without a value in column ``name``, read as 0, to exclude them from the loss.

        These are fillers, samples whose payload is lost here, and samples whose payload the writer had lost (counted as
        ``column_lost``).

        Args:
            micro: as in the preceding call of ``get``.

        Raises:
            ProtocolError: the column was not read before.
        """
        rows = self._layout(micro).rows
        if name not in self._got or not self._got[name].issuperset(row for row in rows if row >= 0):
            raise ProtocolError(f"Column {name!r} of batch {self.n} was not read yet: call get({name!r}) first.")
        missing = self._lost | self._without_value.get(name, set()) | {-1}
        return np.array([row in missing for row in rows])

    def _layout(self, micro: Mapping[str, Any] | None) -> columns.Layout:
        if micro is None:
            lengths = [1 if payload is None else len(payload) for payload in self._opened.all] or [1]
            return columns.Layout(list(self._indices) or [-1], lengths)
        of = columns.Layout.of_micro(micro)
        if foreign := set(of.rows) - set(self._indices) - {-1}:
            raise ProtocolError(f"micro has rows {sorted(foreign)}, which are not of this rank of batch {self.n}.")
        return of

    @cached_property
    def _lost(self) -> frozenset[int]:
        pairs = zip(self._indices, self._opened.all, strict=True)
        return frozenset(index for index, payload in pairs if payload is None)

    def _members(
        self, max_tokens: int | None, max_samples: int | None, *, padded: bool, of: Collection[int] | None = None
    ) -> list[list[int]]:
        """Return positions in ``rows`` by micro-batch, for rows in ``of`` (None: all); empty lists are fillers."""
        shares = self._shares if of is None else [[i for i in share if i in of] for share in self._shares]
        mine = [at for at, i in enumerate(self._indices) if of is None or i in of]
        lengths = [self.rows[at].length for at in mine]
        members = partition.micro_batches(lengths, max_tokens, max_samples, padded=padded)
        count = partition.num_micro_batches(self.all_rows, shares, max_tokens, max_samples, padded=padded)
        return [[mine[i] for i in one] for one in members] + [[] for _ in range(count - len(members))]

    @cached_property
    def lost(self) -> list[str]:
        """Return the ids of this rank's rows with lost payloads, which are fillers. Decodes the batch."""
        return [row.sample for row, payload in zip(self.rows, self._opened.all, strict=True) if payload is None]

    def share(self, dp_rank: int, dp_size: int) -> "Batch":
        """Return another share of the manifest, for a caller with all payloads (``dp_size`` 1)."""
        other = Batch(
            self.manifest,
            digest=self.digest,
            payloads=self.payloads,
            dp_rank=dp_rank,
            dp_size=dp_size,
            advantage=self._advantage,
            max_staleness=self._loss.max_staleness,
            store=self.store,
            read_sides=self._read_sides,
        )
        other.trained = self.trained
        return other

    def has_side(self, name: str) -> bool:
        """Return whether any sample of the batch, on any rank, has a readable side array ``name``."""
        return self._read_sides is not None and any(side[0] == name for row in self.all_rows for side in row.sides)

    def side(self, name: str) -> list[NDArray[Any] | None]:
        """Return side array ``name`` of each of this rank's samples, None if absent. Decodes the batch.

        Arrays with their own keys (``sample.sides``) are read now, which blocks, and are not cached.

        Raises:
            PayloadError: a committed array is gone or damaged (T17).
        """
        return self._opened.side(name)
