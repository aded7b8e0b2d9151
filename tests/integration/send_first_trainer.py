"""A trainer that publishes version 1, then version 2 send first, and gets a signal at a named point of it.

python -m tests.integration.send_first_trainer CONFIG MODEL MODEL POINT [SIGNAL]
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from penstock.consumers.clock import Clock
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.checkpoint_writer import CheckpointWriter
from penstock.consumers.weights.sender import Transfer
from tests.integration.test_transfers import load

#: Point -> what is called there, and whether that is done before.
POINTS: dict[str, tuple[type, str, bool]] = {
    "copied": (CheckpointWriter, "copy", True),
    "claimed": (Clock, "claim", True),
    "announced": (Clock, "announce", True),
    "decided": (Transfer, "await_held", False),
    "held": (Transfer, "await_held", True),
    "nothing sent": (Transfer, "tell", False),
    "half sent": (Transfer, "await_received", False),
    "sent": (CheckpointWriter, "put", False),
    "folder written, nobody told": (CheckpointWriter, "_announce", False),
    "whole": (CheckpointWriter, "_announce", True),
}


def at(point: str, act: Callable[[], None]) -> None:
    """Have ``act`` called at a point from now on."""
    owner, name, is_done_before = POINTS[point]
    real = getattr(owner, name)

    def act_there(*args: Any, **options: Any) -> Any:
        if is_done_before:
            answer = real(*args, **options)
            act()
            return answer
        act()
        return real(*args, **options)

    setattr(owner, name, act_there)


def main(config: str, first: str, second: str, point: str, how: str = "SIGKILL") -> None:
    with Trainer(config) as trainer:
        trainer.publish(load(first))
        trainer.commit(trainer.next())
        while [(one.state, one.version) for one in trainer.workers()] != [("serving", 1)]:
            time.sleep(0.02)
        at(point, lambda: os.kill(os.getpid(), signal.Signals[how]))
        trainer.publish(load(second))
        trainer.session.settle()


if __name__ == "__main__":
    main(*sys.argv[1:])
