"""Checks of what several machines have to reach: disks, payload servers, weights, and the clock of Redis."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import redis

from penstock.config import Config
from penstock.errors import PenstockError, ProtocolError
from penstock.metrics.gpu_load import visible_gpus
from penstock.payloads.servers import ServerState
from penstock.payloads.servers import read as read_servers
from penstock.payloads.store import open_store
from penstock.protocol.presence import FRESH_S
from penstock.protocol.scripts import note, read_whole, run
from penstock.records.codec import name_shown, number_in, pack, unpack_map
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.record import readable
from penstock.redis.commands import Client
from penstock.redis.connect import connect
from penstock.text import format_exc, redact, safe_repr, utf8_safe

log = logging.getLogger(__name__)


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    #: Name of the check.
    what: str
    level: Level
    #: Result, as text.
    found: str
    #: Advice to the operator, or an empty string.
    todo: str = ""


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield the findings of all checks, each as it comes; a failed check is a finding itself. Blocks for seconds."""
    for what, check in checks:
        try:
            yield from check()
        except (PenstockError, redis.RedisError, OSError, ValueError) as exc:
            error = str(exc) if isinstance(exc, PenstockError) else format_exc(exc)
            yield Finding(what, Level.ERROR, redact(error))


def passes(what: str, check: Callable[[], object], fine: str) -> Finding:
    """Return the finding of a check that raises one of penstock's errors if something is wrong."""
    try:
        check()
    except PenstockError as exc:
        return Finding(what, Level.ERROR, redact(str(exc)))
    return Finding(what, Level.OK, fine)


#: Largest offset of a clock in seconds without a warning; from ``FRESH_S`` on its worker counts as gone.
CLOCK_S = 1.0
#: Shares of a disk: nearly full, and full.
NEARLY, FULL_DISK = 0.90, 0.97
_STORE_TIMEOUT_S = 2.0


def look_at_clock(client: Client) -> Finding:
    """Compare the clock of Redis with this machine's. Blocks for a round trip."""
    before = time.time()
    seconds, micros = client.time()
    after = time.time()
    theirs = int(seconds) + int(micros) / 1e6
    off = theirs - min(max(theirs, before), after)
    return clock("clock of redis", off, "run a time service (chrony, ntpd) on both machines")


def clock(what: str, off_s: float, todo: str) -> Finding:
    """Return the finding for a clock that is ahead of this machine's by ``off_s``."""
    level = Level.OK if abs(off_s) < CLOCK_S else Level.WARNING if abs(off_s) < FRESH_S else Level.ERROR
    if level is Level.OK:
        return Finding(what, level, "agrees with this machine's")
    return Finding(what, level, f"{abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} this machine's", todo)


def look_at_disk(what: str, path: Path) -> Finding:
    """Check how full the file system of ``path`` is."""
    there = next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))
    disk = os.statvfs(there)
    used, free = disk.f_blocks - disk.f_bfree, disk.f_bavail
    # By df's definition: blocks reserved for root are neither used nor free.
    share = used / (used + free) if used + free else 0.0
    space = f"{path}: {in_mb(free * disk.f_frsize)} free of {in_mb(disk.f_blocks * disk.f_frsize)}"
    if not os.access(there, os.W_OK):
        return Finding(what, Level.ERROR, f"{path} cannot be written by this user", "give it the right, or another one")
    if share < NEARLY:
        return Finding(what, Level.OK, space)
    level = Level.ERROR if share >= FULL_DISK else Level.WARNING
    return Finding(what, level, f"{space}: {share:.0%} used", "make room")


def look_at_payloads(client: Client, keys: Keys) -> Iterator[Finding]:
    """Check whether each payload server answers from here, and has room. Blocks for up to seconds per server."""
    servers = [one for one in read_servers(client, keys).servers.values() if one.state is not ServerState.LOST]
    for server in sorted(servers, key=lambda one: one.name):
        what = f"payload server {server.name}"
        try:
            with contextlib.closing(open_store(server.url, timeout_s=_STORE_TIMEOUT_S)) as store:
                store.check()
                used, most = store.usage()
        except (PenstockError, redis.RedisError) as exc:
            todo = f"start it again, or give it up with `penstock payloads lose {server.name}`"
            yield Finding(what, Level.ERROR, redact(str(exc)), todo)
            continue
        yield Finding(what, Level.OK, f"answers; {in_mb(used)} of {in_mb(most) if most else 'no maxmemory'} used")


def look_at_weights(client: Client, keys: Keys, models: Iterable[str], *, needed: bool = False) -> Iterator[Finding]:
    """Check whether the folder of each model's newest publication can be read from here, and its disk.

    Args:
        needed: whether this process loads them.
    """
    for model in models:
        what = f"weights of {model}"
        for name, fields in client.xrevrange(keys.weights(model), count=1):
            try:
                newest = Publication.from_bytes(fields.get(b"p", b""), f"publication {name.decode(errors='replace')}")
                whole = read_whole(client, keys, newest)
            except ProtocolError as exc:
                yield Finding(what, Level.ERROR, str(exc))
                continue
            if whole is None:
                yield Finding(what, Level.OK, f"the folder of version {newest.version} is incomplete so far")
                continue
            yield from _weights(what, Path(whole.path), needed)


