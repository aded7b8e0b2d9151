"""One rank's samples of a cut batch as arrays, and the figures of the complete batch.

A rank decodes only its own payloads. Figures of the complete batch come from the manifest, which every rank has:
advantages (T11), the denominators of the loss (T10), and the number of micro-batches of every rank. Nothing here blocks
or reads Redis; the caller passes the bytes.
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
    """Return the rows of one rank whose payloads it has to fetch before it makes its ``Batch``, without lost ones."""
    rows = manifest.samples()
    return [rows[i] for i in partition.split(rows, dp_size, manifest.seed, manifest.split)[dp_rank] if not rows[i].lost]


class Batch:
    """One rank's share of a cut batch.

    Args:
        manifest: the record that every rank reads.
        digest: name of the manifest's bytes (``Manifest.digest``); carried by commits.
        payloads: bytes by sample id, or a callable that returns them for a row (it may block). Called once for each
            sample, when arrays are first used, for this rank's rows without lost ones. None as a value means that the
            payload was lost after the cut: its rows become fillers too, and are named in ``lost``.
        dp_rank, dp_size: which share (T14).
        advantage: kind of advantages, see ``penstock.consumers.batch.advantages``.
        max_staleness: tokens staler than this bear no loss here, whatever the bound of the cut was; None: mask no
            more. ``counts`` and advantages cover the remaining tokens, in the complete batch (T10).
        store: where columns are written and read (T13); None keeps them in this object.
        read_sides: reads side arrays stored under keys of their own; None: there are no such arrays.

    Raises:
        ProtocolError: the manifest contradicts itself, or breaks its own staleness bound (I6).
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
        #: Rows of the complete batch, group by group.
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
        #: False if the batch is not trained, like the answers of an evaluation: logprobs of any kind may be read then.
        self.trained = True
        self._read_sides = read_sides
        self._advantage = advantage
        #: Column -> rows without a value, and all rows that it was read for.
        self._hollow: dict[str, set[int]] = {}
        self._got: dict[str, set[int]] = {}
        self._loss = LossTokens(manifest, self.all_rows, max_staleness)
        self._counts = self._loss.counts(range(len(self.all_rows)))
        #: Loss tokens of each row when it was cut: tokens removed later still count in the group for advantages.
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
        """Return denominators of the loss over all ranks: ``loss_tokens``, ``loss_samples`` (those with at least one),
        ``samples``, ``groups`` (T10)."""
        return self._counts

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Return [N] the advantage of each of ``all_rows``."""
        return np.asarray(self._arrays.advantages, np.float64)

    def set_advantages(self, values: Sequence[float]) -> None:
        """Replace the advantages: one for each of ``all_rows``, the same on every rank (T11). Call before using arrays.

        Raises:
            ProtocolError: the wrong number of values, or one is not finite in float32.
        """
        found = np.asarray(values, np.float64)
        if found.shape != (len(self.all_rows),) or not (np.abs(found) <= advantages.LARGEST).all():
            raise ProtocolError(
                f"{self._what} needs a finite advantage for each of {len(self.all_rows)} samples, not "
                f"{safe_repr(values)}."
            )
        self._arrays.advantages = found

    def set_rewards(self, values: Sequence[float], unknown: Collection[int] = ()) -> None:
        """Recompute advantages from other rewards; call as ``set_advantages``.

        The reward of a sample of several parts is that of its first row.

        Args:
            unknown: rows with an unknown reward: the advantage of their samples is 0, and these do not count in their
                groups.
        """
        self.set_advantages(self._advantages_of(values, unknown).tolist())

    def remove(self, indices: Collection[int]) -> None:
        """Remove the loss from these of ``all_rows``, the same on every rank. ``counts`` exclude them, advantages
        do not (T10). Call before arrays are made.

        Raises:
            ProtocolError: no such row.
        """
        if wrong := [i for i in indices if not 0 <= i < len(self.all_rows)]:
            raise ProtocolError(f"{self._what} has {len(self.all_rows)} samples, and none numbered {wrong[:10]}.")
        self._loss.remove(indices)
        self._counts = self._loss.counts(range(len(self.all_rows)))

    @property
    def indices(self) -> Sequence[int]:
        """Return the index into ``all_rows`` of each of this rank's rows."""
        return self._indices

    @property
    def shares(self) -> Sequence[Sequence[int]]:
        """Return ``indices`` of every rank."""
        return self._shares

    @property
    def temperature(self) -> float:
        """Return the temperature of all samples of the complete batch that bear loss; 1 if none does.

        For a trainer that divides all logits by one number; ``arrays()["temperatures"]`` has one for each sample.
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
            keys: which [B, L] arrays to make (``TOKEN_KEYS`` in token_arrays.py); arrays that are not made cost
                nothing. None makes all. Checks do not depend on it.

        Returns:
            ``tokens`` int64, ``loss_mask``, ``generated`` bool, ``logprobs``, ``advantages`` float32, ``versions``,
            ``staleness`` int32, each [B, L] padded on the right (mask 0, version and staleness -1); ``lengths`` int64,
            ``temperatures``, ``rewards`` float32, ``rows`` int64 (index into ``all_rows``; -1 for a filler), each [B];
            ``counts``, the global denominators. Advantages are set on generated tokens. Staleness is the train version
            minus the token's, -1 for tokens that were not generated. A lost row is one token with mask 0. A rank
            without rows has one filler.

        Raises:
            PayloadError: a payload does not match its row.
            ProtocolError: no such key.
            ConfigError: logprobs are requested, and those of a sample that bears loss, on any rank, are from before a
                temperature other than 1 was applied (T6): they cannot be trained on.
        """
        return self._arrays.padded(range(len(self.rows)), self._wanted(keys)) | {"counts": self.counts}

    def padded(self, device: "str | torch.device | None" = None, keys: Collection[str] | None = None) -> dict[str, Any]:
        """Return ``arrays(keys)`` as torch tensors, on ``device`` (host memory if None); ``counts`` stay numbers."""
        return layout.tensors(self.arrays(keys), device)

    def packed(
        self, max_tokens: int, device: "str | torch.device | None" = None, keys: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return micro-batches of at most ``max_tokens`` tokens, samples concatenated, without padding.

        Every rank gets the same number; missing ones are fillers of one token with mask 0 (T10). A sample longer than
        ``max_tokens`` has a micro-batch to itself.

        Returns:
            dicts as of ``padded()``, but token keys are [T], plus ``cu_seqlens`` int32 [B + 1] (where each sample
            begins, and T), ``position_ids`` int64 [T] (from 0 in each sample) and ``max_length`` (a number).
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
            # Uses the rows of all ranks, so that all ranks raise and none blocks in a collective.
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
        """Yield the micro-batches of each of ``count`` optimizer steps over this batch.

        Groups are not split, and every rank assigns groups to steps alike (``partition.minibatches``). ``counts`` in
        each micro-batch are those of its step over all ranks, so a step's loss is divided by its own figures (T10);
        all ranks must skip a step without loss tokens. Advantages are those of the complete batch. A rank without a
        row in a step runs fillers.

        Args:
            Others as for ``micro_batches``.
        """
        wanted = self._wanted(keys)
        for part in partition.minibatches(self.all_rows, count, self.manifest.seed):
            counts, of = self._loss.counts(part), frozenset(part)
            yield [
                layout.tensors(self._arrays.padded(members, wanted) | {"counts": counts}, device)
                for members in self._members(max_tokens, max_samples, padded=True, of=of)
            ]

    def decode(self) -> None:
        """Check and open the payloads now, in the calling thread, instead of when arrays are first used."""
        _ = self._opened.all

    def put(self, name: str, array: Any, *, micro: Mapping[str, Any] | None = None) -> None:
        """Write a column for the other roles of this batch, before the commit (T13). Blocks for two round trips.

        Args:
            name: 1 to 64 letters, digits, '_.-'.
            array: numpy or torch (bfloat16 is stored as float32), laid out as ``arrays()`` or ``padded()``: [B, L] or
                [B, L, W] per token, or [B] per sample. Padding is not stored.
            micro: a dict of ``packed()`` or ``micro_batches()``; ``array`` then has its layout ([T] or [T, W] if
                packed) and rows. Put every micro-batch of the rank.

        Raises:
            ProtocolError: wrong shape or dtype, already committed, other values than before, too many columns.
            OwnershipLost: the subscription was rewound or taken over meanwhile.
        """
        of = self._layout(micro)
        self.store.write(name, columns.split(array, of, self._lost, f"batch {self.n} of this rank", name))

    def get(self, name: str, *, micro: Mapping[str, Any] | None = None, timeout: float = 600.0) -> NDArray[Any]:
        """Read a column put by another role; blocks, and reports the wait, until every row of this rank has a value.

        Args:
            micro: as for ``put``: only its rows, in its layout.
            timeout: seconds.

        Returns:
            [B, L] (or [B, L, W]) or [B], as it was put; 0 on padding, fillers and payloads lost here or at the writer:
            ``no_value`` returns which rows. A numpy array; ``torch.from_numpy`` shares it.

        Raises:
            WaitTimeout: not complete in time. OwnershipLost: the batch was discarded. PayloadError: damaged.
        """
        of = self._layout(micro)
        wanted = [row for row in of.rows if row >= 0]
        values = self.store.read(name, wanted, timeout) if wanted else {}
        out = columns.join(values, of, self.all_rows, self._lost, name)
        self._got.setdefault(name, set()).update(wanted)
        if hollow := columns.hollow(values) - self._lost:
            self._hollow.setdefault(name, set()).update(hollow)
            self.store.tell_lost(name, sorted(hollow))
        return out

    def no_value(self, name: str, *, micro: Mapping[str, Any] | None = None) -> NDArray[np.bool_]:
        """Return [B] True on rows without a value in column ``name``, which read as 0: exclude them from the loss.

        These are fillers, samples whose payload is lost here, and those whose payload the writer had lost (counted as
        ``column_lost``).

        Args:
            micro: as in the preceding call of ``get``.

        Raises:
            ProtocolError: the column was not read.
        """
        rows = self._layout(micro).rows
        if name not in self._got or not self._got[name].issuperset(row for row in rows if row >= 0):
            raise ProtocolError(f"Column {name!r} of batch {self.n} was not read yet: call get({name!r}) first.")
        missing = self._lost | self._hollow.get(name, set()) | {-1}
        return np.array([row in missing for row in rows])

    def _layout(self, micro: Mapping[str, Any] | None) -> columns.Layout:
        if micro is None:
            lengths = [1 if payload is None else len(payload) for payload in self._opened.all] or [1]
            return columns.Layout(list(self._indices) or [-1], lengths)
        of = columns.Layout.of_micro(micro)
        if foreign := set(of.rows) - set(self._indices) - {-1}:
            raise ProtocolError(f"micro holds rows {sorted(foreign)}, which are not of this rank of batch {self.n}.")
        return of

    @cached_property
    def _lost(self) -> frozenset[int]:
        pairs = zip(self._indices, self._opened.all, strict=True)
        return frozenset(index for index, payload in pairs if payload is None)

    def _members(
        self, max_tokens: int | None, max_samples: int | None, *, padded: bool, of: Collection[int] | None = None
    ) -> list[list[int]]:
        """Return positions in ``rows`` by micro-batch, only of rows in ``of`` (None: all); empty lists are fillers."""
        shares = self._shares if of is None else [[i for i in share if i in of] for share in self._shares]
        mine = [at for at, i in enumerate(self._indices) if of is None or i in of]
        lengths = [self.rows[at].length for at in mine]
        members = partition.micro_batches(lengths, max_tokens, max_samples, padded=padded)
        count = partition.num_micro_batches(self.all_rows, shares, max_tokens, max_samples, padded=padded)
        return [[mine[i] for i in one] for one in members] + [[] for _ in range(count - len(members))]

    @cached_property
    def lost(self) -> list[str]:
        """Return ids of this rank's rows whose payload is gone; they are fillers. Decodes the batch."""
        return [row.sample for row, payload in zip(self.rows, self._opened.all, strict=True) if payload is None]

    def share(self, dp_rank: int, dp_size: int) -> "Batch":
        """Split the same manifest otherwise, for a caller with all payloads (``dp_size`` 1) that distributes shares."""
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
        """Return whether any sample of the batch, on any rank, has a side array ``name`` that can be read here."""
        return self._read_sides is not None and any(side[0] == name for row in self.all_rows for side in row.sides)

    def side(self, name: str) -> list[NDArray[Any] | None]:
        """Return side array ``name`` of each of this rank's samples, None for a sample without it. Decodes the batch.

        Arrays stored under keys of their own (``sample.sides``) are read now, and not cached: blocks for their bytes.

        Raises:
            PayloadError: a committed array is gone, or damaged (T17).
        """
        return self._opened.side(name)
