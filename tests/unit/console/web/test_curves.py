"""Lines with more points than a screen shows."""

from console.launch.report import Rows
from console.web.curves import MAX_POINTS, curves, thinned
from tests.unit.console.web.run_files import step


def test_a_long_line_keeps_its_ends_and_its_peaks() -> None:
    values = [0.0] * 100_000
    values[77_777], values[13] = 9.0, -9.0
    points = [({"at": at}, value) for at, value in enumerate(values)]

    kept = thinned(points)

    assert len(kept) <= MAX_POINTS
    assert {value for _, value in kept} == {0.0, 9.0, -9.0}
    places = [row["at"] for row, _ in kept]
    assert places == sorted(places)
    assert 77_777 in places
    assert places[0] < 500
    assert places[-1] > 99_000


def test_a_long_run_is_a_short_answer() -> None:
    rows = Rows(steps=[step(number) for number in range(5_000)], evals=[], queue=[])
    (reward,) = [chart for chart in curves(rows, None) if chart["id"] == "reward"]
    assert len(reward["lines"][0]["value"]) <= MAX_POINTS
    assert reward["lines"][0]["step"][-1] >= 4_980
