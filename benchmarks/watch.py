"""What becomes of every group of a run: generated tokens by a copy subscription, loss tokens from the manifests."""

import threading
from dataclasses import dataclass, field
from typing import Any

from penstock.config.subscription import ASKED, Definition
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.errors import PenstockError, WaitTimeout
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.records.sample_meta import iter_metas
from penstock.redis.connect import connect

NAME = "watch"
LOOK_S = 0.2


@dataclass(slots=True)
class Tally:
    """Tokens and samples of groups."""

    tokens: int = 0
    samples: int = 0

    @property
    def mean(self) -> float:
        return self.tokens / self.samples if self.samples else 0.0


@dataclass(slots=True)
class Fate:
    """Of all groups that completed, and that no batch may take any more: what was drawn, and what of it bore loss."""

    generated: Tally = field(default_factory=Tally)
    trained: Tally = field(default_factory=Tally)

    @property
    def lost_share(self) -> float:
        """Share of the generated tokens that never bore loss."""
        return 1 - self.trained.tokens / self.generated.tokens

    @property
    def length_ratio(self) -> float:
        """Loss tokens per trained sample over tokens per generated sample."""
        return self.trained.mean / self.generated.mean


class Watch:
    """Reads beside a run; ``with`` around it. The run's Redis must outlive it.

    Args:
        sub: the subscription whose use of the groups is looked at.
    """

    def __init__(self, url: str, run: str, sub: str = "actor") -> None:
        self._url, self._keys, self._sub = url, Keys(run), sub
        self._stop = threading.Event()
        self._generated: dict[str, Tally] = {}
        self._trained: dict[str, Tally] = {}
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True)
            for work in (self._read_groups, self._read_batches)
        ]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def fate(self) -> Fate:
        """What became of the groups, once the run is over. Blocks for a look at what is left."""
        fate = Fate()
        generated = dict(self._generated)
        with connect(self._url) as client:
            for ready in client.zrange(self._keys.ready, 0, -1):
                name = ready.decode()
                if client.hget(self._keys.group(name), f"u:{self._sub}") is None:
                    generated.pop(name, None)  # it waits for a batch
                elif name not in generated:
                    generated[name] = _tally(client, self._keys, name)
        for job, tally in generated.items():
            fate.generated.tokens += tally.tokens
            fate.generated.samples += tally.samples
            if job in self._trained:
                fate.trained.tokens += self._trained[job].tokens
                fate.trained.samples += self._trained[job].samples
        return fate

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except PenstockError as exc:
            self._error = exc

    def _read_groups(self) -> None:
        """Every group that completes, by a subscription that drives nothing and holds nothing."""
        subscriber = Subscriber(self._url, self._keys, NAME)
        try:
            # A fresh start deletes the run's keys; what is subscribed to before it is gone.
            while not subscriber.control.do(lambda client: client.exists(self._keys.sub(self._sub))):
                if self._stop.wait(LOOK_S):
                    return
            subscriber.join()
            subscriber.define(Definition(mode=ASKED, bound=-1))
            while not self._stop.is_set():
                self._take(subscriber)
        finally:
            subscriber.leave()

    def _take(self, subscriber: Subscriber) -> None:
        n = subscriber.cursor + 1
        subscriber.ask(n)
        try:
            delivery = subscriber.read(n, LOOK_S)
        except WaitTimeout:
            return
        for row in delivery.manifest.samples():
            tally = self._generated.setdefault(row.job, Tally())
            tally.tokens += row.num_generated
            tally.samples += 1
        subscriber.commit(n, delivery.digest)
        subscriber.checkpointed(n)

    def _read_batches(self) -> None:
        last = "0-0"
        stream = self._keys.batches(self._sub)
        with connect(self._url) as client:
            while True:
                stopping = self._stop.wait(LOOK_S)
                for entry, fields in client.xrange(stream, f"({last}", "+"):
                    last = entry.decode()
                    for row in Manifest.from_bytes(fields[b"m"]).samples():
                        tally = self._trained.setdefault(row.job, Tally())
                        tally.tokens += row.num_loss
                        tally.samples += 1
                if stopping:
                    return


def _tally(client: Any, keys: Keys, job: str) -> Tally:
    metas = list(iter_metas(client.get(keys.meta(job)) or b"", f"metadata of group {job}"))
    return Tally(sum(meta.num_generated for meta in metas), len(metas))
