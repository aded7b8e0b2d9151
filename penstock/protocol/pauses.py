"""Paused lanes: nothing is leased from them until they are resumed."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.errors import ProtocolError
from penstock.names import Lane
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import pack
from penstock.protocol.records.small_maps import name_shown, number_in, unpack_map
from penstock.protocol.scripts import pause as pause_call
from penstock.protocol.scripts import run
from penstock.redis.commands import Client

#: Most characters of the name of the user who paused a lane.
MAX_BY = 200


@dataclass(frozen=True, slots=True)
class Pause:
    """A paused lane, who paused it ('' if unknown), and for how many seconds it has been paused."""

    lane: str
    by: str = ""
    since_s: float = 0.0


def pause(client: Client, keys: Keys, lane: Lane, by: str) -> bool:
    """Pause a lane; return False if it was paused already. Blocks for a round trip."""
    return run(client, pause_call(keys, lane, pack({"by": by[:MAX_BY], "at": time.time()})))


def resume(client: Client, keys: Keys, lane: Lane) -> bool:
    """Resume a lane; return False if it was not paused. Blocks for a round trip."""
    return run(client, pause_call(keys, lane, b""))


def parse_pauses(lanes: Iterable[bytes], by: Mapping[bytes, bytes], now: float) -> list[Pause]:
    """Parse the set ``paused`` and the hash ``paused_by``, by name. An unreadable record still means a paused lane."""
    return [_pause(lane, by.get(lane, b""), now) for lane in sorted(lanes)]


def _pause(lane: bytes, record: bytes, now: float) -> Pause:
    name = name_shown(lane)
    try:
        said = unpack_map(record, f"The pause of lane {name}") if record else {}
        by, at = said.get("by"), number_in(said, "at", f"The pause of lane {name}", now)
    except ProtocolError:
        return Pause(name)
    return Pause(name, by[:MAX_BY] if isinstance(by, str) else "", max(0.0, now - at))
