"""``penstock recorder``: keeps what becomes of samples when their groups leave the queue."""

import os
import signal
from types import FrameType

from penstock.config import Config
from penstock.consumers.history.recorder import Recorder

#: Of 19, the most that a process may leave to others.
NICE = 15


def main(config: Config) -> int:
    """Record until SIGTERM or SIGINT, and then what still waits, for 8 s at most. Blocks."""
    # It takes what others leave: they wait for nothing of it, and what it has not done yet waits in its backlog.
    os.nice(NICE)
    recorder = Recorder(config)

    def stop(signum: int, frame: FrameType | None) -> None:
        recorder.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    recorder.run()
    return 0
