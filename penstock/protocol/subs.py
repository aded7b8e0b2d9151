"""Make, change, drop and list subscriptions during a run.

set (validated as one definition) ─> hash sub:NAME ─> the leader's memory (buffer/subscription.py)
"""

from collections.abc import Collection, Mapping
from typing import Any

from penstock.config.subscription import ASKED, Definition, Trait, Unit, fields_with
from penstock.errors import ConfigError, ProtocolError
from penstock.names import check_name
from penstock.protocol import scripts
from penstock.protocol.position import Position
from penstock.protocol.scripts import run
from penstock.records.codec import count_in, name_in, name_shown, unpack_map
from penstock.records.keys import Keys
from penstock.records.record import readable
from penstock.redis.commands import Client

#: Attempts of a change while others change the same.
TRIES = 20
#: Numbers of a position that are listed.
SHOWN = ("cut", "cursor", "ckpt", "floor", "gen", "owed")
#: Fields of a subscription in the list.
LISTED = (
    *("name", "owned", "parked", *SHOWN, "drops", "seen_s", "set", "unreadable"),
    *(f"held_{what}" for what in ("groups", "samples", "tokens", "bytes")),
    *Definition.model_fields,
)


def set_subscription(client: Client, keys: Keys, name: str, changes: Mapping[str, str]) -> dict[str, Any]:
    """Make a subscription, or change one in use; the changes survive a restart of its trainer.

    An empty value restores the trainer's own definition from its next start. Returns the definition. Blocks for a few
    round trips. Raises ConfigError.
    """
    check_name("subscription", name)
    # An empty value of an unknown field is refused like any other.
    given = {field: value for field, value in changes.items() if value != "" or field not in Definition.model_fields}
    released = changes.keys() - given.keys()
    for _ in range(TRIES):
        revision = int(client.hget(keys.subs, "rev") or 0)
        live = client.hexists(keys.subs, f"sub:{name}")
        raw = client.hgetall(keys.sub(name)) if live else {}
        before = Definition.texts_of(raw)
        if live:
            _check_live(name, changes, asks=before.get("mode") == ASKED)
        elif "size" not in changes:
            raise ConfigError(f"There is no subscription {name!r} yet: give its size to make it.")
        _check_size(before, given)
        # Empty values change nothing before the trainer's next start, so the definition is not checked now.
        definition = _checked({**before, **given}, raw, name) if given else Definition.read(raw, name)
        fields = definition.fields()
        asked = {key: fields[key] for key in _keys_of(given)} if live else fields
        asked |= dict.fromkeys(_keys_of(released), "")
        call = scripts.subscribe(keys, name, asked, revision=revision, operator=live)
        if run(client, call) != scripts.MOVED:
            return definition.model_dump()
    raise ProtocolError(f"Subscription {name!r} could not be changed: others change subscriptions all the time.")


def _checked(values: Mapping[str, str], raw: Mapping[bytes, bytes], name: str) -> Definition:
    # min_first applies only to the first batch.
    first = {"min_first": "0"} if raw.get(b"cut", b"0") != b"0" else {}
    return Definition.of({**values, **first}, name)


def _check_live(name: str, changes: Collection[str], *, asks: bool) -> None:
    """Raise ConfigError for a change of a field that cannot change while a subscription exists."""
    changeable = fields_with(Trait.LIVE_WHERE_ASKED if asks else Trait.LIVE)
    if fixed := set(changes) - changeable:
        why = ", which takes what its trainer asks for," if asks else ""
        raise ConfigError(
            f"{', '.join(sorted(fixed))} of subscription {name!r}{why} cannot change while it exists; "
            f"these can: {', '.join(sorted(changeable))}."
        )


def _check_size(before: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise ConfigError if the unit changes without a size, which would be in the old unit."""
    unit = before.get("unit", Unit.GROUPS)
    if given.get("unit", unit) != unit and "size" not in given:
        raise ConfigError(f"A batch in {given['unit']} needs its size: set size as well.")


def _keys_of(fields: Collection[str]) -> set[str]:
    """Return the fields of the hash ``sub:NAME`` for these, and those derived from them."""
    follows = {"gb"} if {"size", "unit"} & set(fields) else set()
    return {Definition.key_of(field) for field in fields} | follows


def drop_subscription(client: Client, keys: Keys, name: str) -> None:
    """Drop a subscription with its batches. Raises ConfigError if it does not exist. Blocks for a round trip."""
    if not run(client, scripts.unsubscribe(keys, name)):
        raise ConfigError(f"There is no subscription {name!r} to drop; `penstock subs ls` lists those that exist.")


def list_subscriptions(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return definition, position and holdings of every subscription, by name. Blocks for a few round trips.

    A subscription with invalid fields has ``unreadable``, the error, instead of its position.
    """
    fields = client.hgetall(keys.subs)
    held = client.hgetall(keys.held)
    rows = []
    named = {field: value for field, value in fields.items() if field.startswith(b"sub:")}
    for name in readable(named, lambda field, _: name_in(field[4:], "A subscription")):
        raw = client.hgetall(keys.sub(name))
        known = _known(raw, name, held.get(name.encode()))
        set_ = sorted(name_shown(key[4:]) for key in raw if key.startswith(b"set:"))
        owned = bool(client.exists(keys.owner(name)))
        rows.append({"name": name, **known, "set": set_, "owned": owned})
    return rows


def _known(raw: Mapping[bytes, bytes], name: str, held: bytes | None) -> dict[str, Any]:
    """Return the definition and position in the hash ``sub:NAME``, and the holdings."""
    try:
        definition, position, now = Definition.read(raw, name), Position.read(raw, name), _held(held, name)
    except ProtocolError as exc:
        return {**Definition.texts_of(raw), "unreadable": str(exc)}
    moved = {key: getattr(position, key) for key in SHOWN}
    seen_s = position.seen / 1000
    where = {"drops": position.dropped, "parked": position.parked, "seen_s": seen_s}
    return {**definition.texts(), **moved, **where, **now}


def _held(raw: bytes | None, name: str) -> dict[str, int]:
    """Return the holdings of a subscription that the leader last reported."""
    what = f"The record of what is held for subscription {name}"
    value = unpack_map(raw, what) if raw else {}
    return {f"held_{key}": count_in(value, key, what, 0) for key in ("groups", "samples", "tokens", "bytes")}
