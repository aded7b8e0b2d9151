"""A module of rewards whose import never ends."""

import threading

threading.Event().wait()
