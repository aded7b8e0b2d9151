"""Presence of processes other than workers: one small record each, so that a killed process can be named."""

import os
import socket
import time

from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import pack
from penstock.protocol.scripts import note, run
from penstock.redis.commands import Client
from penstock.redis.control import PASSING

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
        self._told = 0.0

    def confirm(self) -> None:
        """Confirm the record if that is due. Cheap to call in a loop."""
        if time.monotonic() - self._told < CONFIRM_S:
            return
        if self._write(pack({**self._shown, "at": time.time()})):
            self._told = time.monotonic()

    def end(self) -> None:
        """Delete the record: this process exits normally."""
        self._write(b"")

    def _write(self, record: bytes) -> bool:
        try:
            run(self._client, note(self._keys, self._keys.parts, self._name, record))
        except PASSING:
            return False
        return True
