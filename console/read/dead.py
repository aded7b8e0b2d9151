"""Dead-lettered jobs: the letters of the ``dead`` stream as rows."""

from typing import Any

from penstock.protocol import burials
from penstock.protocol.keys import Keys
from penstock.protocol.records.small_maps import count_shown, name_shown
from penstock.redis.commands import Client, Entry

_LENGTHS = ("prompt_length", "prompt_unit", "max_new_tokens", "drawn")
FIELDS = ("job", "reason", "attempts", "crashes", "worker", "buried_ms", "detail", *_LENGTHS)
#: Letters read per round trip.
CHUNK = 1000


def list_dead(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return every dead-lettered job with its lengths, oldest first. Blocks for two round trips per ``CHUNK``."""
    rows: list[dict[str, Any]] = []
    begin = "-"
    while entries := client.xrange(keys.dead, begin, "+", CHUNK):
        found = burials.lengths(client, keys, [fields for _, fields in entries])
        rows += [letter(entry) | one for entry, one in zip(entries, found, strict=True)]
        begin = f"({name_shown(entries[-1][0])}"
    return rows


def letter(entry: Entry) -> dict[str, Any]:
    """Return a dead letter; missing fields are '' or None, so that incomplete letters are listed too."""
    texts = {name: name_shown(entry[1].get(name.encode(), b"")) for name in ("id", "reason", "worker", "detail")}
    return {
        "job": texts["id"],
        "reason": texts["reason"],
        **{name: count_shown(entry[1].get(name.encode())) for name in ("attempts", "crashes")},
        "worker": texts["worker"],
        "buried_ms": int(entry[0].split(b"-")[0]),
        "detail": texts["detail"],
    }
