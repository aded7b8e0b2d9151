"""How busy the GPUs of this machine are, as NVIDIA's management library says; nothing where there is none.

It may take long to answer, or hang with a driver that does: it is asked by a thread, and what it said last is read.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from penstock.config import EngineConfig
from penstock.protocol.presence import MAX_GPUS, GpuLoad
from penstock.system.extras import is_installed

#: Between two looks, and how long the last one counts.
LOOK_S, FRESH_S = 2.0, 20.0
#: Characters of what a GPU is called, at most.
MAX_NAME = 100

log = logging.getLogger(__name__)


class GpuWatch:
    """Asks for GPUs again and again, from a thread, until ``close``.

    Where there is no library, driver or GPU it asks once and tells of none.

    Args:
        visible: which ones, as CUDA_VISIBLE_DEVICES has them; None: all of this machine.
    """

    def __init__(self, visible: str | None) -> None:
        self._visible = visible
        self._said: tuple[float, tuple[GpuLoad, ...]] = (0.0, ())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
        self._thread.start()

    def loads(self) -> tuple[GpuLoad, ...]:
        """GPUs as they were told of last; () where there are none, or the library hangs. Returns at once."""
        at, loads = self._said
        return loads if time.monotonic() - at < FRESH_S else ()

    def close(self) -> None:
        """Ask no more. Returns at once, though a question may be on its way."""
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
            # Whatever a driver raises: figures are missing, and nothing else.
            log.warning("figures of GPUs are not told any more: %r", exc)


def visible_to(engine: EngineConfig) -> str | None:
    """What CUDA_VISIBLE_DEVICES is for an engine that this process starts; None where nobody sets it."""
    return engine.env.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_loads(library: Any, names: Sequence[str]) -> tuple[GpuLoad, ...]:
    """GPUs by numbers or UUIDs, ``MAX_GPUS`` of them; one that does not answer is left out. Blocks.

    Args:
        library: ``pynvml``, begun.
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
    # As nvidia-smi counts: the first version takes for used what the driver keeps for itself.
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
    """All are named by their numbers. The library counts by places of the bus, as CUDA does where all are alike."""
    if visible is None:
        return list(map(str, range(library.nvmlDeviceGetCount())))
    return [name for part in visible.split(",") if (name := part.strip()) not in ("", "-1")]


def _library() -> Any:
    """NVIDIA's library, begun; None where it is not installed, or finds no driver."""
    if not is_installed("pynvml"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        log.debug("there is no GPU to tell of: %s", exc)
        return None
    return pynvml
