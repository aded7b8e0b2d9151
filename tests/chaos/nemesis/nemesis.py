"""Strikes a run with the faults of a schedule, one after the other, and notes what each was worth."""

import logging
import time
from collections.abc import Collection, Mapping
from random import Random
from typing import Protocol

import redis

from tests.chaos.nemesis.act import Act, Ground, Kind, NotStruck
from tests.chaos.nemesis.counting import Commits, Counted, Strike, count
from tests.chaos.nemesis.moments import await_moment
from tests.chaos.nemesis.operator import OperatorError
from tests.chaos.nemesis.schedule import Log

#: Longest wait for a batch between two faults; what takes longer is for the end of the run to judge.
RECOVERY_S = 120.0
#: Longest wait for work in flight before a fault.
WORK_S = 30.0

log = logging.getLogger(__name__)


class Acts(Protocol):
    """A schedule, or a replay."""

    def next(self, possible: Collection[str]) -> Act | None: ...

    def facts(self, act: Act, ground: Ground) -> Act | None: ...


class Nemesis:
    """Blocks while it works; ``close`` leaves nothing broken.

    Args:
        kinds: all that acts may name.
        recovery_s: longest wait for a batch after a fault.
    """

    def __init__(
        self, ground: Ground, acts: Acts, kinds: Mapping[str, Kind], log_: Log, *, recovery_s: float = RECOVERY_S
    ) -> None:
        self._ground = ground
        self._acts = acts
        self._kinds = kinds
        self._log = log_
        self._recovery_s = recovery_s
        self._commits = Commits(ground.cluster.committed).start()
        self.strikes: list[Strike] = []
        #: Number of the first fault that no batch came after; 0: none.
        self.stuck_after = 0
        #: What went wrong where a fault expects something of the run: a command that failed, a part that never came.
        self.found: list[str] = []

    def run(self, faults: int, seconds: float = float("inf")) -> list[Counted]:
        """Strike until ``faults`` were done, ``seconds`` are over or nothing is left to do; what each was worth."""
        tries, deadline = 0, time.monotonic() + seconds
        while sum(not strike.error for strike in self.strikes) < faults and tries < 3 * faults + 10:
            tries += 1
            if time.monotonic() > deadline:
                break
            act = self._acts.next(self._await_possible())
            if act is None:
                break
            if not act.chained and not self._recovered():
                self.stuck_after = self.strikes[-1].number
                break
            self._do(act)
        self._recovered()
        return self.counted()

    def counted(self) -> list[Counted]:
        """What each fault so far was worth."""
        return count(self.strikes, self._commits.times)

    def close(self) -> None:
        self._commits.end()
        if self._ground.proxy is not None:
            self._ground.proxy.open()
        self._log.close()

    def _await_possible(self) -> list[str]:
        """Kinds that can be done now; waited for where there is none: what a fault killed comes back."""
        deadline = time.monotonic() + self._recovery_s
        while not (names := self._possible()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return names

    def _possible(self) -> list[str]:
        return [name for name, kind in self._kinds.items() if kind.choose(self._ground, Random(0)) is not None]

    def _recovered(self) -> bool:
        """A batch was committed since the last fault that was done."""
        done = [strike for strike in self.strikes if not strike.error]
        return not done or self._commits.wait_for_one(done[-1].began, self._recovery_s)

    def _do(self, act: Act) -> None:
        await_moment(self._ground, act.moment, act.after_s)
        in_flight = self._await_work()
        chosen = self._acts.facts(act, self._ground)
        if chosen is None or chosen.facts is None:
            return
        self._log.begin(chosen)
        began = time.monotonic()
        log.info("fault %d: %s %s", chosen.number, chosen.kind, chosen.facts)
        error = self._strike(chosen)
        strike = Strike(chosen.number, chosen.kind, began, time.monotonic(), in_flight, error)
        self.strikes.append(strike)
        self._log.end(strike)

    def _await_work(self) -> int:
        """Jobs in flight, waited for where there are none."""
        deadline = time.monotonic() + WORK_S
        while not (jobs := self._ground.cluster.in_flight()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return jobs

    def _strike(self, act: Act) -> str:
        """Why it was not done; '' where it was."""
        assert act.facts is not None
        try:
            self._kinds[act.kind].strike(self._ground, act.facts)
        except (NotStruck, redis.RedisError) as exc:
            return str(exc) or repr(exc)
        except (OperatorError, TimeoutError) as exc:
            self.found.append(f"fault {act.number}, {act.kind}: {exc}")
        return ""
