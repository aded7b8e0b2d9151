"""How long a peer may take for a range, by what others took."""

import pytest

from penstock.workers.weights.fetch import progress
from penstock.workers.weights.fetch.progress import GRACE_S, Pace

MIB = 2**20


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_range_is_late_by_what_others_took(now: list[float]) -> None:
    found = Pace(4 * MIB)
    for _ in range(3):
        found.came(4 * MIB, 1.0)
    found.came(100, 1.0)  # a small file says nothing of it
    now[0] = 100.0 + GRACE_S + 4.0
    assert not found.is_late(4 * MIB, since=100.0)
    assert found.is_late(4 * MIB, since=99.9)
    assert found.is_late(2 * MIB, since=100.0)


def test_peers_that_were_asked_and_give_nothing_are_idle(now: list[float]) -> None:
    found = Pace(MIB)
    now[0] += 1000.0
    assert not found.is_idle(), "nobody was asked"
    found.asked(is_again=False)
    now[0] += GRACE_S + 1.0
    assert found.is_idle()
    assert not found.is_known
    found.came(10, 0.1)
    assert found.is_known
    assert not found.is_idle()


def test_where_all_became_slow_each_is_waited_for_longer(now: list[float]) -> None:
    """Or none of them would come to its end."""
    found = Pace(MIB)
    found.came(MIB, 0.01)
    for _ in range(10):
        found.asked(is_again=True)
    now[0] += 1000.0
    assert not found.is_late(MIB, 100.0, found.patience)
    found.came(MIB, 900.0)
    assert found.patience == 1.0
