"""The connections that a server of weights has open: whoever has not proven the token keeps out nobody who has."""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

log = logging.getLogger(__name__)

#: Connections that lost their place are told of so often.
SAY_S = 60.0


class _Waiting(NamedTuple):
    """A connection that is still to prove the token."""

    cut: Callable[[], None]
    #: Cuts it when its time is over.
    timer: asyncio.TimerHandle


class Places:
    """A bounded number of places, for one event loop.

    Args:
        most: connections that are open at once.
        proof_s: a connection that has not proven the token for so long is cut.
    """

    def __init__(self, most: int, proof_s: float) -> None:
        self._most, self._proof_s = most, proof_s
        #: The oldest first.
        self._waiting: dict[Hashable, _Waiting] = {}
        self._proven: set[Hashable] = set()
        self._num_cut = 0
        self._said_s = float("-inf")

    def __contains__(self, who: Hashable) -> bool:
        return who in self._waiting or who in self._proven

    def __len__(self) -> int:
        """Connections that are open."""
        return len(self._waiting) + len(self._proven)

    def take(self, who: Hashable, cut: Callable[[], None]) -> bool:
        """Give a connection a place, where none is free that of the oldest which has not proven the token.

        Args:
            cut: ends it, without a wait; it need not ``leave`` then.

        Returns:
            False where all others have proven it: this one is to be cut.
        """
        if len(self) >= self._most:
            if not self._waiting:
                return False
            self._tell()
            self.cut(next(iter(self._waiting)))
        timer = asyncio.get_running_loop().call_later(self._proof_s, self.cut, who)
        self._waiting[who] = _Waiting(cut, timer)
        return True

    def prove(self, who: Hashable) -> None:
        """It has shown the token: nobody takes its place until it leaves."""
        if (one := self._waiting.pop(who, None)) is not None:
            one.timer.cancel()
            self._proven.add(who)

    def cut(self, who: Hashable) -> None:
        """End one that has not proven the token; nothing for any other."""
        if (one := self._waiting.pop(who, None)) is not None:
            one.timer.cancel()
            one.cut()

    def leave(self, who: Hashable) -> None:
        """It has ended."""
        self._proven.discard(who)
        if (one := self._waiting.pop(who, None)) is not None:
            one.timer.cancel()

    def _tell(self) -> None:
        self._num_cut += 1
        if time.monotonic() - self._said_s >= SAY_S:
            self._said_s = time.monotonic()
            log.warning(
                "all %d places for weights are taken (serving.max_connections): connections that have not shown the "
                "token are cut, %d so far",
                self._most,
                self._num_cut,
            )
