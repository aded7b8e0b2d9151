"""What giving groups up for their age does to lengths: the metric and its warning (T4)."""

import logging
from typing import Any

import pytest

from penstock.consumers.metrics.tally import Ledger
from penstock.records.manifest import Manifest, Row
from tests.batch_factory import make_manifest

NAME = "rollout/trained_over_generated_length"


def batch(n: int, lengths: list[int], aged: tuple[int, int] = (0, 0)) -> Manifest:
    rows = [
        Row(f"toy/0/{n}", k, "t", "s", 0, 0, length + 1, 1, length, length, 1, 1, 1, 0.0, "completed")
        for k, length in enumerate(lengths)
    ]
    ledger: dict[str, Any] = {}
    if aged[0]:
        ledger = {"dropped": {"stale": 1}, "raised": 0, "rejected_samples": 0, "rejected_reward": 0.0}
        ledger |= {"aged_samples": aged[0], "aged_tokens": aged[1]}
    return make_manifest(rows, n=n, on_expiry="drop", ledger=ledger)


def test_T4_trained_over_generated_length_is_told_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    with caplog.at_level(logging.WARNING):
        assert NAME not in ledger.metrics(batch(1, [100, 100]))
        # 4 samples of 100 trained, 1 of 110 given up: 100 / 102.
        found = ledger.metrics(batch(2, [100, 100], aged=(1, 110)))
        assert found[NAME] == pytest.approx(100 / 102)
        assert not caplog.records
        # 6 of 100 trained, 4 of 250 given up: 100 / 160.
        assert ledger.metrics(batch(3, [100, 100], aged=(4, 1000)))[NAME] == pytest.approx(100 / 160)
        assert "0.62 times as long as generated answers" in caplog.text
        assert "staleness.on_expiry is drop" in caplog.text
        ledger.metrics(batch(4, [100, 100], aged=(4, 1000)))
    assert len(caplog.records) == 1, "once, not at every batch"


def test_T4_what_came_before_a_restart_and_what_comes_twice_does_not_count() -> None:
    ledger = Ledger()
    assert NAME not in ledger.metrics(batch(7, [100], aged=(50, 90_000)))
    first = ledger.metrics(batch(8, [100], aged=(52, 90_600)))[NAME]
    assert first == pytest.approx(100 / ((200 + 600) / 4))
    assert ledger.metrics(batch(8, [100], aged=(52, 90_600)))[NAME] == first
