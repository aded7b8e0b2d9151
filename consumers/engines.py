"""Commands of a trainer to the engines of its run: offload and onload GPU memory, pause health checks, restart.

The leader rank sends them; on the others every call but ``workers`` returns at once.
"""

from collections.abc import Callable, Iterable

from penstock.consumers.subscription.subscriber import Subscriber
from penstock.protocol.memory_control import change, check_tags, revive, watch
from penstock.protocol.presence import WorkerPresence, live_workers


class Engines:
    """The engines of one model, commanded through ``subscriber``.

    Every call blocks until all workers have applied it, and reports which one it waits for; WaitTimeout names it.
    """

    def __init__(self, subscriber: Subscriber, model: str) -> None:
        self._subscriber = subscriber
        self._control = subscriber.control
        self._keys = subscriber.keys
        self._model = model
        self._by = f"trainer {subscriber.name}"

    def offload(self, tags: Iterable[str], timeout_s: float) -> None:
        """Release memory of ``tags``, see ``Trainer.offload_engines``."""
        given = set(check_tags(tags))
        self._change(lambda offloaded: offloaded | given, timeout_s)

    def onload(self, tags: Iterable[str], timeout_s: float) -> None:
        """Restore memory of ``tags``, see ``Trainer.onload_engines``."""
        given = set(check_tags(tags))
        self._change(lambda offloaded: offloaded - given, timeout_s)

    def watch(self, watched: bool, timeout_s: float) -> None:
        """Enable or disable health checks, see ``Trainer.watch_engines``."""
        if self._subscriber.seat.leads:
            watch(self._control, self._keys, self._model, watched, by=self._by, timeout_s=timeout_s)

    def revive(self, timeout_s: float) -> None:
        """Restart lost engines at once, see ``Trainer.revive_engines``."""
        if self._subscriber.seat.leads:
            blocked_on = self._subscriber.waiting.blocked_on
            revive(self._control, self._keys, self._model, by=self._by, timeout_s=timeout_s, blocked_on=blocked_on)

    def workers(self) -> list[WorkerPresence]:
        """Return the presence of each live worker. Blocks for a round trip."""
        return self._control.do(lambda client: live_workers(client, self._keys))

    def _change(self, change_tags: Callable[[set[str]], set[str]], timeout_s: float) -> None:
        if self._subscriber.seat.leads:
            blocked_on = self._subscriber.waiting.blocked_on
            change(
                self._control,
                self._keys,
                self._model,
                change_tags,
                by=self._by,
                timeout_s=timeout_s,
                blocked_on=blocked_on,
            )
