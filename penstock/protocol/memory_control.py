"""What a trainer, or a person, asks of all engines: memory to give up, health checks to leave, a start without waiting.

The newest entry of ``memory:MODEL`` is the whole truth: a worker that is restarted reads it and obeys too.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.errors import ConfigError, ProtocolError, WaitTimeout
from penstock.protocol.keys import Keys
from penstock.protocol.presence import WorkerPresence, WorkerState, live_workers, read_workers
from penstock.protocol.records.causes import Cause, EngineNotBack, WorkerNotFollowing
from penstock.protocol.records.record import Record
from penstock.protocol.scripts import Call, script
from penstock.redis.control import Control

#: What an engine can give up, in the order in which it comes back.
TAGS = ("weights", "cuda_graph", "kv_cache")
_LOOK_S = 0.01
#: What workers are asked to change.
Change = Literal["memory", "health checks", "restart"]
#: States of a worker whose engine is on its way up, and of all whose engine is not there.
_COMING = (WorkerState.STARTING, WorkerState.RESTARTING_ENGINE)
_LOST = (*_COMING, WorkerState.ENGINE_AWAY, WorkerState.CRASH_LOOP)


@dataclass(frozen=True, slots=True)
class MemoryWish(Record):
    """What engines are to do without, and what else is asked of their workers."""

    #: Tags that are to be offloaded; empty: everything is wanted back.
    offloaded: list[str] = field(default_factory=list)
    #: Who asked, and when (Unix time).
    by: str = ""
    at: float = 0.0
    #: True: no health check counts. An engine whose process ends is lost as ever.
    unwatched: bool = False
    #: Engines that were lost before it (Unix time) are started without waiting any longer; 0: nobody asked.
    revive_at: float = 0.0


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
    if not isinstance(found.unwatched, bool) or not isinstance(found.revive_at, (int, float)):
        raise ProtocolError("The wish for memory has values that this penstock does not know.")
    return found


def newest_wish(control: Control, keys: Keys, model: str) -> MemoryWish:
    """What is asked of a model's engines now. Blocks for a round trip."""
    return parse_wish(control.do(lambda client: client.xrevrange(keys.memory(model), count=1))) or MemoryWish()


def change(
    control: Control,
    keys: Keys,
    model: str,
    change_tags: Callable[[set[str]], set[str]],
    *,
    by: str,
    timeout_s: float,
    blocked_on: Callable[[Cause | None], None] = lambda cause: None,
) -> list[str]:
    """Change what engines do without, and wait until every worker has followed. Returns the tags that are offloaded.

    Args:
        change_tags: from the tags that are offloaded now to those that shall be.
        blocked_on: called with the cause of the wait, None at the end.

    Raises:
        WaitTimeout: a worker did not follow in ``timeout_s``; names it and its reason.
    """
    newest = newest_wish(control, keys, model)
    asked = replace(newest, offloaded=check_tags(change_tags(set(newest.offloaded))), by=by)
    ask(control, keys, model, asked, change="memory", timeout_s=timeout_s, blocked_on=blocked_on)
    return asked.offloaded


def ask(
    control: Control,
    keys: Keys,
    model: str,
    asked: MemoryWish,
    *,
    change: Change,
    timeout_s: float,
    blocked_on: Callable[[Cause | None], None] = lambda cause: None,
) -> None:
    """Ask something of all engines, and wait until every worker has followed. Raises WaitTimeout as ``change``."""
    before = control.do(lambda client: read_workers(client, keys))
    control.call(wish(keys, model, replace(asked, at=time.time())))
    deadline = time.monotonic() + timeout_s
    while (late := lagging(control, keys, asked, before)) is not None:
        blocked_on(cause := WorkerNotFollowing(late.name, change, late.reason))
        if time.monotonic() > deadline:
            why = f"Worker {late.name} ({late.reason}) did not follow the request to change {change}"
            raise WaitTimeout(f"{why} in {timeout_s:g} s.", cause=cause)
        time.sleep(_LOOK_S)
    blocked_on(None)


def watch(control: Control, keys: Keys, model: str, watched: bool, *, by: str, timeout_s: float) -> None:
    """Have workers count health checks of their engines, or leave them out; blocks until all do. As ``ask``."""
    newest = newest_wish(control, keys, model)
    if newest.unwatched == (not watched):
        return
    asked = replace(newest, unwatched=not watched, by=by)
    ask(control, keys, model, asked, change="health checks", timeout_s=timeout_s)


def revive(
    control: Control,
    keys: Keys,
    model: str,
    *,
    by: str,
    timeout_s: float,
    blocked_on: Callable[[Cause | None], None] = lambda cause: None,
) -> None:
    """Have engines that are lost started now instead of after their wait, and block until every one is back.

    While memory is offloaded no engine starts: they do as soon as it is back, and this returns at once.

    Raises:
        WaitTimeout: an engine was not back in ``timeout_s``; names its worker and why.
    """
    began = time.monotonic()
    newest = newest_wish(control, keys, model)
    asked = replace(newest, revive_at=max(time.time(), newest.revive_at + 1e-3), by=by)
    ask(control, keys, model, asked, change="restart", timeout_s=timeout_s, blocked_on=blocked_on)
    while not asked.offloaded and (late := _lost(control.do(lambda client: live_workers(client, keys)))) is not None:
        blocked_on(cause := EngineNotBack(late.name, late.reason))
        if time.monotonic() - began > timeout_s:
            why = f"The engine of worker {late.name} ({late.reason}) did not come back in {timeout_s:g} s."
            raise WaitTimeout(why, cause=cause)
        time.sleep(_LOOK_S)
    blocked_on(None)


def _lost(workers: Iterable[WorkerPresence]) -> WorkerPresence | None:
    """Return a worker whose engine is not running; None where there is none."""
    return next((worker for worker in workers if worker.state in _LOST), None)


def lagging(
    control: Control, keys: Keys, asked: MemoryWish, before: Collection[WorkerPresence] | None = None
) -> WorkerPresence | None:
    """Return a live worker that does not do what is asked; None where there is none.

    Args:
        before: the workers as of the wish: what one said before it, it says of another time. A worker that was about
            to serve then holds its memory by now.
    """
    for worker in control.do(lambda client: live_workers(client, keys, all_=True)):
        heard = before is None or worker not in before
        if asked.revive_at and asked.revive_at > worker.revived_at:
            return worker
        if heard and worker.state in _COMING:
            # An engine that is not there holds nothing, and does not start before all is wanted back.
            continue
        if set(worker.offloaded) != set(asked.offloaded) or worker.unwatched != asked.unwatched:
            return worker
        if not heard:
            return replace(worker, why="no report since the request")
    return None
