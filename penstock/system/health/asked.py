"""Health checks on workers: each worker checks what it can reach from its machine, on request.

A request is its time in the hash ``looks``. A worker that finds a new time there checks what its own configuration
and the run's records name, and answers in its own field; the request names no addresses, so it cannot make workers
connect elsewhere. The hash expires by itself.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.config import Config
from penstock.errors import ProtocolError
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import pack
from penstock.protocol.records.readable import readable
from penstock.protocol.records.small_maps import name_shown, number_in, unpack_map
from penstock.protocol.scripts import note, run
from penstock.redaction import redact
from penstock.redis.commands import Client
from penstock.redis.connect import connect
from penstock.system.gpus import visible_gpus
from penstock.system.health.finding import Check, Finding, Level, run_checks
from penstock.system.health.look import look_at_clock, look_at_disk, look_at_payloads, look_at_weights
from penstock.text import format_exc, safe_repr, utf8_safe

#: Field of the hash with the request; names of workers contain a dot.
ASKED = "asked"
#: The hash expires so long after the last request; older ones are not answered.
KEEP_S = 60
#: Most findings of one answer, and characters of each of their texts.
MAX_FINDINGS, MAX_TEXT = 64, 400

log = logging.getLogger(__name__)


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
    """Answers the requests to one worker. ``heard`` belongs to one thread; checks run in another, never joined."""

    def __init__(self, config: Config, worker: str) -> None:
        self._config = config
        self._worker = worker
        self._answered = 0.0
        self._thread: threading.Thread | None = None

    def heard(self, question: bytes | None) -> None:
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
