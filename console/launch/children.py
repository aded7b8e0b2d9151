"""End a run's child processes: SIGTERM, a second one to hurry, then SIGKILL; parts that serve others end last.

The trainer finishes its step and its checkpoint, however long that takes: a second Ctrl-C kills it.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping

from penstock.config import Config
from penstock.system.keeper import KILL_S
from penstock.system.processes import Child
from penstock.system.stop import Stop

#: Seconds between two checks of children that are ending.
TICK_S = 0.05

#: Longest wait for a child's exit after SIGTERM. For a worker this comes on top of the time in which its keeper kills
#: it and hands back its jobs.
STOP_S = 10.0

#: After Ctrl-C workers get a second SIGTERM after this long: hand back partial samples instead of draining.
HURRY_S = 2.0

#: Parts without a time limit: not killed before a second Ctrl-C, and not sent a second signal, which would end them at
#: once.
FINISHING = "trainer"
PRODUCING = "producer"
#: Seconds between two log lines that name the children waited for.
SAY_EVERY_S = 10.0

#: Parts that end only on a signal; workers that drain need both.
SERVING = ("buffer", "verifiers", "gateway", "recorder")
#: The part that ends last, as it records what the others leave.
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
    """End all children. Blocks until they have exited; one more press of ``stop`` kills the rest.

    Args:
        drain: workers finish what they are generating; False: they hand it back.
        meanwhile: called repeatedly during the wait.
        finish_s: longest time, on top of ``STOP_S``, for the trainer to finish its step and checkpoint.
    """
    presses = stop.count
    limit_s = STOP_S + KILL_S + (config.worker.drain_timeout_s if drain else HURRY_S)
    if config.fleet.models:
        # It ends its workers first, then the parts that they need.
        limit_s += 2 * STOP_S
    limits_s = {FINISHING: finish_s + STOP_S, PRODUCING: STOP_S}
    working = {child: limits_s.get(child.name, limit_s) for child in children if child.name not in SERVING}
    serving = {child: STOP_S for child in children if child.name in SERVING and child.name not in LAST}
    last = {child: STOP_S for child in children if child.name in LAST}
    for some, hurry in ((working, not drain), (serving, False), (last, False)):
        _stop(some, hurry=hurry, pressed=lambda: stop.count > presses, meanwhile=meanwhile)


def kill_children(children: list[Child]) -> None:
    """Send SIGKILL to all; block until they have exited."""
    for child in children:
        child.kill()


def _stop(
    limits_s: Mapping[Child, float],
    *,
    hurry: bool,
    pressed: Callable[[], bool],
    meanwhile: Callable[[], object],
) -> None:
    """Send SIGTERM, a second one to hurry, and SIGKILL after the child's limit or one more Ctrl-C."""
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
        # Ctrl-C while a finished run drains ends it at once.
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
