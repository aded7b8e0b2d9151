"""Orders of a trainer's rank 0 to the other ranks during a publication; text in Redis, so that a person can read it."""

import re
from dataclasses import dataclass
from typing import Literal, Self

from penstock.errors import ProtocolError
from penstock.text import printable, safe_repr, utf8_safe

#: Largest version, of as many digits as a count in Redis has.
MAX_VERSION = 10**18 - 1
#: Most characters of a reason.
MAX_REASON = 4000
#: Most bytes of an order: a lone surrogate is written as six characters, no other takes more than four.
MAX_BYTES = 6 * (MAX_REASON + len("failed  ... "))
_DONE = re.compile(rb"done ([1-9][0-9]{0,17})")
_FAILED = b"failed "


@dataclass(frozen=True, slots=True)
class Order:
    """``walk`` through the weights; ``done``: the version is published; ``failed``: no version is."""

    kind: Literal["walk", "done", "failed"]
    #: Set with ``done``, 1 to ``MAX_VERSION``.
    version: int = 0
    #: Set with ``failed``.
    reason: str = ""

    def to_text(self) -> str:
        """Return the text in Redis; the middle of a reason longer than ``MAX_REASON`` is left out."""
        if self.kind == "done":
            return f"done {self.version}"
        return f"failed {utf8_safe(self.reason, MAX_REASON)}" if self.kind == "failed" else self.kind

    @classmethod
    def from_text(cls, data: bytes, what: str) -> Self:
        """Parse an order from Redis; raise ProtocolError that begins with ``what`` if it is invalid."""
        if data == b"walk":
            return cls("walk")
        if done := _DONE.fullmatch(data):
            return cls("done", int(done[1]))
        if data.startswith(_FAILED) and len(data) <= MAX_BYTES:
            try:
                return cls("failed", reason=printable(data.removeprefix(_FAILED).decode()))
            except UnicodeDecodeError:
                pass
        raise ProtocolError(
            f"{what} is {safe_repr(data)} in Redis, which no verb writes: stop all ranks, and find out what else does."
        )