def _weights(what: str, folder: Path, needed: bool) -> Iterator[Finding]:
    config = folder / "config.json"
    try:
        config.open("rb").close()
    except OSError as exc:
        level = Level.ERROR if needed else Level.WARNING
        todo = "mount the folder of weights here"
        todo += "" if needed else ", if a worker or trainer is to run on this machine"
        yield Finding(what, level, f"{config} cannot be read from here ({exc.strerror})", todo)
        return
    yield look_at_disk(what, folder)


def in_mb(num_bytes: int) -> str:
    """Return a size as text."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


# Health checks on workers: each worker checks what it can reach from its machine, on request.
#
# A request is its time in the hash ``looks``. A worker that finds a new time there checks what its own configuration
# and the run's records name, and answers in its own field; the request names no addresses, so it cannot make workers
# connect elsewhere. The hash expires by itself.

#: Field of the hash with the request; names of workers contain a dot.
ASKED = "asked"
#: The hash expires so long after the last request; older ones are not answered.
KEEP_S = 60
#: Most findings of one answer, and characters of each of their texts.
MAX_FINDINGS, MAX_TEXT = 64, 400


@dataclass(frozen=True, slots=True)
class Answer:
    """The findings of one worker."""

    worker: str
    host: str
    findings: list[Finding]


def ask(client: Client, keys: Keys) -> float:
    """Request checks from all workers; return the time, for ``read_answers``. Blocks for two round trips."""
    at = time.time()
    run(client, note(keys, keys.looks, ASKED, pack({"at": at})))
    client.expire(keys.looks, KEEP_S)
    return at


def read_answers(client: Client, keys: Keys, asked_at: float) -> list[Answer]:
    """Return the answers to this request or a later one, by name of the worker. Blocks for a round trip."""
    found = readable(client.hgetall(keys.looks), _answer)
    return sorted((one for one, at in found if one.worker != ASKED and at >= asked_at), key=lambda one: one.worker)


def _answer(name: bytes, raw: bytes) -> tuple[Answer, float]:
    """Parse an answer, and the time of its request."""
    worker = name_shown(name)
    what = f"What worker {safe_repr(worker)} found"
    record = unpack_map(raw, what)
    host, rows = record.get("host", ""), record.get("findings", [])
    if not isinstance(host, str) or not isinstance(rows, list):
        raise ProtocolError(f"{what} is not a record that penstock wrote.")
    findings = [_finding(row, what) for row in rows[:MAX_FINDINGS]]
    return Answer(worker, host[:MAX_TEXT], findings), number_in(record, "at", what)


def _finding(row: Any, what: str) -> Finding:
    if not isinstance(row, list) or len(row) != 4 or not all(isinstance(text, str) for text in row):
        raise ProtocolError(f"{what} has a finding that penstock did not write: {safe_repr(row)}.")
    looked_at, level, found, todo = (text[:MAX_TEXT] for text in row)
    if level not in list(Level):
        raise ProtocolError(f"{what} has a finding with an invalid level: {safe_repr(level)}.")
    return Finding(looked_at, Level(level), found, todo)


class Responder:
    """Answers the requests to one worker. ``received`` belongs to one thread; checks run in another, never joined."""

    def __init__(self, config: Config, worker: str) -> None:
        self._config = config
        self._worker = worker
        self._answered = 0.0
        self._thread: threading.Thread | None = None

    def received(self, question: bytes | None) -> None:
        """Answer the request in the field ``asked``, unless that is done or an earlier check hangs. Returns at once."""
        if question is None or (self._thread is not None and self._thread.is_alive()):
            return
        try:
            at = number_in(unpack_map(question, "The question"), "at", "The question")
        except ProtocolError:
            return  # its sender reports the missing answer
        if at == self._answered:
            return
        self._answered = at
        self._thread = threading.Thread(target=self._look, args=(at,), name="looks", daemon=True)
        self._thread.start()

    def _look(self, at: float) -> None:
        keys = Keys(self._config.run)
        assert self._config.redis.url is not None
        try:
            with connect(self._config.redis.url, check=False) as client:
                findings = list(run_checks(self._checks(client, keys)))[:MAX_FINDINGS]
                record = {"at": at, "host": socket.gethostname(), "findings": [_row(one) for one in findings]}
                if client.hget(keys.looks, ASKED) is not None:
                    run(client, note(keys, keys.looks, self._worker, pack(record)))
        except Exception as exc:  # a thread of ours that dies says nothing to anybody
            log.warning("failed to report what this worker reaches: %s", redact(format_exc(exc)))

    def _checks(self, client: Client, keys: Keys) -> Iterator[tuple[str, Check]]:
        config = self._config
        yield "clock of redis", lambda: [look_at_clock(client)]
        yield "run's folder", lambda: [look_at_disk("run's folder", config.run_dir)]
        yield "payload servers", lambda: look_at_payloads(client, keys)
        yield "weights", lambda: look_at_weights(client, keys, [config.model.name], needed=True)
        yield "gpus", lambda: [Finding("gpus", Level.OK, ", ".join(visible_gpus()) or "none")]


def _row(finding: Finding) -> list[str]:
    texts = (finding.what, finding.level.value, finding.found, finding.todo)
    return [utf8_safe(redact(text))[:MAX_TEXT] for text in texts]
