"""One write: finished samples of one job, encoded as payload bytes and records."""

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock import payloads
from penstock.errors import PayloadError
from penstock.names import Lane
from penstock.payloads import sides
from penstock.protocol.keys import Keys
from penstock.protocol.records.drawn import Drawn
from penstock.protocol.records.sample import Sample
from penstock.protocol.records.sample_meta import MAX_META_BYTES, SampleMeta
from penstock.protocol.scripts import Committed


@dataclass(slots=True, eq=False)
class Write:
    """Samples of one job being written."""

    job: str
    #: Token of the lease.
    token: str
    done: "asyncio.Future[Committed]"
    samples: Sequence[Sample]
    temperature: float
    kind: str
    #: Whether a reward of the whole group follows.
    with_reward: bool = False
    #: Discarded tokens of each sample; empty: none.
    accounts: Sequence[Drawn] = ()
    #: Payload server that has, or will have, its payloads.
    server: str = ""
    #: (k, oldest version, metadata record) of each.
    records: list[tuple[int, int, bytes]] = field(default_factory=list)
    #: Token usage, by k.
    told: dict[int, Drawn] = field(default_factory=dict)
    #: Server -> (key, bytes) not written yet; all samples of a write share one value, side arrays have their own.
    payloads: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    #: What was written to the control Redis, and how often the connection to it had been lost before.
    on_control: list[tuple[str, bytes]] = field(default_factory=list)
    losses: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for pairs in self.payloads.values() for _, data in pairs)

    def pack(self, server: str, keys: Keys, *, worker: str, wanted: Sequence[str]) -> None:
        """Encode its payloads for ``server``, and the records that name it; call again if the server changes.

        Args:
            worker: recorded with each sample.
            wanted: side arrays that the run requires.

        Raises:
            PayloadError: the arrays of a sample are inconsistent, or a required side array is missing.
        """
        samples = self.samples
        data, metas = payloads.pack(
            samples,
            token=self.token,
            server=server,
            worker=worker,
            temperature=self.temperature,
            logprob_kind=self.kind,
        )
        self.payloads = {server: [(keys.payload(samples[0].id, self.token), data)]}
        metas = [self._pack_sides(sample, meta, keys, wanted) for sample, meta in zip(samples, metas, strict=True)]
        self.records = [
            (meta.k, meta.oldest, bounded_record(sample.id, meta)) for sample, meta in zip(samples, metas, strict=True)
        ]
        thrown = self.accounts or [Drawn()] * len(metas)
        self.told = {
            meta.k: replace(account, live=Drawn.recorded(meta).live)
            for meta, account in zip(metas, thrown, strict=True)
        }
        self.server = server

    def _pack_sides(self, sample: Sample, meta: SampleMeta, keys: Keys, wanted: Sequence[str]) -> SampleMeta:
        """Add the side arrays of a sample to its payloads; return the record that names them."""
        # Evaluated and scored samples are not trained.
        is_untrained = sample.job.lane in (Lane.EVAL, Lane.SCORE)
        if is_untrained:
            wanted = ()
        shared = {} if sample.pictures is None or is_untrained else sample.pictures.packed
        if not sample.sides and not wanted and not shared:
            return meta
        arrays = sides.pack_all(sample.sides, sample.id, [name for name in wanted if name not in shared])
        if taken := sorted(arrays.keys() & shared.keys()):
            raise PayloadError(
                f"sample {sample.id}: its side array {taken[0]!r} has the name of a model input made from its images: "
                "rename the side array."
            )
        entries = [[name, len(data), zlib.crc32(data)] for name, data in arrays.items()]
        entries += [one.entry(name) for name, one in shared.items()]
        data_of = arrays | {name: one.data for name, one in shared.items()}
        # Written unless they exist: arrays of the group once, with whichever sample comes first.
        pairs = [(sides.key_of(keys, self.job, sample.k, self.token, entry), data_of[entry[0]]) for entry in entries]
        self.payloads[meta.server] += pairs
        return replace(meta, sides=entries)


def bounded_record(sample: str, meta: SampleMeta) -> bytes:
    """Encode the record of a sample. Raises PayloadError if it is longer than a reader accepts."""
    data = meta.to_bytes()
    if len(data) > MAX_META_BYTES:
        raise PayloadError(
            f"sample {sample}: its record has {len(data):,} bytes, more than the {MAX_META_BYTES:,} of one."
        )
    return data
