"""The GPUs of this machine that this process may use."""

import os
import shutil
import subprocess
from pathlib import Path

#: Information of the kernel's driver, if nvidia-smi is not installed.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs for CUDA_VISIBLE_DEVICES, in CUDA's order.

    Blocks for a second if it has to run nvidia-smi.
    """
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # Empty means none; ids, UUIDs and MIG names are separated by commas.
        return tuple(name for part in visible.split(",") if (name := part.strip()) not in ("", "-1"))
    if shutil.which("nvidia-smi") is None:
        return numbered(len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return numbered(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))


def numbered(count: int) -> tuple[str, ...]:
    """Return the numbers of ``count`` GPUs as names."""
    return tuple(map(str, range(count)))
