"""What a worker hands back when its engine comes back."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.workers.engine_supervisor import EngineSupervisor


class Held:
    def __init__(self, not_before: int) -> None:
        self.lease = SimpleNamespace(not_before=not_before)
        self.task = None
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


@pytest.mark.parametrize(
    ("had", "has", "stands_in_for", "kept"),
    [
        (2, 2, -1, ["old", "new"]),
        (2, 3, -1, ["old", "new"]),
        (2, 1, -1, []),
        (1, 1, 2, ["old", "new"]),
        (1, 1, -1, ["old"]),
    ],
)
async def test_T12_what_was_begun_on_newer_weights_is_handed_back(
    had: int, has: int, stands_in_for: int, kept: list[str]
) -> None:
    held: dict[str, Any] = {"old": Held(1), "new": Held(2)}
    made = EngineSupervisor.__new__(EngineSupervisor)
    made._held = held
    services: Any = SimpleNamespace(highest=max(has, stands_in_for), engine=SimpleNamespace(version=has))
    made._services = services
    await made._hand_back_newer(had)
    assert [name for name, one in held.items() if not one.is_released] == kept
