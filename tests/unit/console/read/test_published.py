"""What publishing took, by the trainer's rows."""

from penstock.console.read.weights import list_published


def test_steps_behind_which_a_version_was_published_are_listed_the_latest_first() -> None:
    steps = [{"step": 1, "publish_s": 0.5, "time_s": 9.0}, {"step": 2, "publish_s": 0.0}, {"step": 3, "publish_s": 1}]
    assert list_published(steps) == [
        {"step": 3, "took_s": 1, "time_s": None},
        {"step": 1, "took_s": 0.5, "time_s": 9.0},
    ]


def test_what_is_no_number_is_no_publication() -> None:
    assert list_published([{"step": 1}, {"step": 2, "publish_s": None}, {"step": 3, "publish_s": "x"}]) == []
