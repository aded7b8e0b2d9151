"""What stands before the real ``write_weights``: it waits until it may, or fails."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.consumers.weights import write as files
from tests.integration.parts import PATIENCE_S


class Disk:
    """Writes at once until ``may_write`` is cleared, or ``failure`` set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.failure: Exception | None = None
        self.spared = 0
        self.begun: list[int] = []
        self._write = files.write_weights
        monkeypatch.setattr(files, "write_weights", self.write)

    @contextmanager
    def opened_at_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.may_write.set()

    def write(self, weights: Any, model: Any, into: Path, version: int, **options: Any) -> Any:
        self.begun.append(version)
        assert self.may_write.wait(PATIENCE_S)
        if self.failure is not None and version != self.spared:
            raise self.failure
        return self._write(weights, model, into, version, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.may_write.set()
