"""``penstock recorder``: record the fates of samples when their groups leave the queue."""

import os
import signal
from types import FrameType

from penstock.config import Config
from penstock.consumers.history.recorder import Recorder

#: Low CPU priority; the lowest is 19.
NICE = 15


def main(config: Config) -> int:
    """Record until SIGTERM or SIGINT, then the backlog, for 8 s at most. Blocks."""
    # Low priority: no part waits for the recorder, and unfinished work stays in its backlog.
    os.nice(NICE)
    recorder = Recorder(config)

    def stop(signum: int, frame: FrameType | None) -> None:
        recorder.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    recorder.run()
    return 0
