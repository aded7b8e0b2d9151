"""Verbs of the recorder of history. Those that take a ``Recording`` raise RecordingLost if it is lost."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.errors import RecordingLost
from penstock.protocol.keys import Keys
from penstock.redis.call import Call, Value, script


@dataclass(frozen=True, slots=True)
class Recording:
    """Proof of the right to record: sent with the verbs of a recorder."""

    epoch: int
    token: str


def record(keys: Keys, token: str, *, lease_ms: int, backlog: int, patience_ms: int, newest: int = 0) -> Call[int]:
    """Take or renew the right to record the history: the epoch, or 0 when another has it.

    The first call enables the run's history: its groups wait to be recorded before they are swept, at most
    ``backlog`` of them, and at most ``patience_ms`` while no recorder is running.

    Args:
        newest: epoch of the newest existing files, 0: none. A new epoch is later: Redis may have lost some,
            and of two rows of one sample that of the later epoch is used.
    """
    args: list[Value] = [keys.prefix, token, lease_ms, backlog, patience_ms, newest]
    return Call(script("record"), [keys.recorder, keys.history], args, int)


def recorded(keys: Keys, recording: Recording, jobs: Iterable[str | bytes]) -> Call[int]:
    """Report that the rows of these groups are on disk; return how many groups waited for that."""

    def parse(answer: Any) -> int:
        if answer == -1:
            raise RecordingLost("Another recorder writes the history; this one stops.")
        return int(answer)

    names = [keys.recorder, keys.unrecorded, keys.retiring]
    return Call(script("recorded"), names, [keys.prefix, recording.epoch, recording.token, *jobs], parse)


def stop_recording(keys: Keys, recording: Recording) -> Call[bool]:
    """Release the right to record."""
    return Call(script("resign"), [keys.recorder], [recording.epoch, recording.token], bool)
