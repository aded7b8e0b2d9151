"""The end of a run's child processes: SIGTERM, a second one to hurry, then SIGKILL; what serves others goes last."""

import logging
import time
from collections.abc import Callable

from penstock.config import Config
from penstock.system.processes import Child
from penstock.system.stop import Stop

#: Between two looks at children that are ending.
TICK_S = 0.05

#: Longest wait for the end of a child after SIGTERM, beside a worker's own drain.
STOP_S = 10.0

#: After Ctrl-C workers get a second SIGTERM after this long: hand back what is partial, do not drain on.
HURRY_S = 2.0

#: Parts that end only when asked to; workers that drain need both.
SERVING = ("buffer", "verifiers", "recorder")
#: Of those the one that keeps what the others leave.
LAST = ("recorder",)

log = logging.getLogger(__name__)


def stop_children(
    children: list[Child], config: Config, stop: Stop, *, drain: bool, meanwhile: Callable[[], object]
) -> None:
    """End them all. Blocks until they are gone; one more press of ``stop`` kills what is left.

    Args:
        drain: workers finish what they are generating; False: they hand it back.
        meanwhile: called while they end.
    """
    presses = stop.count
    limit_s = config.worker.drain_timeout_s + STOP_S if drain else STOP_S
    if config.fleet.models:
        # It ends its workers first, then what they need.
        limit_s += 2 * STOP_S
    for some, some_limit_s, hurry in (
        ([child for child in children if child.name not in SERVING], limit_s, not drain),
        ([child for child in children if child.name in SERVING and child.name not in LAST], STOP_S, False),
        ([child for child in children if child.name in LAST], STOP_S, False),
    ):
        _stop(some, some_limit_s, hurry=hurry, pressed=lambda: stop.count > presses, meanwhile=meanwhile)


def kill_children(children: list[Child]) -> None:
    """SIGKILL to all; blocks until they are gone."""
    for child in children:
        child.kill()


def _stop(
    children: list[Child],
    limit_s: float,
    *,
    hurry: bool,
    pressed: Callable[[], bool],
    meanwhile: Callable[[], object],
) -> None:
    """SIGTERM, a second one to hurry, and SIGKILL after ``limit_s`` or one more Ctrl-C."""
    began = time.monotonic()
    for child in children:
        child.terminate()
    hurried = not hurry
    while any(child.alive() for child in children):
        waited_s = time.monotonic() - began
        if not hurried and waited_s >= HURRY_S:
            hurried = True
            for child in children:
                child.terminate()
        # Ctrl-C while a finished run drains means: now.
        if pressed() or waited_s >= limit_s:
            for child in filter(Child.alive, children):
                log.warning("%s did not end in %.1f s and is killed", child.name, waited_s)
                child.kill()
            return
        meanwhile()
        time.sleep(TICK_S)
