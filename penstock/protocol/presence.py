"""A worker's presence: what it shows of itself in Redis twice a second, and how everybody else reads it."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from penstock.errors import ProtocolError
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import unpack
from penstock.protocol.records.field_checks import checks_of
from penstock.protocol.records.readable import readable
from penstock.protocol.records.small_maps import name_in, name_shown
from penstock.redis.commands import Client
from penstock.words import shown

#: Nobody counts on a process whose record is older: no trainer waits for such a worker or keeps weights for it.
FRESH_S = 10.0
#: Who asks why a run stalls is told of a part that is silent for longer: parts show themselves every 2 s at least.
SILENT_S = 5.0
#: It is shown, and may come back, for longer; a process whose record is older than this is gone.
GONE_S = 15.0

#: Of a record are read at most so many characters of a reason and of any other text, and entries of a list.
MAX_WHY = 4_000
MAX_WORD = 200
MAX_ENTRIES = 4_096
#: GPUs that a worker tells of, at most.
MAX_GPUS = 64


class WorkerState(StrEnum):
    """What a worker is doing, as far as others can count on it."""

    #: Its engine is on its way up for the first time.
    STARTING = "starting"
    #: Its engine is up and no version has been loaded.
    NO_WEIGHTS = "no weights"
    SERVING = "serving"
    #: It serves an older version, because the newest one cannot be loaded.
    CANNOT_LOAD = "cannot load"
    #: Its engine has given up memory.
    OFFLOADED = "offloaded"
    RESTARTING_ENGINE = "restarting engine"
    #: An external engine, or all engines behind its router, do not answer.
    ENGINE_AWAY = "engine away"
    #: Its engine failed again and again; it is tried again now and then.
    CRASH_LOOP = "crash loop"
    #: It takes no more jobs and leaves when those that it holds have ended.
    DRAINING = "draining"


class EngineState(StrEnum):
    """What an engine behind a worker's router is doing."""

    #: It has no weights yet, or not ours.
    JOINING = "joining"
    SERVING = "serving"
    #: It ends what it has.
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePresence:
    """One engine behind a worker's router."""

    url: str = ""
    #: regular | prefill | decode
    worker_type: str = "regular"
    #: Where decode engines fetch KV from; prefill only.
    bootstrap_port: int | None = None
    #: An ``EngineState``.
    state: str = ""
    #: Version of its weights; -1 for none.
    version: int = -1
    #: Why it does not serve; '' where it does.
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """One GPU of a worker's engine, as it stood a moment ago."""

    #: As CUDA_VISIBLE_DEVICES takes it: a number, a UUID or the name of a MIG instance.
    name: str = ""
    #: What it is: NVIDIA H200.
    model: str = ""
    #: Share of the time in which it ran something, 0 to 1; -1: it does not tell, as a MIG instance.
    use: float = -1.0
    used_bytes: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPresence:
    """What a worker shows of itself. The names of the fields are those of the record in Redis.

    A field that another version of penstock does not write has its default; texts beyond ``MAX_WHY`` and ``MAX_WORD``
    characters are cut when they are read.
    """

    #: As it was started (``--name``), a dot, and a random end; unique.
    name: str = ""
    #: When it was written, by the worker's clock (Unix time, seconds).
    at: float = 0.0
    host: str = ""
    #: Of the worker's process.
    pid: int = 0
    #: Kind and version of its engine.
    engine: str = ""
    #: Of the engine's process; 0 where it has none.
    engine_pid: int = 0
    #: Address of its engine or router, without a password.
    url: str = ""
    #: Version of the weights that it draws with; -1 before the first.
    version: int = -1
    #: A ``WorkerState``, or a word that only another version of penstock knows.
    state: str = ""
    #: Jobs that it has leased.
    held: int = 0
    #: Samples that are being drawn.
    running: int = 0
    #: Most samples that are drawn at once.
    slots: int = 0
    #: Tokens drawn per second, smoothed over the last few seconds.
    tokens_per_s: float = 0.0
    #: Tokens per second with all slots full; 0 as long as they never were.
    capacity_tokens_per_s: float = 0.0
    #: Samples of held jobs that are not committed.
    open_samples: int = 0
    #: Since it started: tokens drawn, samples and groups committed, jobs failed, leases lost.
    generated_tokens: int = 0
    samples: int = 0
    groups: int = 0
    failed: int = 0
    lost_leases: int = 0
    #: Revision of the directory of payload servers that it writes by; '' where it may write to others yet.
    servers_seen: str = ""
    engine_restarts: int = 0
    #: Whether its engine was started by somebody else.
    external: bool = False
    #: Why it does not do what it should; '' where it does.
    why: str = ""
    #: GPUs of its engine that weights can be sent to; 0: none can.
    ranks: int = 0
    #: Layout (``weights/index.py``) of weights that it can be sent before they have a folder; '': of none.
    layout: str = ""
    #: Version whose folder it waits for: it can take the next one that is sent at once; -1: for none.
    awaits: int = -1
    #: Tags of the memory that its engine has given up.
    offloaded: list[str] = field(default_factory=list)
    #: Whether health checks of its engine are left out.
    unwatched: bool = False
    #: Up to when (Unix time, seconds) it has followed calls for lost engines.
    revived_at: float = 0.0
    #: Where its own metrics are; '' for nowhere.
    metrics: str = ""
    #: Those behind its router; [] of a worker with a single engine.
    engines: list[EnginePresence] = field(default_factory=list)
    #: GPUs of its engine, where that is its own and they tell: [] does not say that there are none.
    gpus: list[GpuLoad] = field(default_factory=list)
    #: What its tasks wait for: ``task``, and the record of the wait (``waits.Waiting``).
    waits: list[dict[str, Any]] = field(default_factory=list)
    #: Seconds since it was written, when it was read; not in the record.
    age_s: float = field(default=0.0, compare=False)

    @property
    def started_as(self) -> str:
        """The name that it was started with."""
        return self.name.rsplit(".", 1)[0]

    @property
    def engine_urls(self) -> list[str]:
        """Addresses of its engines: those behind its router, or the one that it has."""
        return [one.url for one in self.engines if one.url] or ([self.url] if self.url else [])

    @property
    def reason(self) -> str:
        """Why it does not do what it should, or else what it is doing."""
        return self.why or self.state

    def to_record(self) -> dict[str, Any]:
        """Plain values, every field by its name, as they stand in Redis."""
        record = asdict(self)
        del record["age_s"]
        return record

    @classmethod
    def from_record(cls, record: Any, *, now: float | None = None) -> "WorkerPresence":
        """What ``to_record`` gave, by whichever version of penstock; fields that this one does not know are left out.

        Args:
            now: what its age is reckoned by (Unix time, seconds); None: this machine's clock.

        Raises:
            ProtocolError: a field cannot be what it should be; names the worker.
        """
        what = f"The presence of worker {record.get('name')!s:.200}" if isinstance(record, dict) else "A presence"
        known = _known(cls, record, what)
        at = float(known.get("at", 0.0))
        known["engines"] = [EnginePresence(**_known(EnginePresence, one, what)) for one in known.get("engines", ())]
        known["gpus"] = [GpuLoad(**_known(GpuLoad, one, what)) for one in known.get("gpus", [])[:MAX_GPUS]]
        known["age_s"] = max(0.0, (time.time() if now is None else now) - at)
        return cls(**known)


