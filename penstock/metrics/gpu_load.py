"""Load of this machine's GPUs from NVIDIA's management library; nothing if it is missing.

Calls may take long, or hang with the driver: a thread makes them, and readers get its last result.
"""

import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.protocol.presence import MAX_GPUS, GpuLoad
from penstock.system.extras import is_installed

log = logging.getLogger(__name__)

#: Information of the kernel's driver, if nvidia-smi is not installed.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs for CUDA_VISIBLE_DEVICES, in CUDA's order.

    Blocks for a second if it has to run nvidia-smi.
    """
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return _listed(visible)
    if shutil.which("nvidia-smi") is None:
        return numbered(len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return numbered(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))


def _listed(visible: str) -> tuple[str, ...]:
    """Return the ids, UUIDs or MIG names of CUDA_VISIBLE_DEVICES; an empty one means no GPU."""
    return tuple(name for part in visible.split(",") if (name := part.strip()) not in ("", "-1"))


def numbered(count: int) -> tuple[str, ...]:
    """Return the numbers of ``count`` GPUs as names."""
    return tuple(map(str, range(count)))


#: Seconds between two calls, and for which a result is valid.
LOOK_S, FRESH_S = 2.0, 20.0
#: Most characters of a GPU's name.
MAX_NAME = 100


class GpuWatch:
    """Polls GPUs from a thread, until ``close``.

    Without the library, a driver or a GPU it polls once and reports none.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES; None: all GPUs of this machine.
    """

    def __init__(self, visible: str | None) -> None:
        self._visible = visible
        self._said: tuple[float, tuple[GpuLoad, ...]] = (0.0, ())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def loads(self) -> tuple[GpuLoad, ...]:
        """Return the last load of each GPU; () without GPUs, or if the library hangs. Returns at once."""
        at, loads = self._said
        return loads if time.monotonic() - at < FRESH_S else ()

    def close(self) -> None:
        """Stop polling. Returns at once, even during a call."""
        self._closed.set()

    def _run(self) -> None:
        try:
            library = _library()
            while library is not None and (names := _names(library, self._visible)):
                self._said = time.monotonic(), gpu_loads(library, names)
                if self._closed.wait(LOOK_S):
                    library.nvmlShutdown()
                    return
        except Exception as exc:
            # Whatever a driver raises: only the figures are missing.
            log.warning("GPU metrics disabled: %r", exc)


def visible_to(engine: EngineConfig) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of an engine that this process starts; None if it is not set."""
    return engine.env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_loads(library: Any, names: Sequence[str]) -> tuple[GpuLoad, ...]:
    """Return the load of GPUs by numbers or UUIDs, at most ``MAX_GPUS``; those without an answer are skipped. Blocks.

    Args:
        library: ``pynvml``, initialized.
    """
    found = []
    for name in names[:MAX_GPUS]:
        try:
            found.append(_load(library, name))
        except library.NVMLError as exc:
            log.debug("GPU %s does not answer: %s", name, exc)
    return tuple(found)


def _load(library: Any, name: str) -> GpuLoad:
    by_number, by_uuid = library.nvmlDeviceGetHandleByIndex, library.nvmlDeviceGetHandleByUUID
    handle = by_number(int(name)) if name.isdecimal() else by_uuid(name.encode())
    # As nvidia-smi counts: version 1 counts the driver's own memory as used.
    memory = library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
    model = library.nvmlDeviceGetName(handle)
    return GpuLoad(
        name=name[:MAX_NAME],
        model=(model.decode(errors="replace") if isinstance(model, bytes) else str(model))[:MAX_NAME],
        use=_use(library, handle),
        used_bytes=int(memory.used),
        size_bytes=int(memory.total),
    )


def _use(library: Any, handle: Any) -> float:
    try:
        return float(library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except library.NVMLError:
        return -1.0


def _names(library: Any, visible: str | None) -> Sequence[str]:
    """Return the names of visible GPUs, by default all numbers, in the order of the bus, as CUDA for equal GPUs."""
    if visible is None:
        return numbered(library.nvmlDeviceGetCount())
    return _listed(visible)


def _library() -> Any:
    """Return NVIDIA's library, initialized; None if it is not installed, or finds no driver."""
    if not is_installed("pynvml"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        log.debug("no GPU found: %s", exc)
        return None
    return pynvml
