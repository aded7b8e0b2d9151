"""Subscriptions while a run goes on: made, changed, dropped and listed by API and command line.

set (checked as a whole) ─> hash sub:NAME ─> the leader's memory (buffer/subscription.py)
"""

from collections.abc import Mapping
from typing import Any

from penstock.config.subscription import Definition, checked
from penstock.errors import ConfigError, ProtocolError
from penstock.names import check_name
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import unpack
from penstock.protocol.scripts import run
from penstock.redis.control import Client

#: Tries of a change that others change beside us.
TRIES = 20
#: Fields that ``penstock subs set`` may change while groups are there.
CHANGEABLE = frozenset({
    "unit", "size", "multiple", "sampler", "priority", "exponent", "reuse", "quota", "prefetch", "keep_groups",
    "keep_bytes", "keep_s", "split", "bound", "on_expiry",
})  # fmt: skip
#: Those of one that reads what it asked for (evaluations, ``Requests``): its trainer alone knows how much that is.
CHANGEABLE_BY_ASKERS = frozenset({"prefetch", "keep_s", "split"})

#: What a field that no trainer has set yet means to the buffer.
_UNSET = {"size": "1", "driving": "0"}


def stored(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """The fields of a definition in a ``sub:NAME`` hash, which names only those that its trainer chose."""
    fields = {key.decode(): value.decode() for key, value in raw.items() if key != b"owner"}
    fields["start"] = fields.get("from", "")
    known = _UNSET | {name: fields[name] for name in Definition.model_fields if name in fields}
    return {name: value for name, value in known.items() if value != "" or name in ("share", "model")}


def set_subscription(client: Client, keys: Keys, name: str, changes: Mapping[str, str]) -> dict[str, Any]:
    """Make a subscription, or change one while it is used; what was set stays when its trainer comes back.

    An empty value lets the trainer's own definition hold again from its next start. Returns the definition. Blocks
    for a few round trips. Raises ConfigError.
    """
    check_name("subscription", name)
    for _ in range(TRIES):
        revision = int(client.hget(keys.subs, "rev") or 0)
        live = client.hexists(keys.subs, f"sub:{name}")
        before = stored(client.hgetall(keys.sub(name))) if live else {"driving": "0", "size": "1"}
        asks = before.get("mode") == "eval"
        changeable = CHANGEABLE_BY_ASKERS if asks else CHANGEABLE
        if live and (fixed := changes.keys() - changeable):
            why = ", which takes what its trainer asks for," if asks else ""
            raise ConfigError(
                f"{', '.join(sorted(fixed))} of subscription {name!r}{why} cannot change while it is there; "
                f"these can: {', '.join(sorted(changeable))}."
            )
        if not live and "size" not in changes:
            raise ConfigError(f"There is no subscription {name!r} yet: give its size to make it.")
        given = {key: value for key, value in changes.items() if value != ""}
        definition = checked({**before, **given}, name)
        fields = definition.fields()
        new = {("from" if key == "start" else key): fields["from" if key == "start" else key] for key in given}
        if live and new.keys() & {"size", "unit"}:
            new["gb"] = fields["gb"]
        released = dict.fromkeys(changes.keys() - given.keys(), "")
        if "size" in released or "unit" in released:
            released["gb"] = ""
        asked = {**(new if live else fields), **released}
        call = scripts.subscribe(keys, name, asked, revision=revision, operator=live)
        if run(client, call) != scripts.MOVED:
            return definition.model_dump()
    raise ProtocolError(f"Subscription {name!r} could not be changed: others change subscriptions all the time.")


def drop_subscription(client: Client, keys: Keys, name: str) -> None:
    """Drop a subscription with its batches, for good. Raises ConfigError when there is none. Blocks shortly."""
    if not run(client, scripts.unsubscribe(keys, name)):
        raise ConfigError(f"There is no subscription {name!r} to drop; `penstock subs ls` lists those that exist.")


def list_subscriptions(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Definition, position and holdings of every subscription, by name. Blocks for a few round trips."""
    fields = client.hgetall(keys.subs)
    held = client.hgetall(keys.held)
    rows = []
    for name in sorted(field[4:].decode() for field in fields if field.startswith(b"sub:")):
        raw = client.hgetall(keys.sub(name))
        moved = {key: int(raw.get(key.encode()) or 0) for key in ("cut", "cursor", "ckpt", "floor", "gen", "owed")}
        drops = {key[5:].decode(): int(value) for key, value in raw.items() if key.startswith(b"drop:")}
        set_ = sorted(key[4:].decode() for key in raw if key.startswith(b"set:"))
        now = _held(held.get(name.encode()), name)
        seen = int(raw.get(b"seen") or 0) / 1000
        owned = bool(client.exists(keys.owner(name)))
        definition = {"unit": "groups", "sampler": "fifo", **stored(raw)}
        row = {"name": name, **definition, **moved, **now, "drops": drops, "set": set_, "owned": owned, "seen_s": seen}
        rows.append({**row, "parked": raw.get(b"parked") == b"1"})
    return rows


def _held(raw: bytes | None, name: str) -> dict[str, int]:
    """What the leader last said that it holds for a subscription."""
    value = unpack(raw, f"holdings of subscription {name}") if raw else {}
    if not isinstance(value, dict):
        raise ProtocolError(f"The holdings of subscription {name} are not a record that penstock wrote.")
    return {f"held_{key}": int(value.get(key, 0)) for key in ("groups", "samples", "tokens", "bytes")}
