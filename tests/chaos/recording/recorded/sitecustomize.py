"""Loaded by every Python process whose PYTHONPATH has this folder before the others: it records what it does.

``CHAOS_HISTORY`` names the folder of the histories; without it nothing is recorded. ``CHAOS_CLOCK`` names a file by
which its clock is off.
"""

import os
import sys
from pathlib import Path

if os.environ.get("CHAOS_HISTORY"):
    sys.path.append(str(Path(__file__).parents[4]))
    if clock := os.environ.get("CHAOS_CLOCK"):
        from tests.chaos.parts.false_clock import FalseClock

        FalseClock(Path(clock)).install()
    from tests.chaos.recording.hooks import install_from_environment

    install_from_environment()
