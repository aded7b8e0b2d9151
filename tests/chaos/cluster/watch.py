"""Looks at a run while it goes on, in a thread: batches that were committed, memory in use, the ledger of tokens."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import redis

from penstock.errors import PenstockError
from penstock.names import LANES
from penstock.protocol.presence import live_workers
from penstock.protocol.scripts import recount_tokens, run
from penstock.protocol.tokens import LaneTokens, lanes_of
from penstock.records.keys import GROUP, Keys

#: Between two looks at the cursors, and at the memory.
LOOK_S, MEMORY_S = 0.1, 2.0
#: Streams that are cut at a length: of events, publications, and what trainers tell workers.
CAPPED = ("samples", "weights", "memory", "transfers")
#: Counters of jobs that are over.
OVER = ("retired", "evicted", "dropped", "cancelled")


class Watch:
    """Counts, from its start to its ``end``.

    Args:
        saw: told of every look which process each worker's engine is, by the name that the worker was started with.
    """

    def __init__(self, url: str, keys: Keys, saw: Callable[[Mapping[str, int]], object] = lambda engines: None) -> None:
        self._saw = saw
        self._keys = keys
        self._client = redis.Redis.from_url(url, socket_timeout=2.0, retry=None)
        #: Batches that were committed; what is committed again counts again.
        self.committed = 0
        #: When (monotonic) that was last seen to rise.
        self.committed_at = time.monotonic()
        #: The same by subscription.
        self.committed_of: dict[str, int] = {}
        #: Subscription -> cursor.
        self.cursors: dict[str, int] = {}
        #: Looks at the memory, as an account has them.
        self.memory: list[dict[str, int]] = []
        #: First look at which the ledger of tokens did not add up (I10), in words; '' for none. And looks at it.
        self.unbalanced = ""
        self.balances = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def move_to(self, url: str) -> None:
        """Look at another server from now on."""
        self._client = redis.Redis.from_url(url, socket_timeout=2.0, retry=None)

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def count_leased(self, client: Any) -> int:
        """Jobs that workers hold."""
        pipe = client.pipeline(transaction=False)
        for lane in LANES:
            pipe.xpending(self._keys.jobs(lane), GROUP)
        answers = pipe.execute(raise_on_error=False)
        return sum(int(answer["pending"]) for answer in answers if isinstance(answer, dict))

    def _run(self) -> None:
        memory_at = 0.0
        while not self._ended.wait(LOOK_S):
            try:
                self._look()
                if time.monotonic() >= memory_at:
                    self._weigh()
                    self._balance()
                    memory_at = time.monotonic() + MEMORY_S
            except (redis.RedisError, PenstockError):
                continue

    def _look(self) -> None:
        self._saw({one.started_as: one.engine_pid for one in live_workers(self._client, self._keys)})
        subs = [field[4:].decode() for field in self._client.hkeys(self._keys.subs) if field.startswith(b"sub:")]
        for sub in subs:
            now = int(self._client.hget(self._keys.sub(sub), "cursor") or 0)
            before = self.cursors.get(sub, 0)
            self.cursors[sub] = now
            if now > before:
                self.committed += now - before
                self.committed_of[sub] = self.committed_of.get(sub, 0) + now - before
                self.committed_at = time.monotonic()

    def _weigh(self) -> None:
        """What the keys of the run take; the server's own figure swings with what its clients have in hand."""
        counters = {name.decode(): int(value) for name, value in self._client.hgetall(self._keys.counters).items()}
        done = sum(counters.get(name, 0) for name in OVER)
        live = counters.get("admitted", 0) - done
        pattern = self._keys.prefix.replace("[", "\\[") + "*"
        names = [key for key in self._client.scan_iter(pattern, count=1000) if not self._is_capped(key.decode())]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.memory_usage(name, samples=0)
        self.memory.append({"done": done, "live": live, "bytes": sum(filter(None, pipe.execute()))})

    def _balance(self) -> None:
        """Tokens told of = those in accounts + those that live groups hold, in this instant."""
        fields, held = run(self._client, recount_tokens(self._keys))
        ledgers = lanes_of(fields)
        self.balances += 1
        for lane in ledgers.keys() | held.keys():
            open_, there = ledgers.get(lane, LaneTokens()).held, held.get(lane, 0)
            if open_ != there and not self.unbalanced:
                self.unbalanced = f"of the tokens of lane {lane} {open_} are in no account, and groups hold {there}"

    def _is_capped(self, key: str) -> bool:
        """A stream that is cut at a length, which it reaches after more jobs than a run has."""
        return key.removeprefix(self._keys.prefix).partition(":")[0] in CAPPED
