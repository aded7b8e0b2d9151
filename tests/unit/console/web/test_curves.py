"""Lines with more points than a screen shows."""

from console.web.curves import MAX_POINTS, curves, thinned
from consumers.grpo.rows import Rows
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


def test_an_evaluation_stands_at_the_step_that_made_its_version_however_late_it_was_read() -> None:
    held = [{"dataset": "h", "version": v, "accuracy": 0.5, "time_s": 1009.5} for v in (1, 2, 3, 4)]
    begun = [1, 1, 2, 2, 3, 3]  # two batches a version
    steps = [{**step(n), "version": v, "time_s": 1000.0 + n} for n, v in enumerate(begun, 1)]
    (chart,) = [one for one in curves(Rows(steps=steps, evals=held, queue=[]), None) if one["id"] == "held-out"]
    assert chart["lines"][0]["step"] == [0, 2, 4, 6]
    again = [*steps[:4], {**steps[4], "version": 2, "time_s": 1009.6}]
    (chart,) = [one for one in curves(Rows(steps=again, evals=held, queue=[]), None) if one["id"] == "held-out"]
    assert chart["lines"][0]["step"] == [0, 2, 4, 4], "none made by a step that came again is later than it was read"
    untold = [{key: value for key, value in row.items() if key != "version"} for row in steps]
    (chart,) = [one for one in curves(Rows(steps=untold, evals=held, queue=[]), None) if one["id"] == "held-out"]
    assert chart["lines"][0]["step"] == [6, 6, 6, 6], "as they were read, where nobody tells of versions"


def test_lengths_truncated_answers_and_groups_rewarded_alike_are_drawn_of_the_steps() -> None:
    of_batch = {"rollout/truncated_ratio": 0.25, "rollout/response_len/median": 7.0, "rollout/response_len/max": 12.0}
    alike = {"rollout/zero_std/count_0.0": 2.0, "rollout/zero_std/count_1.0": 3.0}
    rows = Rows(steps=[step(1), step(2, **of_batch), step(3, **of_batch, **alike)], evals=[], queue=[])
    lines = {chart["id"]: {one["name"]: one["value"] for one in chart["lines"]} for chart in curves(rows, None)}
    assert lines["length"] == {"mean": [10, 10, 10], "median": [7, 7], "max": [12, 12]}
    assert lines["cut-off"] == {"truncated": [0.25, 0.25]}
    assert lines["alike"] == {"groups": [0, 5]}, "a step that tells nothing of its batch has none"


def test_goodput_is_the_share_of_the_tokens_drawn_that_were_trained_on() -> None:
    told = [{"time_s": 1.0}, {"time_s": 2.0, "tokens_heard": 0, "tokens_trained": 0}]
    told += [{"time_s": 3.0, "tokens_heard": 200, "tokens_trained": 150}]
    (chart,) = [one for one in curves(Rows(steps=[], evals=[], queue=told), None) if one["id"] == "goodput"]
    assert chart["lines"] == [{"name": "so far", "step": [0.0], "up_s": [2.0], "value": [0.75]}]