def _known(cls: type, record: Any, what: str) -> dict[str, Any]:
    """The fields of ``cls`` that a record has."""
    if not isinstance(record, dict):
        raise ProtocolError(f"{what} is not a record that penstock wrote.")
    checks = checks_of(cls)
    for name, check in checks.items():
        if name in record and not check(record[name]):
            raise ProtocolError(f"{what} has a field {name} that it cannot have: {shown(record[name])}.")
        if name in record and isinstance(record[name], float) and not math.isfinite(record[name]):
            raise ProtocolError(f"{what} has a field {name} that is no finite number: {record[name]}.")
    return {name: _cut(name, record[name]) for name in cls.__dataclass_fields__ if name in record}  # type: ignore[attr-defined]


def _cut(name: str, value: Any) -> Any:
    """``value`` as it is shown: whoever looks is not kept busy by a text or a list of any length."""
    if isinstance(value, str):
        return value[: MAX_WHY if name == "why" else MAX_WORD]
    if isinstance(value, list):
        return [_cut("", one) for one in value[:MAX_ENTRIES]]
    return value


def parse_workers(
    records: Mapping[bytes, bytes], *, now: float | None = None, all_: bool = False
) -> list[WorkerPresence]:
    """The workers of the hash ``workers``, by name. One whose record cannot be read is left out, and said once.

    Args:
        now: what ages are reckoned by (Unix time, seconds); None: this machine's clock.
        all_: raise instead, unless nobody renews that record any more; for whoever must not go on while a worker may
            hold what it does not show.

    Raises:
        ProtocolError: with ``all_``; names the worker and the field.
    """
    now = time.time() if now is None else now
    if all_:
        for name, raw in sorted(records.items()):
            _check_readable(name, raw, now)
    return readable(records, partial(_read, now=now))


def _read(name: bytes, raw: bytes, now: float) -> WorkerPresence:
    record = unpack(raw, f"The presence of worker {name_shown(name)}")
    named = {"name": name_in(name, "A worker"), **record} if isinstance(record, dict) else record
    return WorkerPresence.from_record(named, now=now)


def _check_readable(name: bytes, raw: bytes, now: float) -> None:
    """Raise ProtocolError where a worker that may live has a record that cannot be read."""
    try:
        _read(name, raw, now)
    except ProtocolError as exc:
        if not _is_old(raw, now):
            raise ProtocolError(f"{exc} End that worker: within a minute its record counts no more.") from exc


def _is_old(raw: bytes, now: float) -> bool:
    """Whether a record that cannot be read was at least written, and too long ago to be of a worker that lives."""
    try:
        record = unpack(raw, "A presence")
    except ProtocolError:
        return False
    at = record.get("at") if isinstance(record, dict) else None
    return isinstance(at, float) and now - at > FRESH_S


def read_workers(client: Client, keys: Keys, *, all_: bool = False) -> list[WorkerPresence]:
    """All workers that have a presence, those that are gone and not yet tidied up too. Blocks for a round trip.

    ``all_`` as of :func:`parse_workers`.
    """
    return parse_workers(client.hgetall(keys.workers), all_=all_)


def live_workers(client: Client, keys: Keys, *, all_: bool = False) -> list[WorkerPresence]:
    """The workers that are alive. Blocks for a round trip. ``all_`` as of :func:`parse_workers`."""
    return [one for one in read_workers(client, keys, all_=all_) if one.age_s <= FRESH_S]
