"""Read groups that wait to be recorded from Redis: fields, sample records, and uses in batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import ProtocolError
from penstock.records.codec import count_of, count_shown, name_shown
from penstock.records.job import tries_of
from penstock.records.keys import Keys
from penstock.records.sample import BatchUse, uses_of
from penstock.records.sample_meta import SampleMeta, iter_metas
from penstock.redis.commands import Client


@dataclass(frozen=True, slots=True)
class Retired:
    """Hold a retiring group."""

    job: str
    lane: str = ""
    #: Position in the order of admission; 0 if unreadable.
    seq: int = 0
    #: Ledger account of the tokens (``masked`` even if some bore loss); '' before the group retires.
    account: str = ""
    #: Subscription that used the group -> its last durable batch at retirement.
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 0
    crashes: int = 0
    #: Leases of the group, parsed by ``penstock.records.job``.
    tries: str = ""
    #: Times in Unix seconds; 0 if unknown or never.
    admitted_s: float = 0.0
    leased_s: float = 0.0
    ready_s: float = 0.0
    #: Subscription -> batches with the group.
    uses: Mapping[str, Sequence[BatchUse]] = field(default_factory=dict)
    #: k of samples with lost payloads.
    lost: frozenset[int] = frozenset()
    samples: Sequence[SampleMeta] = ()
    label: str = ""
    #: Description of invalid fields; '' if all fields are valid.
    broken: str = ""


def read_retired(client: Client, keys: Keys, jobs: Sequence[str]) -> list[Retired]:
    """Read groups, skipping missing ones. Blocks for a round trip."""
    pipe = client.pipeline(transaction=False)
    for job in jobs:
        pipe.hgetall(keys.group(job))
        pipe.get(keys.meta(job))
    answers = pipe.execute()
    found = zip(jobs, answers[::2], answers[1::2], strict=True)
    return [group_of(job, raw, meta) for job, raw, meta in found if raw]


def group_of(job: str, raw: Mapping[bytes, bytes], meta: bytes | None) -> Retired:
    """Parse a group from its hash and its records; describe invalid fields in ``broken``."""
    try:
        return _group_of(job, raw, meta)
    except (ProtocolError, ValueError) as exc:
        return Retired(job, lane=name_shown(raw.get(b"ln", b"")), broken=str(exc))


def _group_of(job: str, raw: Mapping[bytes, bytes], meta: bytes | None) -> Retired:
    first_entry = raw.get(b"eid", b"0").partition(b"-")[0]
    what, number = f"group {job}", f"A number of group {job}"
    samples = sorted(iter_metas(meta or b"", f"metadata of group {job}"), key=lambda one: one.k)
    return Retired(
        job,
        lane=name_shown(raw.get(b"ln", b"")),
        seq=count_of(raw.get(b"seq"), number),
        account=name_shown(raw.get(b"ac", b"")),
        checkpoints=_checkpoints(raw.get(b"cp", b""), number),
        attempts=count_of(raw.get(b"att"), number),
        crashes=count_of(raw.get(b"cr"), number),
        tries=_tries(raw.get(b"tr", b""), what),
        admitted_s=count_of(raw.get(b"ta", first_entry), number) / 1000,
        leased_s=count_of(raw.get(b"t0"), number) / 1000,
        ready_s=count_of(raw.get(b"t1"), number) / 1000,
        uses={name: uses_of(value, what) for name, value in _under(raw, b"h:")},
        lost=frozenset(int(k) for k, _ in _under(raw, b"x:")),
        samples=samples,
        label=next((one.label for one in samples if one.label), ""),
    )


def _checkpoints(raw: bytes, number: str) -> dict[str, int]:
    """Parse ``SUB:N,SUB:N``. Raises ProtocolError if the text is invalid."""
    pairs = [word.partition(b":") for word in raw.split(b",") if word]
    return {name_shown(name): count_of(value, number) for name, _, value in pairs}


def _tries(raw: bytes, what: str) -> str:
    """Decode the leases of a group. Raises ProtocolError if they are invalid."""
    tries = raw.decode("utf-8")
    tries_of(tries, what)
    return tries


def _under(raw: Mapping[bytes, bytes], prefix: bytes) -> list[tuple[str, bytes]]:
    """Return fields with a prefix, by name without the prefix."""
    return [(name_shown(name[len(prefix) :]), value) for name, value in raw.items() if name.startswith(prefix)]


def read_trained(client: Client, keys: Keys, groups: Sequence[Retired]) -> dict[tuple[str, int], float]:
    """Return (subscription, batch) -> commit time of all ranks (Unix seconds), if known to Redis. Blocks."""
    wanted: dict[str, set[int]] = {}
    for group in groups:
        for sub, uses in group.uses.items():
            wanted.setdefault(sub, set()).update(use.batch for use in uses)
    found = {}
    for sub, batches in wanted.items():
        ordered = sorted(batches)
        times = client.hmget(keys.trained(sub), ordered)
        known = zip(ordered, times, strict=True)
        found.update({(sub, n): ms / 1000 for n, raw in known if (ms := count_shown(raw)) is not None})
    return found
