"""Presence of parts that are no workers: a small record each, so that one that was killed can be named by who waits."""

import os
import socket
import time

from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import pack
from penstock.protocol.scripts import note, run
from penstock.redis.commands import Client
from penstock.redis.control import PASSING

#: A record is confirmed so often; nobody counts on one that is older than ``presence.FRESH_S``.
CONFIRM_S = 2.0


class Attendance:
    """The record of one process. Its methods block for a round trip at most; a Redis that is gone is not an error here.

    Args:
        part: what it is: producer, buffer, ...
        name: which one, where there may be several on a machine with names of their own.
        metrics: where its metrics are; '' for nowhere.
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
        """Show that the process is there, if that is due. Cheap to call in a loop."""
        if time.monotonic() - self._told < CONFIRM_S:
            return
        if self._write(pack({**self._shown, "at": time.time()})):
            self._told = time.monotonic()

    def end(self) -> None:
        """Take the record away: this process leaves as it should."""
        self._write(b"")

    def _write(self, record: bytes) -> bool:
        try:
            run(self._client, note(self._keys, self._keys.parts, self._name, record))
        except PASSING:
            return False
        return True
