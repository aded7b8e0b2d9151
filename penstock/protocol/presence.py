"""Define a worker's presence record, by which it reports its state twice a second, and read such records."""

import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from penstock.errors import ProtocolError
from penstock.protocol.scripts import note, run
from penstock.records.codec import checks_of, name_in, name_shown, pack, unpack
from penstock.records.keys import Keys
from penstock.records.record import readable
from penstock.redis.commands import Client
from penstock.redis.control import PASSING
from penstock.text import safe_repr

#: Interval of confirmation; a record older than ``presence.FRESH_S`` is ignored.
CONFIRM_S = 2.0


class Attendance:
    """The presence record of one process. Methods block for at most one round trip; an unreachable Redis is ignored.

    Args:
        part: kind of the process: producer, buffer, ...
        name: name of the process, if one machine may run several that have names.
        metrics: address of its metrics; '' if it serves none.
    """

    def __init__(self, client: Client, keys: Keys, part: str, *, name: str = "", metrics: str = "") -> None:
        self._client = client
        self._keys = keys
        host, pid = socket.gethostname(), os.getpid()
        self._name = ":".join(filter(None, (part, host, str(pid), name)))
        self._shown: dict[str, str | int] = {"part": part, "host": host, "pid": pid}
        self._shown |= {key: value for key, value in (("name", name), ("metrics", metrics)) if value}
        self._confirmed_s = 0.0

    def confirm(self) -> None:
        """Confirm the record if that is due. Cheap to call in a loop."""
        if time.monotonic() - self._confirmed_s < CONFIRM_S:
            return
        if self._write(pack({**self._shown, "at": time.time()})):
            self._confirmed_s = time.monotonic()

    def end(self) -> None:
        """Delete the record: this process exits normally."""
        self._write(b"")

    def _write(self, record: bytes) -> bool:
        try:
            run(self._client, note(self._keys, self._keys.parts, self._name, record))
        except PASSING:
            return False
        return True


#: A process whose record is older is ignored: no trainer waits for such a worker or keeps weights for it.
FRESH_S = 10.0
#: `penstock why` reports processes that are silent for longer: they write their records at least every 2 s.
SILENT_S = 5.0
#: A process whose record is older than this is gone; until then it is shown, and may return.
GONE_S = 15.0

#: Limits for reading a record: characters of a reason and of any other text, and entries of a list.
MAX_WHY = 4_000
MAX_WORD = 200
MAX_ENTRIES = 4_096
#: Most GPUs in a worker's record.
MAX_GPUS = 64


class WorkerState(StrEnum):
    """State of a worker as it reports it."""

    #: Its engine starts for the first time.
    STARTING = "starting"
    #: Its engine is up and no version has been loaded.
    NO_WEIGHTS = "no weights"
    SERVING = "serving"
    #: It serves an older version, because the newest one cannot be loaded.
    CANNOT_LOAD = "cannot load"
    #: Its engine has offloaded memory.
    OFFLOADED = "offloaded"
    RESTARTING_ENGINE = "restarting engine"
    #: An external engine, or all engines behind its router, do not answer.
    ENGINE_AWAY = "engine away"
    #: Its engine failed repeatedly; restarts continue with a backoff.
    CRASH_LOOP = "crash loop"
    #: It takes no more jobs and exits when those that it holds have ended.
    DRAINING = "draining"


