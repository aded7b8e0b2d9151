"""The launcher's looks: what Redis holds or does not answer costs a row of the course, and nothing else."""

from typing import Any

import pytest
import redis

from console.launch.observer import Observer
from penstock.errors import ProtocolError
from penstock.protocol import snapshot


@pytest.mark.parametrize("raised", [ProtocolError("A record is bad."), redis.ConnectionError("away")])
def test_a_look_that_fails_is_said_and_children_are_watched_on(
    raised: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(snapshot, "snapshot", fails)
    observer = Observer.__new__(Observer)
    observer.client, observer.keys, observer.url = None, None, "redis://h:1/0"  # type: ignore[assignment]

    observer.look()

    assert str(raised).rstrip(".") in caplog.text
