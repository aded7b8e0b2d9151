"""The end of a run's child processes: SIGTERM, a second one to hurry, then SIGKILL; what serves others goes last.

The trainer finishes its step and its checkpoint, however long that takes: a second Ctrl-C kills it.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping

from penstock.config import Config
from penstock.system.processes import Child
from penstock.system.stop import Stop
from penstock.workers.rewards.keeper import KILL_S

#: Between two looks at children that are ending.
TICK_S = 0.05

#: Longest wait for the end of a child after SIGTERM. A worker is waited for until its keeper has killed it and handed
#: back its jobs, and so much longer.
STOP_S = 10.0

#: After Ctrl-C workers get a second SIGTERM after this long: hand back what is partial, do not drain on.
HURRY_S = 2.0

#: What it has to finish takes as long as it takes: it is not killed before a second Ctrl-C, and not hurried, because a
#: second signal ends it at once.
FINISHING = "trainer"
PRODUCING = "producer"
#: How often it is said what is waited for.
SAY_EVERY_S = 10.0

#: Parts that end only when asked to; workers that drain need both.
SERVING = ("buffer", "verifiers", "recorder")
#: Of those the one that keeps what the others leave.
LAST = ("recorder",)

log = logging.getLogger(__name__)


def stop_children(
    children: list[Child],
    config: Config,
    stop: Stop,
    *,
    drain: bool,
    meanwhile: Callable[[], object],
    finish_s: float = math.inf,
) -> None:
    """End them all. Blocks until they are gone; one more press of ``stop`` kills what is left.

    Args:
        drain: workers finish what they are generating; False: they hand it back.
        meanwhile: called while they end.
        finish_s: longest time, beside ``STOP_S``, for the trainer to finish its step and checkpoint.
    """
    presses = stop.count
    limit_s = STOP_S + KILL_S + (config.worker.drain_timeout_s if drain else HURRY_S)
    if config.fleet.models:
        # It ends its workers first, then what they need.
        limit_s += 2 * STOP_S
    limits_s = {FINISHING: finish_s + STOP_S, PRODUCING: STOP_S}
    working = {child: limits_s.get(child.name, limit_s) for child in children if child.name not in SERVING}
    serving = {child: STOP_S for child in children if child.name in SERVING and child.name not in LAST}
    last = {child: STOP_S for child in children if child.name in LAST}
    for some, hurry in ((working, not drain), (serving, False), (last, False)):
        _stop(some, hurry=hurry, pressed=lambda: stop.count > presses, meanwhile=meanwhile)


def kill_children(children: list[Child]) -> None:
    """SIGKILL to all; blocks until they are gone."""
    for child in children:
        child.kill()


def _stop(
    limits_s: Mapping[Child, float],
    *,
    hurry: bool,
    pressed: Callable[[], bool],
    meanwhile: Callable[[], object],
) -> None:
    """SIGTERM, a second one to hurry, and SIGKILL after the child's limit or one more Ctrl-C."""
    began = time.monotonic()
    said_s = 0.0
    for child in limits_s:
        child.terminate()
    hurried = not hurry
    while alive := [child for child in limits_s if child.alive()]:
        waited_s = time.monotonic() - began
        if not hurried and waited_s >= HURRY_S:
            hurried = True
            for child in alive:
                if child.name != FINISHING:
                    child.terminate()
        # Ctrl-C while a finished run drains means: now.
        for child in alive:
            if pressed() or waited_s >= limits_s[child]:
                log.warning("%s did not end in %.1f s and is killed", child.name, waited_s)
                child.kill()
        if waited_s - said_s >= SAY_EVERY_S:
            said_s = waited_s
            names = ", ".join(child.name for child in alive)
            log.warning("still waiting for %s after %.0f s; Ctrl-C kills what is left", names, waited_s)
        meanwhile()
        time.sleep(TICK_S)