class EngineState(StrEnum):
    """State of an engine behind a worker's router."""

    #: It has no weights yet, or not ours.
    JOINING = "joining"
    SERVING = "serving"
    #: It finishes its requests.
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePresence:
    """One engine behind a worker's router."""

    url: str = ""
    #: regular | prefill | decode
    worker_type: str = "regular"
    #: Port from which decode engines fetch KV; prefill only.
    bootstrap_port: int | None = None
    #: An ``EngineState``.
    state: str = ""
    #: Version of its weights; -1 for none.
    version: int = -1
    #: Why it does not serve; '' if it does.
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """Recent load of one GPU of a worker's engine."""

    #: Its name in CUDA_VISIBLE_DEVICES: a number, a UUID or the name of a MIG instance.
    name: str = ""
    #: Product name, such as NVIDIA H200.
    model: str = ""
    #: Share of the time in which it was busy, 0 to 1; -1: not reported, as for a MIG instance.
    use: float = -1.0
    used_bytes: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPresence:
    """The presence record of a worker. The names of the fields are those of the record in Redis.

    A field that another version of penstock does not write has its default; texts longer than ``MAX_WHY`` and
    ``MAX_WORD`` characters are cut when they are read.
    """

    #: The name it was started with (``--name``), a dot, and a random suffix; unique.
    name: str = ""
    #: When it was written, by the worker's clock (Unix time, seconds).
    at: float = 0.0
    host: str = ""
    #: PID of the worker's process.
    pid: int = 0
    #: Kind and version of its engine.
    engine: str = ""
    #: PID of the engine's process; 0 if it has none.
    engine_pid: int = 0
    #: Address of its engine or router, without a password.
    url: str = ""
    #: Version of the weights that it generates with; -1 before the first.
    version: int = -1
    #: A ``WorkerState``, or a state that only another version of penstock knows.
    state: str = ""
    #: Jobs that it has leased.
    held: int = 0
    #: Samples that are being generated.
    running: int = 0
    #: Most samples that are generated at once.
    slots: int = 0
    #: Tokens generated per second, smoothed over the last few seconds.
    tokens_per_s: float = 0.0
    #: Tokens per second with all slots full; 0 until they have been.
    capacity_tokens_per_s: float = 0.0
    #: Samples of held jobs that are not committed.
    open_samples: int = 0
    #: Since it started: tokens generated, samples and groups committed, jobs failed, leases lost.
    generated_tokens: int = 0
    samples: int = 0
    groups: int = 0
    failed: int = 0
    lost_leases: int = 0
    #: Revision of the directory of payload servers that it uses; '' if it may write to others yet.
    servers_seen: str = ""
    engine_restarts: int = 0
    #: Whether penstock did not start its engine.
    external: bool = False
    #: Why it does not serve as it should; '' if it does.
    why: str = ""
    #: GPUs of its engine that weights can be sent to; 0: none can.
    ranks: int = 0
    #: Layout (``weights/index.py``) of weights that it can receive before they have a folder; '': none.
    layout: str = ""
    #: Version whose folder it waits for, so it can receive the next transfer at once; -1: none.
    awaits: int = -1
    #: Tags of the memory that its engine has offloaded.
    offloaded: list[str] = field(default_factory=list)
    #: Whether health checks of its engine are ignored.
    unwatched: bool = False
    #: Time (Unix time, seconds) of the latest request to restart lost engines that it has followed.
    revived_at: float = 0.0
    #: Address of its metrics; '' if it serves none.
    metrics: str = ""
    #: Address of its endpoint for gateways; '' if no dataset of its configuration is run by agents.
    agents_url: str = ""
    #: Engines behind its router; [] for a worker with a single engine.
    engines: list[EnginePresence] = field(default_factory=list)
    #: GPUs of its engine, if penstock started it and their load is known: [] does not mean that it has none.
    gpus: list[GpuLoad] = field(default_factory=list)
    #: Waits of its tasks: ``task``, and the record of the wait (``waits.Waiting``).
    waits: list[dict[str, Any]] = field(default_factory=list)
    #: Seconds since it was written, when it was read; not in the record.
    age_s: float = field(default=0.0, compare=False)

    @property
    def started_as(self) -> str:
        """The name that it was started with."""
        return self.name.rsplit(".", 1)[0]

    @property
    def engine_urls(self) -> list[str]:
        """Addresses of its engines: those behind its router, or its only one."""
        return [one.url for one in self.engines if one.url] or ([self.url] if self.url else [])

    @property
    def reason(self) -> str:
        """Why it does not serve as it should, or else its state."""
        return self.why or self.state

    def to_record(self) -> dict[str, Any]:
        """Return plain values, every field by its name, as in Redis."""
        record = asdict(self)
        del record["age_s"]
        return record

    @classmethod
    def from_record(cls, record: Any, *, now: float | None = None) -> "WorkerPresence":
        """Read a result of ``to_record``, written by any version of penstock; unknown fields are ignored.

        Args:
            now: time from which its age is computed (Unix time, seconds); None: this machine's clock.

        Raises:
            ProtocolError: a field is invalid; names the worker.
        """
        what = f"The presence of worker {record.get('name')!s:.200}" if isinstance(record, dict) else "A presence"
        known = _known(cls, record, what)
        at = float(known.get("at", 0.0))
        known["engines"] = [EnginePresence(**_known(EnginePresence, one, what)) for one in known.get("engines", ())]
        known["gpus"] = [GpuLoad(**_known(GpuLoad, one, what)) for one in known.get("gpus", [])[:MAX_GPUS]]
        known["age_s"] = max(0.0, (time.time() if now is None else now) - at)
        return cls(**known)


