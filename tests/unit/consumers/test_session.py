"""How a rank's hold on a run ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.consumers.session import Session


@pytest.mark.parametrize("failing", ["evaluations", "steps", "publisher", "subscription", "reader"])
def test_the_end_of_one_part_keeps_no_other_from_its_own(failing: str) -> None:
    """The subscription above all: its heartbeat would hold it, and the next trainer would be refused."""
    ended: list[str] = []

    def ending(name: str) -> Any:
        def end(**_: Any) -> None:
            ended.append(name)
            if name == failing:
                raise RuntimeError(name)

        return end

    session: Any = Session.__new__(Session)
    session._exporter = None
    session.steps = SimpleNamespace(close=ending("steps"))
    session._publisher = SimpleNamespace(close=ending("publisher"))
    session.subscriber = SimpleNamespace(leave=ending("subscription"))
    session.reader = SimpleNamespace(close=ending("reader"))
    session._exporter = None
    session._evaluation_reader = SimpleNamespace(stop=ending("evaluations"))

    with pytest.raises(RuntimeError, match=failing):
        session.close()

    assert ended == ["evaluations", "steps", "publisher", "subscription", "reader"]
