"""Requests to all engines of a model: offload memory, ignore health checks, restart without waiting.

The newest entry of ``memory:MODEL`` is the complete request: a restarted worker reads and follows it too.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.errors import ConfigError, ProtocolError, WaitTimeout
from penstock.protocol.presence import WorkerPresence, WorkerState, live_workers, read_workers
from penstock.protocol.scripts import Call, script
from penstock.records.cause import Cause
from penstock.records.causes import EngineNotBack, WorkerNotFollowing
from penstock.records.keys import Keys
from penstock.records.record import Record
from penstock.redis.control import Control

#: Tags that an engine can offload, in the order in which they are restored.
TAGS = ("weights", "cuda_graph", "kv_cache")
_LOOK_S = 0.01
#: What a request changes.
Change = Literal["memory", "health checks", "restart"]
#: States of a worker whose engine is starting, and of all workers whose engine is not running.
_COMING = (WorkerState.STARTING, WorkerState.RESTARTING_ENGINE)
_LOST = (*_COMING, WorkerState.ENGINE_AWAY, WorkerState.CRASH_LOOP)


@dataclass(frozen=True, slots=True)
class MemoryWish(Record):
    """The memory that engines have to offload, and what else is requested of their workers."""

    #: Tags to offload; empty: restore everything.
    offloaded: list[str] = field(default_factory=list)
    #: The requester, and the time (Unix time).
    by: str = ""
    at: float = 0.0
    #: True: health checks are ignored. An engine whose process ends is still lost.
    unwatched: bool = False
    #: Engines lost before this time (Unix time) are restarted without waiting; 0: no such request.
    revive_at: float = 0.0


def check_tags(tags: Iterable[str]) -> list[str]:
    """Return the tags in order; raise ConfigError for one that does not exist."""
    given = set(tags)
    if unknown := given - set(TAGS):
        raise ConfigError(f"There is no memory {sorted(unknown)} to offload: use {', '.join(TAGS)}.")
    return [tag for tag in TAGS if tag in given]


def wish(keys: Keys, model: str, record: MemoryWish) -> Call[str]:
    """Request that every worker of a model offloads ``record.offloaded``; the call returns the entry's id."""
    return Call(script("memory"), [keys.memory(model)], [keys.prefix, record.to_bytes()], lambda a: str(a.decode()))


def parse_wish(entries: Any) -> MemoryWish:
    """Return the newest request in entries of ``memory:MODEL``; without entries, the default. Raises ProtocolError."""
    if not entries:
        return MemoryWish()
    found = MemoryWish.from_bytes(entries[-1][1].get(b"w", b""), "wish for memory")
    if not isinstance(found.offloaded, list) or not set(found.offloaded) <= set(TAGS):
        raise ProtocolError(f"The wish for memory has tags that this penstock does not know: {found.offloaded}.")
    if not isinstance(found.unwatched, bool) or not isinstance(found.revive_at, (int, float)):
        raise ProtocolError("The wish for memory has values that this penstock does not know.")
    return found


def newest_wish(control: Control, keys: Keys, model: str) -> MemoryWish:
    """Return what is requested of a model's engines now. Blocks for a round trip."""
    return parse_wish(control.do(lambda client: client.xrevrange(keys.memory(model), count=1)))


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
    """Change what engines offload, and wait until every worker has followed. Returns the tags that are offloaded.

    Args:
        change_tags: maps the tags offloaded now to those to offload.
        blocked_on: called with the cause of the wait, with None at the end.

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
    """Send a request to all engines, and wait until every worker has followed. Raises WaitTimeout as ``change``."""
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
    """Have workers count or ignore health checks of their engines; block until all do. Raises as ``ask``."""
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
    """Restart lost engines now instead of after their backoff, and block until every one is running.

    While memory is offloaded no engine starts: then this returns at once, and they start when memory is restored.

    Raises:
        WaitTimeout: an engine was not running after ``timeout_s``; names its worker and the reason.
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
    """Return a worker whose engine is not running, or None."""
    return next((worker for worker in workers if worker.state in _LOST), None)


def lagging(
    control: Control, keys: Keys, asked: MemoryWish, before: Collection[WorkerPresence] | None = None
) -> WorkerPresence | None:
    """Return a live worker that does not follow the request, or None.

    Args:
        before: the workers before the request: an unchanged report says nothing about it. A worker that was about
            to serve then holds its memory by now.
    """
    for worker in control.do(lambda client: live_workers(client, keys, all_=True)):
        heard = before is None or worker not in before
        if asked.revive_at and asked.revive_at > worker.revived_at:
            return worker
        if heard and worker.state in _COMING:
            # An engine that is not running holds no memory, and does not start before all of it is requested back.
            continue
        if set(worker.offloaded) != set(asked.offloaded) or worker.unwatched != asked.unwatched:
            return worker
        if not heard:
            return replace(worker, why="no report since the request")
    return None