def _known(cls: type, record: Any, what: str) -> dict[str, Any]:
    """Return the fields of ``cls`` that a record has, checked."""
    if not isinstance(record, dict):
        raise ProtocolError(f"{what} is not a record that penstock wrote.")
    checks = checks_of(cls)
    for name, check in checks.items():
        if name in record and not check(record[name]):
            raise ProtocolError(f"{what} has a field {name} that it cannot have: {safe_repr(record[name])}.")
        if name in record and isinstance(record[name], float) and not math.isfinite(record[name]):
            raise ProtocolError(f"{what} has a field {name} that is no finite number: {record[name]}.")
    return {name: _truncate(name, record[name]) for name in cls.__dataclass_fields__ if name in record}  # type: ignore[attr-defined]


def _truncate(name: str, value: Any) -> Any:
    """Truncate a text or a list to the length limits of presence records."""
    if isinstance(value, str):
        return value[: MAX_WHY if name == "why" else MAX_WORD]
    if isinstance(value, list):
        return [_truncate("", one) for one in value[:MAX_ENTRIES]]
    return value


def parse_workers(
    records: Mapping[bytes, bytes], *, now: float | None = None, all_: bool = False
) -> list[WorkerPresence]:
    """Parse the hash ``workers``, sorted by name. Unreadable records are skipped and logged once.

    Args:
        now: time from which ages are computed (Unix time, seconds); None: this machine's clock.
        all_: raise for an unreadable record that is still renewed: for callers that must not continue while a worker
            may hold something that its record does not show.

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
    """Raise ProtocolError if a worker that may be alive has an unreadable record."""
    try:
        _read(name, raw, now)
    except ProtocolError as exc:
        if not _is_old(raw, now):
            raise ProtocolError(f"{exc} End that worker: within a minute its record counts no more.") from exc


def _is_old(raw: bytes, now: float) -> bool:
    """Return whether an unreadable record has a time that is too old for a live worker."""
    try:
        record = unpack(raw, "A presence")
    except ProtocolError:
        return False
    at = record.get("at") if isinstance(record, dict) else None
    return isinstance(at, float) and now - at > FRESH_S


def read_workers(client: Client, keys: Keys, *, all_: bool = False) -> list[WorkerPresence]:
    """Return all workers that have a presence record, also those that are gone. Blocks for a round trip.

    ``all_``: see :func:`parse_workers`.
    """
    return parse_workers(client.hgetall(keys.workers), all_=all_)


def live_workers(client: Client, keys: Keys, *, all_: bool = False) -> list[WorkerPresence]:
    """Return the workers that are alive. Blocks for a round trip. ``all_``: see :func:`parse_workers`."""
    return [one for one in read_workers(client, keys, all_=all_) if one.age_s <= FRESH_S]
