"""What a trainer is handed for one cut batch: this rank's samples as arrays, and the numbers of the whole batch.

A rank decodes only its own payloads. What needs the whole batch comes from the manifest, which every rank has:
advantages (T11), the denominators of the loss (T10), and how many micro-batches every rank runs. Nothing here blocks
or reads Redis; the bytes are handed in.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from consumers.batch import advantages, behaviour, columns, layout
from penstock import payloads
from penstock.errors import PayloadError, ProtocolError
from penstock.payloads import Payload, sides
from penstock.payloads.format import sum_runs
from penstock.protocol import partition
from penstock.protocol.records.manifest import Manifest, Row
from penstock.protocol.staleness import Lineage
from penstock.system.collecting import collecting_later

if TYPE_CHECKING:
    import torch

#: Keys whose arrays have one entry per token, what stands where there is none, and their dtype.
TOKEN_KEYS: dict[str, tuple[float, type]] = {
    "tokens": (0, np.int64),
    "loss_mask": (False, np.bool_),
    "generated": (False, np.bool_),
    "logprobs": (0.0, np.float32),
    "advantages": (0.0, np.float32),
    "versions": (-1, np.int32),
    "staleness": (-1, np.int32),
}
#: Keys whose arrays have one entry per sample.
SAMPLE_KEYS: dict[str, type] = {
    "lengths": np.int64,
    "temperatures": np.float32,
    "rewards": np.float32,
    "rows": np.int64,
}

Arrays = dict[str, NDArray[Any]]

#: One token that nobody drew and nothing trains, so that every rank has something to run.
_NOTHING = np.zeros(1, np.uint8)


def rank_rows(manifest: Manifest, dp_rank: int, dp_size: int) -> list[Row]:
    """The rows of one rank: those whose payloads it has to fetch before it makes its ``Batch``, lost ones left out."""
    rows = manifest.samples()
    return [rows[i] for i in partition.split(rows, dp_size, manifest.seed, manifest.split)[dp_rank] if not rows[i].lost]


def wanted_keys(keys: Collection[str] | None) -> Collection[str]:
    """Token keys to make, all if None; ProtocolError where there is no such key."""
    if keys is None:
        return TOKEN_KEYS
    if foreign := sorted(set(keys) - TOKEN_KEYS.keys()):
        raise ProtocolError(f"There is no array {', '.join(foreign)} in a batch: keys are {', '.join(TOKEN_KEYS)}.")
    return keys


class Batch:
    """One rank's share of a cut batch.

    Args:
        manifest: the record that every rank reads.
        digest: name of the manifest's bytes (``Manifest.digest``); commits carry it.
        payloads: bytes by sample id, or a callable that returns them for a row (it may block). Asked for this rank's
            rows only, lost ones left out, once, when arrays are first wanted. None says that a payload was lost after
            the cut: its row becomes a filler too, and is named in ``lost``.
        dp_rank, dp_size: which share (T14).
        advantage: how rewards become advantages, see ``consumers.batch.advantages``.
        max_staleness: tokens staler than this bear no loss here, whatever the bound of the cut was; None: no more are
            masked. ``counts`` and advantages are of the tokens that are left, in the whole batch (T10).
        store: where columns are written and read (T13); None keeps them in this object.

    Raises:
        ProtocolError: the manifest contradicts itself, or breaks its own staleness bound (I6).
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        digest: str,
        payloads: Mapping[str, bytes | memoryview | None] | Callable[[Row], bytes | memoryview | None],
        dp_rank: int = 0,
        dp_size: int = 1,
        advantage: advantages.Kind = "grpo",
        max_staleness: int | None = None,
        store: "columns.Store | None" = None,
        read_sides: Callable[[Sequence[Row], str], Mapping[str, bytes | None]] | None = None,
    ) -> None:
        self.manifest = manifest
        self.digest = digest
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        #: Rows of the whole batch, group by group.
        self.all_rows = manifest.samples()
        layout.check_manifest(manifest, self.all_rows)
        self._shares = partition.split(self.all_rows, dp_size, manifest.seed, manifest.split)
        self._indices = self._shares[dp_rank]
        #: This rank's rows.
        self.rows = [self.all_rows[i] for i in self._indices]
        self._payloads = payloads
        #: What ``Trainer(prepare=...)`` made of it.
        self.prepared: Any = None
        #: False: nobody trains on it, as on the answers of an evaluation, so logprobs of any kind may be read.
        self.trained = True
        self._read_sides = read_sides
        self._advantage = advantage
        self._lineage = Lineage(tuple((first, last) for first, last in manifest.abandoned))
        self._lags: dict[int, int] = {}
        self._max_staleness = max_staleness
        self._store = store if store is not None else columns.LocalColumns()
        #: Column -> rows that it says nothing of, and all rows that it was read for.
        self._hollow: dict[str, set[int]] = {}
        self._got: dict[str, set[int]] = {}
        #: Tokens of each row of the whole batch that bear loss here.
        self._bearing = num_loss = [self._num_loss(row) for row in self.all_rows]
        #: Denominators of the loss over all ranks (T10).
        self._counts = self._count(range(len(self.all_rows)))
        self._advantages = advantages.group_advantages(
            [row.reward for row in self.all_rows],
            [row.job for row in self.all_rows],
            advantage,
            num_loss,
            [row.masked for row in self.all_rows],
        )

    @property
    def n(self) -> int:
        """Number of the batch, 1, 2, ..."""
        return self.manifest.n

    @property
    def train_version(self) -> int:
        """Version the trainer holds at the batch's first optimizer step (T2)."""
        return self.manifest.train_version

    @property
    def counts(self) -> dict[str, int]:
        """Denominators of the loss over all ranks: ``loss_tokens``, ``loss_samples`` (those with at least one),
        ``samples``, ``groups`` (T10)."""
        return self._counts

    @property
    def indices(self) -> Sequence[int]:
        """Index into ``all_rows`` of each of this rank's rows."""
        return self._indices

    @property
    def shares(self) -> Sequence[Sequence[int]]:
        """As ``indices``, of every rank."""
        return self._shares

    @property
    def temperature(self) -> float:
        """What all samples of the whole batch that bear loss were drawn at; 1 where none bears any.

        For a trainer that divides all logits by one number; ``arrays()["temperatures"]`` has one for each sample.
        Raises ConfigError where they differ.
        """
        return behaviour.temperature_of(self.all_rows, self._what)

    @property
    def _what(self) -> str:
        return f"batch {self.n} of {self.manifest.sub}"

    def __len__(self) -> int:
        """Samples of this rank."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Batch(n={self.n}, samples={len(self)} of {len(self.all_rows)}, rank={self.dp_rank}/{self.dp_size})"

    def arrays(self, keys: Collection[str] | None = None) -> dict[str, Any]:
        """This rank's samples as numpy arrays; no torch needed.

        Args:
            keys: which of the [B, L] arrays to make (``TOKEN_KEYS``), for a loss that needs only some: what is not
                made costs nothing. None makes all. What is checked does not depend on it.

        Returns:
            ``tokens`` int64, ``loss_mask``, ``generated`` bool, ``logprobs``, ``advantages`` float32, ``versions``,
            ``staleness`` int32, each [B, L] padded on the right (mask 0, version and staleness -1); ``lengths`` int64,
            ``temperatures``, ``rewards`` float32, ``rows`` int64 (index into ``all_rows``; -1 for a filler), each [B];
            ``counts``, the global denominators. Advantages stand on generated tokens. Staleness is the train version
            minus the token's, -1 where nothing was drawn. A lost row is one token with mask 0. A rank without any row
            has one filler.

        Raises:
            PayloadError: a payload is not what its row says.
            ProtocolError: there is no such key.
            ConfigError: logprobs are wanted, and those of a sample that bears loss, on any rank, are from before a
                temperature that is not 1 (T6): nothing can be trained on them.
        """
        return self._padded(range(len(self.rows)), self._wanted(keys))

    def padded(self, device: "str | torch.device | None" = None, keys: Collection[str] | None = None) -> dict[str, Any]:
        """``arrays(keys)`` as torch tensors, on ``device`` (host memory if None); ``counts`` stay plain numbers."""
        return layout.tensors(self.arrays(keys), device)

    def packed(
        self, max_tokens: int, device: "str | torch.device | None" = None, keys: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Micro-batches of at most ``max_tokens`` tokens, samples laid end to end, no padding.

        Every rank gets equally many; the missing ones are fillers of one token with mask 0 (T10). A sample longer than
        ``max_tokens`` has a micro-batch to itself.

        Returns:
            dicts as of ``padded()``, but token keys are [T], beside ``cu_seqlens`` int32 [B + 1] (where each sample
            begins, and T), ``position_ids`` int64 [T] (from 0 in each sample) and ``max_length`` (a number).
        """
        split, wanted = self._members(max_tokens, None, padded=False), self._wanted(keys)
        return [layout.tensors(self._packed(members, wanted), device) for members in split]

    def micro_batches(
        self,
        max_tokens: int | None = None,
        max_samples: int | None = None,
        device: "str | torch.device | None" = None,
        keys: Collection[str] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """As ``padded()``, in micro-batches; ``max_tokens`` counts padding too. Every rank gets equally many."""
        wanted = self._wanted(keys)
        for members in self._members(max_tokens, max_samples, padded=True):
            yield layout.tensors(self._padded(members, wanted), device)

    def _wanted(self, keys: Collection[str] | None) -> Collection[str]:
        wanted = wanted_keys(keys)
        if self.trained and "logprobs" in wanted:
            # By the rows of all ranks, so that all of them stop, and none waits for another in a collective.
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
        """The micro-batches of each of ``count`` optimizer steps over this batch.

        Groups stay whole, and which step has which is the same on every rank (``partition.minibatches``). ``counts`` in
        each micro-batch are those of its step over all ranks, so a step's loss is divided by what the step has (T10);
        a step without any loss token is for all ranks to leave out. Advantages are of the whole batch. A rank without a
        row of a step runs fillers.

        Args:
            The others are as for ``micro_batches``.
        """
        wanted = self._wanted(keys)
        for part in partition.minibatches(self.all_rows, count, self.manifest.seed):
            counts, of = self._count(part), frozenset(part)
            yield [
                layout.tensors(self._padded(members, wanted) | {"counts": counts}, device)
                for members in self._members(max_tokens, max_samples, padded=True, of=of)
            ]

    def decode(self) -> None:
        """Check and open the payloads now, in the thread that calls, instead of when arrays are first wanted."""
        _ = self._decoded

    def put(self, name: str, array: Any, *, micro: Mapping[str, Any] | None = None) -> None:
        """Write a column for the other roles of this batch, before the commit (T13). Blocks for two round trips.

        Args:
            name: 1 to 64 letters, digits, '_.-'.
            array: numpy or torch (bfloat16 is kept as float32), laid out as ``arrays()`` or ``padded()``: [B, L] or
                [B, L, W] per token, or [B] per sample. What stands on padding is not kept.
            micro: a dict of ``packed()`` or ``micro_batches()``; ``array`` is then laid out as it is ([T] or [T, W] in
                a packed one), and holds the values of its rows only. Put every micro-batch of the rank.

        Raises:
            ProtocolError: another shape or dtype, after the commit, other values than before, too many columns.
            OwnershipLost: the subscription was rewound or taken over meanwhile.
        """
        of = self._layout(micro)
        self._store.write(name, columns.split(array, of, self._lost, f"batch {self.n} of this rank", name))

    def get(self, name: str, *, micro: Mapping[str, Any] | None = None, timeout: float = 600.0) -> NDArray[Any]:
        """Read a column that another role put; blocks until it is there for every row of this rank, and says so.

        Args:
            micro: as for ``put``: only its rows, laid out as it is.
            timeout: seconds.

        Returns:
            [B, L] (or [B, L, W]) or [B], as it was put; 0 on padding, fillers and lost payloads, those too that only
            the writer had lost: ``no_value`` tells which rows. A numpy array; ``torch.from_numpy`` shares it.

        Raises:
            WaitTimeout: it was not there in time. OwnershipLost: the batch was given up. PayloadError: damaged.
        """
        of = self._layout(micro)
        wanted = [row for row in of.rows if row >= 0]
        values = self._store.read(name, wanted, timeout) if wanted else {}
        out = columns.join(values, of, self.all_rows, self._lost, name)
        self._got.setdefault(name, set()).update(wanted)
        if hollow := columns.hollow(values) - self._lost:
            self._hollow.setdefault(name, set()).update(hollow)
            self._store.tell_lost(name, sorted(hollow))
        return out

    def no_value(self, name: str, *, micro: Mapping[str, Any] | None = None) -> NDArray[np.bool_]:
        """[B] True on rows of which column ``name`` says nothing, so that 0 stands there: leave them out of the loss.

        These are fillers, samples whose payload is lost here, and those whose payload the writer had lost (counted as
        ``column_lost``).

        Args:
            micro: as for ``get``, which must have been called before.

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
            lengths = [1 if payload is None else len(payload) for payload in self._decoded] or [1]
            return columns.Layout(list(self._indices) or [-1], lengths)
        of = columns.Layout.of_micro(micro)
        if foreign := set(of.rows) - set(self._indices) - {-1}:
            raise ProtocolError(f"micro holds rows {sorted(foreign)}, which are not of this rank of batch {self.n}.")
        return of

    @cached_property
    def _lost(self) -> frozenset[int]:
        pairs = zip(self._indices, self._decoded, strict=True)
        return frozenset(index for index, payload in pairs if payload is None)

    def _members(
        self, max_tokens: int | None, max_samples: int | None, *, padded: bool, of: Collection[int] | None = None
    ) -> list[list[int]]:
        """Positions in ``rows`` by micro-batch, of the rows in ``of`` alone (None: all); empty lists are fillers."""
        shares = self._shares if of is None else [[i for i in share if i in of] for share in self._shares]
        mine = [at for at, i in enumerate(self._indices) if of is None or i in of]
        lengths = [self.rows[at].length for at in mine]
        members = partition.micro_batches(lengths, max_tokens, max_samples, padded=padded)
        count = partition.num_micro_batches(self.all_rows, shares, max_tokens, max_samples, padded=padded)
        return [[mine[i] for i in one] for one in members] + [[] for _ in range(count - len(members))]

    def _count(self, indices: Collection[int]) -> dict[str, int]:
        """Denominators of the loss over these rows of the whole batch (T10)."""
        bearing = [self._bearing[i] for i in indices]
        return {
            "loss_tokens": sum(bearing),
            "loss_samples": sum(1 for count in bearing if count),
            "samples": len(bearing),
            "groups": len({self.all_rows[i].job for i in indices}),
        }

    @cached_property
    def lost(self) -> list[str]:
        """Ids of this rank's samples whose payload is gone; they are fillers. Decodes the batch."""
        return [row.sample for row, payload in zip(self.rows, self._decoded, strict=True) if payload is None]

    def share(self, dp_rank: int, dp_size: int) -> "Batch":
        """Another split of the same manifest, for who reads all payloads (``dp_size`` 1) and deals them out."""
        other = Batch(
            self.manifest,
            digest=self.digest,
            payloads=self._payloads,
            dp_rank=dp_rank,
            dp_size=dp_size,
            advantage=self._advantage,
            max_staleness=self._max_staleness,
            store=self._store,
            read_sides=self._read_sides,
        )
        other.trained = self.trained
        return other

    def side(self, name: str) -> list[NDArray[Any] | None]:
        """Side array ``name`` of each of this rank's samples, None where one has none. Decodes the batch.

        Those that lie in keys of their own (``sample.sides``) are read now, and not kept: blocks for their bytes.

        Raises:
            PayloadError: one that was committed is gone, or is not what was committed (T17).
        """
        inside = [None if payload is None else payload.sides.get(name) for payload in self._decoded]
        if not any(side[0] == name for row in self.rows for side in row.sides):
            return inside
        if self._read_sides is None:
            raise PayloadError(f"batch {self.n} was made without a way to read side arrays.")
        alive = [row for row, payload in zip(self.rows, self._decoded, strict=True) if payload is not None]
        found = self._read_sides(alive, name)
        return [
            array if array is not None else self._side_of(row, name, found)
            for row, array in zip(self.rows, inside, strict=True)
        ]

    def _side_of(self, row: Row, name: str, found: Mapping[str, bytes | None]) -> NDArray[Any] | None:
        if row.sample not in found:
            return None
        data = found[row.sample]
        if data is None:
            raise PayloadError(f"sample {row.sample}: its side array {name!r} is gone from its payload server.")
        return sides.unpack(name, data, row.sample, next(side[2] for side in row.sides if side[0] == name))

    @cached_property
    def _decoded(self) -> list[Payload | None]:
        """Views into the payload of each of this rank's rows, None where it is lost; decoded once."""
        with collecting_later():
            return [self._decode(row) for row in self.rows]

    def _decode(self, row: Row) -> Payload | None:
        if row.lost:
            return None
        try:
            data = self._payloads(row) if callable(self._payloads) else self._payloads[row.sample]
        except KeyError as exc:
            raise PayloadError(f"sample {row.sample}: batch {self.n} was made without its payload; fetch it.") from exc
        return None if data is None else payloads.decode(data, row.sample, row.checksum)

    def _lag(self, version: int) -> int:
        """Steps of the lineage from ``version`` to the train version (T2); -1 where nothing was drawn."""
        if version not in self._lags:
            self._lags[version] = self._lineage.lag(version, self.train_version) if version >= 0 else -1
        return self._lags[version]

    def _num_loss(self, row: Row) -> int:
        """Tokens of a row that bear loss here."""
        if self._max_staleness is None or not row.num_loss:
            return row.num_loss
        by_version = row.loss_versions or [[row.oldest_loss, row.num_loss]]
        return sum(count for version, count in by_version if self._lag(version) <= self._max_staleness)

    def _flat(self, members: Sequence[int], keys: Collection[str]) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """Token arrays [T] of ``members`` laid end to end, checked, and their lengths [B]; no member: one filler.

        Made for the whole batch at once: an array's worth of work per key, not per sample and key.
        """
        found = [self._decoded[i] for i in members] or [None]
        lengths = np.array([1 if payload is None else len(payload) for payload in found], np.int64)
        pairs = zip(found, lengths.tolist(), strict=True)
        runs = [run for payload, length in pairs for run in layout.runs(payload, length)]
        counts = [count for count, _ in runs]
        mask = np.concatenate([_NOTHING if payload is None else payload.mask for payload in found])
        generated, loss = (mask & payloads.GENERATED).view(np.bool_), (mask >> 1).view(np.bool_)
        #: Made where it is looked at: an array of the whole batch costs as much as reading its payloads.
        make: dict[str, Callable[[], NDArray[Any]]] = {
            "versions": lambda: np.repeat(np.array([version for _, version in runs], np.int32), counts),
            "staleness": lambda: np.repeat(np.array([self._lag(version) for _, version in runs], np.int32), counts),
            "tokens": lambda: np.concatenate(
                [_NOTHING if payload is None else payload.tokens for payload in found], dtype=np.int64
            ),
            "logprobs": lambda: np.concatenate(
                [_NOTHING if payload is None else payload.logprobs for payload in found], dtype=np.float32
            ),
            "advantages": lambda: np.multiply(
                generated,
                np.repeat(
                    np.array([self._advantages[self._indices[i]] for i in members] or [0.0], np.float32), lengths
                ),
                dtype=np.float32,
            ),
        }
        if self.manifest.mask_below >= 0:
            loss &= make["versions"]() >= self.manifest.mask_below
        if self.manifest.mask_offpolicy:
            newest = np.array([self.rows[i].newest for i in members] or [-1], np.int32)
            loss &= make["versions"]() == np.repeat(newest, lengths)
        self._check(members, lengths, runs, generated, loss)
        if self._max_staleness is not None:
            loss &= make["staleness"]() <= self._max_staleness
            self._check_masked(members, int(np.count_nonzero(loss)))
        make |= {"generated": lambda: generated, "loss_mask": lambda: loss}
        return {key: make[key]() for key in TOKEN_KEYS if key in keys}, lengths

    def _check(
        self,
        members: Sequence[int],
        lengths: NDArray[np.int64],
        runs: Sequence[tuple[int, int]],
        generated: NDArray[np.bool_],
        loss: NDArray[np.bool_],
    ) -> None:
        """What is in the payloads must be what the batch was cut by."""
        if not members:
            return
        counts = np.array([count for count, _ in runs], np.int64)
        starts = np.cumsum(counts) - counts
        num_drawn = sum_runs(generated, starts)
        # Mostly every token that was drawn bears loss; comparing takes a fifth of what counting does.
        num_bearing = num_drawn if np.array_equal(generated, loss) else sum_runs(loss, starts)
        run = 0
        for i, left in zip(members, lengths.tolist(), strict=True):
            num_generated, num_loss, oldest = 0, 0, -1
            while left:
                count, version = runs[run]
                num_generated += num_drawn[run]
                if num_bearing[run]:
                    num_loss += num_bearing[run]
                    oldest = version if oldest < 0 else min(oldest, version)
                left -= count
                run += 1
            self._check_row(self.rows[i], self._decoded[i], num_generated, num_loss, oldest)

    def _check_masked(self, members: Sequence[int], found: int) -> None:
        """The denominators count what is left by the manifest; it must be what the payloads leave."""
        wanted = sum(self._num_loss(self.rows[i]) for i in members if self._decoded[i] is not None)
        if found != wanted:
            raise PayloadError(
                f"batch {self.n}: {found} tokens bear loss at staleness {self._max_staleness} or less, its manifest "
                f"says {wanted}: it was cut by a buffer that does not tell loss tokens by version; restart the buffer."
            )

    def _check_row(self, row: Row, payload: Payload | None, num_generated: int, num_loss: int, oldest: int) -> None:
        if payload is None:
            return
        found = (len(payload), payload.prompt_length, num_generated, num_loss)
        wanted = (row.length, row.prompt_length, row.num_generated, row.num_loss)
        if found != wanted:
            raise PayloadError(
                f"sample {row.sample}: length, prompt, generated and loss tokens are {found} in its payload, but batch "
                f"{self.n} was cut with {wanted}."
            )
        if oldest != row.oldest_loss:
            raise PayloadError(
                f"sample {row.sample}: the oldest version that bears loss is {oldest} in its payload, but batch "
                f"{self.n} was cut with {row.oldest_loss}."
            )

    def _padded(self, members: Sequence[int], keys: Collection[str]) -> dict[str, Any]:
        flat, lengths = self._flat(members, keys)
        return {key: layout.pad(array, lengths, TOKEN_KEYS[key][0]) for key, array in flat.items()} | self._per_sample(
            lengths, members
        )

    def _packed(self, members: Sequence[int], keys: Collection[str]) -> dict[str, Any]:
        flat, lengths = self._flat(members, keys)
        out: dict[str, Any] = flat | self._per_sample(lengths, members)
        out["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        out["position_ids"] = np.arange(lengths.sum()) - np.repeat(out["cu_seqlens"][:-1], lengths)
        out["max_length"] = int(lengths.max())
        return out

    def _per_sample(self, lengths: NDArray[np.int64], members: Sequence[int]) -> dict[str, Any]:
        rows = [self.rows[i] for i in members]
        values: dict[str, Any] = {
            "lengths": lengths,
            "temperatures": [row.temperature for row in rows] or [1.0],
            "rewards": [row.reward for row in rows] or [0.0],
            "rows": [self._indices[i] for i in members] or [-1],
        }
        out: dict[str, Any] = {key: np.array(values[key], dtype) for key, dtype in SAMPLE_KEYS.items()}
        out["counts"] = self.counts
        return out
