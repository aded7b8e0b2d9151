"""Figures of GPUs: what NVIDIA's library says, and nothing where it is not there, has no driver or hangs."""

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.metrics import gpu_load
from penstock.metrics.gpu_load import GpuWatch, gpu_loads, visible_to
from penstock.protocol.presence import GpuLoad

PATIENCE_S = 60.0
SIZE = 140 * 2**30


class NvmlError(Exception):
    pass


class Library:
    """``pynvml`` with two GPUs, of which the second one tells no use."""

    NVMLError = NvmlError
    nvmlMemory_v2 = 0x02000028

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.is_over.set()

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise NvmlError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        return {b"GPU-a": 0, b"GPU-b": 1}[uuid]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        # Seen on an H200: without a version what the driver keeps for itself is used too.
        kept = 0 if version == self.nvmlMemory_v2 else 615 * 2**20
        return SimpleNamespace(used=handle * 2**30 + kept, total=SIZE)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 1:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=75)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(gpu_load, "is_installed", lambda _: True)
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    return made


def test_each_gpu_tells_use_and_memory(library: Library) -> None:
    first, second = gpu_loads(library, ["0", "1"])
    assert first == GpuLoad(name="0", model="NVIDIA H200", use=0.75, used_bytes=0, size_bytes=SIZE)
    assert (second.use, second.used_bytes) == (-1, 2**30), "what is not told is absent, never 0"


def test_one_that_does_not_answer_is_left_out(library: Library) -> None:
    assert [one.name for one in gpu_loads(library, ["7", "1"])] == ["1"]


@pytest.mark.parametrize(("visible", "names"), [(None, ["0", "1"]), ("1", ["1"]), ("GPU-b, GPU-a", ["GPU-b", "GPU-a"])])
def test_only_gpus_of_the_engine_are_told_of(visible: str | None, names: list[str], library: Library) -> None:
    watch = GpuWatch(visible)
    until(watch.loads)
    assert [one.name for one in watch.loads()] == names
    watch.close()
    assert library.is_over.wait(PATIENCE_S)


def test_where_none_is_visible_nobody_is_asked_again(library: Library) -> None:
    watch = GpuWatch("")
    until(lambda: not watch._thread.is_alive())
    assert watch.loads() == ()


def test_without_a_driver_there_are_no_figures(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NvmlError("Driver Not Loaded")

    monkeypatch.setattr(library, "nvmlInit", fail)
    watch = GpuWatch(None)
    until(lambda: not watch._thread.is_alive())
    assert watch.loads() == ()


def test_a_library_that_hangs_holds_up_nobody_and_its_figures_get_too_old(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, asked = threading.Event(), threading.Event()
    watch = GpuWatch("0")
    until(watch.loads)

    def hang(*_: int, **__: int) -> Any:
        asked.set()
        free.wait(PATIENCE_S)
        raise NvmlError("Unknown Error")

    monkeypatch.setattr(library, "nvmlDeviceGetMemoryInfo", hang)
    assert asked.wait(PATIENCE_S)
    monkeypatch.setattr(gpu_load, "FRESH_S", 0.0)
    assert watch.loads() == ()
    watch.close()
    free.set()


def test_what_an_engine_sees_is_set_for_it_or_for_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_to(EngineConfig()) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert visible_to(EngineConfig()) == "2,3"
    assert visible_to(EngineConfig(env={"CUDA_VISIBLE_DEVICES": "3"})) == "3"


def until(done: Any) -> None:
    patience = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < patience
        time.sleep(0.005)
