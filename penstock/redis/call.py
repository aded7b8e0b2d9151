"""Calls of verbs: their scripts, keys and arguments, and how they are sent."""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from penstock.errors import QueueFull
from penstock.names import LANES
from penstock.records.keys import Keys
from penstock.records.worker_causes import RedisFull, RedisKeysLost
from penstock.redis.commands import AsyncClient, Client, Encodable
from penstock.redis.lua_scripts import verb_text
from penstock.redis.refusals import RECOVERY, KeysLost, is_demoted, is_wrong_type, passing

T = TypeVar("T")
#: Prefix of a run's keys.
_RUN = re.compile(r"penstock:\{([^}]+)\}:")
Value = Encodable


@dataclass(frozen=True, slots=True)
class Script:
    """Text and digest of one Lua verb."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return the script of a verb. Raises ValueError for an unknown one."""
    text = verb_text(name)
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call of one verb, and the parser of its answer."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Value]
    parse: Callable[[Any], T]


def run(client: Client, call: Call[T]) -> T:
    """Send a verb. Blocks for one round trip. Raises redis' connection errors and QueueFull."""
    try:
        try:
            answer = client.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        except NoScriptError:
            answer = client.eval(call.script.text, len(call.keys), *call.keys, *call.args)
    except ResponseError as exc:
        if is_demoted(exc):
            client.connection_pool.disconnect(inuse_connections=False)
        error = translate(exc, call.script.name)
        if (look := _look_for_loss(call, error)) is not None and (found := run(client, look)):
            error = found.error()
        raise error from exc
    return call.parse(answer)


async def run_async(client: AsyncClient, call: Call[T]) -> T:
    """Send a verb from asyncio; see ``run``."""
    try:
        try:
            answer = await client.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        except NoScriptError:
            answer = await client.eval(call.script.text, len(call.keys), *call.keys, *call.args)
    except ResponseError as exc:
        if is_demoted(exc):
            await client.connection_pool.disconnect(inuse_connections=False)
        error = translate(exc, call.script.name)
        if (look := _look_for_loss(call, error)) is not None and (found := await run_async(client, look)):
            error = found.error()
        raise error from exc
    return call.parse(answer)


def _look_for_loss(call: Call[Any], error: Exception) -> "Call[Loss] | None":
    """Return the call that reads what the run lost, if that may be why a verb failed; else None."""
    # Imported here: it imports this module.
    from penstock.records.keys import Keys

    run_name = _RUN.match(call.keys[0]) if call.keys else None
    may_be = isinstance(error, KeysLost) or (isinstance(error, ResponseError) and "user_script" in str(error))
    if run_name is None or call.script.name == "missing_keys" or not may_be:
        return None
    return loss(Keys(run_name[1]))


def translate(exc: Exception, verb: str) -> Exception:
    """Translate an error of redis-py: a full Redis to QueueFull, one that takes no writes to a passing error."""
    if isinstance(exc, OutOfMemoryError) or "OOM" in str(exc):
        return QueueFull(f"Redis has no memory left for '{verb}': {RedisFull.action}.", RedisFull(verb))
    if is_wrong_type(exc):
        return ResponseError(f"verb {verb}: {exc}")
    return passing(exc) or exc


def text(value: Any) -> str:
    """Decode a name or word of an answer."""
    return value.decode() if isinstance(value, bytes) else str(value)


def texts(values: Iterable[Any]) -> list[str]:
    """Decode a list of names or words."""
    return [text(value) for value in values]


def version_field(model: str) -> str:
    """Return the field of the clock with a model's version."""
    return f"version:{model}"


def numbers(gates: Sequence[Sequence[str]]) -> str:
    """Return the number of its gate for every subscription, separated by commas."""
    return ",".join(str(number) for number, names in enumerate(gates, 1) for _ in names)


#: Most keys that are named; the others are counted.
NAMED = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """List a run's lost data: keys that were deleted or evicted, and admitted jobs in no queue. False if none is.

    Processes that need such a key wait (``KeysLost`` ends when the key is back), and `penstock why` reports it.
    """

    #: Names of keys, without the prefix of the run.
    keys: tuple[str, ...] = ()
    #: Admitted jobs that are in no lane and no other container, and jobs admitted.
    jobs: int = 0
    admitted: int = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.jobs)

    def error(self) -> KeysLost:
        """Return the error of a verb that fails because of it."""
        return KeysLost(f"Redis lost {self}, as after FLUSHALL, a deletion or an eviction. {RECOVERY}", self.cause)

    @property
    def cause(self) -> RedisKeysLost:
        """The cause of a wait because of it."""
        more = len(self.keys) - NAMED
        return RedisKeysLost(
            (*self.keys[:NAMED], *([f"{more} more keys"] if more > 0 else [])), self.jobs, self.admitted
        )

    def __str__(self) -> str:
        """Name what was lost."""
        return self.cause.lost


def loss(keys: Keys) -> Call[Loss]:
    """Make the call that reads what Redis lost of a run, in one instant. Takes some microseconds; reads only."""
    names = [keys.schema, keys.counters, keys.subs, keys.source, keys.delayed, keys.bodies, keys.dead, keys.ready]
    arguments = [keys.prefix, *LANES]
    return Call(
        script("missing_keys"),
        [*names, *map(keys.jobs, LANES)],
        arguments,
        lambda answer: Loss(tuple(dict.fromkeys(texts(answer[2:]))), int(answer[0]), int(answer[1])),
    )


def evicting_policy(client: Client) -> str:
    """Return the policy by which Redis may delete keys of a run; '' if it deletes none. Blocks for a round trip."""
    policy = str(client.info("memory").get("maxmemory_policy", "noeviction"))
    return "" if policy == "noeviction" else policy
