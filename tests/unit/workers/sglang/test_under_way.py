"""Requests that hang are named by how long an answer takes here, and not by a fixed time."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from penstock.workers.sglang import controls
from penstock.workers.sglang.controls import UNMEASURED_S, RequestsInFlight


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(controls.time, "monotonic", lambda: now.s)
    return now


def answered(requests: RequestsInFlight, clock: SimpleNamespace, *, tokens: int, seconds: float) -> None:
    """A request that was answered with so many tokens after so long."""
    with requests.sent("d/9/0", wire := requests.wire_rid("d/9/0"), most=tokens):
        clock.s += seconds
        requests.answered(wire, tokens)


@pytest.mark.parametrize(
    ("most", "tokens_per_s", "limit_s"), [(16, 100.0, 10.0), (1000, 100.0, 30.0), (3000, 50.0, 180.0)]
)
def test_I8_a_request_is_named_after_three_times_its_longest_answer_and_10_s_at_least(
    clock: SimpleNamespace, most: int, tokens_per_s: float, limit_s: float
) -> None:
    requests = RequestsInFlight()
    answered(requests, clock, tokens=200, seconds=200 / tokens_per_s)
    with requests.sent("d/0/0", requests.wire_rid("d/0/0"), most=most):
        clock.s += limit_s - 0.01
        assert requests.silent() == []
        clock.s += 0.02
        ((rid, seconds),) = requests.silent()
    assert (rid, round(seconds)) == ("d/0/0", limit_s)


def test_I8_a_request_that_is_still_heard_of_is_not_named_however_old(clock: SimpleNamespace) -> None:
    requests = RequestsInFlight()
    answered(requests, clock, tokens=100, seconds=1.0)
    with requests.sent("d/0/0", wire := requests.wire_rid("d/0/0"), most=100):
        for _ in range(10):
            clock.s += 9.0
            requests.on_tokens(wire)
            assert requests.silent() == []
        clock.s += 11.0
        assert [round(seconds) for _, seconds in requests.silent()] == [11]


def test_I8_the_rate_of_one_request_is_that_of_the_latest_answers(clock: SimpleNamespace) -> None:
    requests = RequestsInFlight()
    for _ in range(30):
        answered(requests, clock, tokens=1000, seconds=10.0)
    for _ in range(30):
        answered(requests, clock, tokens=1000, seconds=100.0)
    assert requests.limit_s(1000) == pytest.approx(300.0, rel=0.01), "the engine has become slower"


def test_I8_before_any_answer_the_limit_of_an_unmeasured_engine_counts(clock: SimpleNamespace) -> None:
    requests = RequestsInFlight()
    with ExitStack() as stack:
        stack.enter_context(requests.sent("d/0/0", requests.wire_rid("d/0/0"), most=16))
        clock.s += UNMEASURED_S - 1
        assert requests.silent() == []
        clock.s += 2
        assert [rid for rid, _ in requests.silent()] == ["d/0/0"]
