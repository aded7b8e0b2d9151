"""The launcher's looks: what Redis holds or does not answer costs a row of the course, and nothing else."""

from typing import Any

import pytest
import redis

from penstock.console.launch.observer import Observer, queue_row, summary_line
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


def test_a_row_of_the_course_has_the_tokens_told_of_and_trained_on() -> None:
    tokens = {"train": {"heard": 100, "accounts": {"trained": 60}}, "eval": {"heard": 9, "accounts": {}}}
    row = queue_row({"tokens": tokens})
    assert (row["tokens_heard"], row["tokens_trained"]) == (100, 60), "what was drawn to be trained on"
    assert queue_row({})["tokens_heard"] == 0


def test_the_last_line_says_figures_by_name_in_words() -> None:
    summary = {"run": "r", "steps": 3, "tokens_by_account": {"trained": 7, "masked": 0, "held": 2}, "dropped": {"x": 0}}
    assert summary_line(summary) == "steps 3  tokens_by_account trained 7, held 2  dropped none"
