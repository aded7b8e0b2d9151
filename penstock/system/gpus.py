"""The GPUs of this machine that this process may use."""

import os
import shutil
import subprocess
from pathlib import Path

#: What the kernel's driver says, where nvidia-smi is not installed.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs, as CUDA_VISIBLE_DEVICES takes them, in the order in which CUDA counts them from 0.

    Blocks for a second where nvidia-smi has to be asked.
    """
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # Empty means none; ids, UUIDs and MIG names all stand between commas.
        return tuple(name for part in visible.split(",") if (name := part.strip()) not in ("", "-1"))
    if shutil.which("nvidia-smi") is None:
        return numbered(len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return numbered(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))


def numbered(count: int) -> tuple[str, ...]:
    """So many GPUs by their numbers."""
    return tuple(map(str, range(count)))
