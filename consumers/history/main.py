"""``penstock recorder``: keeps what becomes of samples when their groups leave the queue."""

import signal
from types import FrameType

from consumers.history.recorder import Recorder
from penstock.config import Config


def main(config: Config) -> int:
    """Record until SIGTERM or SIGINT, and then what still waits, for 8 s at most. Blocks."""
    recorder = Recorder(config)

    def stop(signum: int, frame: FrameType | None) -> None:
        recorder.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    recorder.run()
    return 0
