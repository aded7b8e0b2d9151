"""GPU memory that engines and trainer share: what engines are asked to give up, as a record that workers follow.

The newest entry of ``memory:MODEL`` is the whole truth: a worker that is restarted reads it and obeys too.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.control import Control
from penstock.errors import ConfigError, ProtocolError, WaitTimeout
from penstock.keys import Keys
from penstock.messages import Record, unpack
from penstock.scripts import Call, script

#: What an engine can give up, in the order in which it comes back.
TAGS = ("weights", "cuda_graph", "kv_cache")
#: A presence record that is older is of a worker that is gone.
FRESH_S = 10.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class MemoryWish(Record):
    """What engines are to do without."""

    #: Tags that are to be offloaded; empty: everything is wanted back.
    offloaded: list[str] = field(default_factory=list)
    #: Who asked, and when (Unix time).
    by: str = ""
    at: float = 0.0


def check_tags(tags: Iterable[str]) -> list[str]:
    """The tags in order; raises ConfigError on one that does not exist."""
    given = set(tags)
    if unknown := given - set(TAGS):
        raise ConfigError(f"There is no memory {sorted(unknown)} to offload: use {', '.join(TAGS)}.")
    return [tag for tag in TAGS if tag in given]


def wish(keys: Keys, model: str, record: MemoryWish) -> Call[str]:
    """Have every worker of a model do without ``record.offloaded``; returns the entry's id."""
    return Call(script("memory"), [keys.memory(model)], [keys.prefix, record.to_bytes()], lambda a: str(a.decode()))


def parse_wish(entries: Any) -> MemoryWish | None:
    """The wish in entries of ``memory:MODEL``, newest last; None where there is none. Raises ProtocolError."""
    if not entries:
        return None
    found = MemoryWish.from_bytes(entries[-1][1].get(b"w", b""), "wish for memory")
    if not isinstance(found.offloaded, list) or not set(found.offloaded) <= set(TAGS):
        raise ProtocolError(f"The wish for memory has tags that this penstock does not know: {found.offloaded}.")
    return found


def change(
    control: Control,
    keys: Keys,
    model: str,
    change_tags: Callable[[set[str]], set[str]],
    *,
    by: str,
    timeout_s: float,
    tell: Callable[[str], None] = lambda what: None,
) -> list[str]:
    """Change what engines do without, and wait until every worker has followed. Returns the tags that are offloaded.

    Args:
        change_tags: from the tags that are offloaded now to those that shall be.
        tell: called with what is waited for, '' at the end.

    Raises:
        WaitTimeout: a worker did not follow in ``timeout_s``; names it and its reason.
    """
    newest = parse_wish(control.do(lambda client: client.xrevrange(keys.memory(model), count=1)))
    tags = check_tags(change_tags(set(newest.offloaded) if newest else set()))
    before = control.do(lambda client: client.hgetall(keys.workers))
    control.call(wish(keys, model, MemoryWish(tags, by, time.time())))
    deadline = time.monotonic() + timeout_s
    while (late := lagging(control, keys, tags, before)) is not None:
        tell(f"worker {late} to follow a change of memory")
        if time.monotonic() > deadline:
            raise WaitTimeout(f"Worker {late} did not follow a change of memory in {timeout_s:g} s.")
        time.sleep(_LOOK_S)
    tell("")
    return tags


def lagging(
    control: Control, keys: Keys, tags: Collection[str], before: Mapping[bytes, bytes] | None = None
) -> str | None:
    """A live worker whose engine holds other memory than it should, with its reason; None where there is none.

    Args:
        before: presence records as of the wish: what a worker said before it, it says of another time. A worker that
            was about to serve then holds its memory by now.
    """
    now = time.time()
    for name, raw in control.do(lambda client: client.hgetall(keys.workers)).items():
        record = unpack(raw, "worker")
        if now - float(record.get("at", 0)) > FRESH_S:
            continue
        heard = before is None or before.get(name) != raw
        if heard and record.get("state") in ("starting", "restarting engine"):
            # An engine that is not there holds nothing, and does not start before all is wanted back.
            continue
        if set(record.get("offloaded", ())) != set(tags):
            return f"{name.decode()} ({record.get('why') or record.get('state')})"
        if not heard:
            return f"{name.decode()} (it has said nothing since it was asked)"
    return None
