"""Run ``penstock recorder``, which records the fates of samples when their groups leave the queue."""

import os
import signal
from types import FrameType

from penstock.config import Config
from penstock.consumers.history.recorder import Recorder

#: CPU niceness; 19 is the lowest priority.
NICE = 15


def main(config: Config) -> int:
    """Record until SIGTERM or SIGINT, then record the backlog for at most 8 s. Blocks."""
    # Low priority: no process waits for the recorder, and unfinished work stays in the backlog.
    os.nice(NICE)
    recorder = Recorder(config)

    def stop(signum: int, frame: FrameType | None) -> None:
        recorder.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    recorder.run()
    return 0
