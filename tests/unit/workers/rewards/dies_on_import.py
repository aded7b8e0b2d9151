"""A module of user code that ends its process when it is imported."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)


def reward(sample: object) -> float:
    return 1.0
