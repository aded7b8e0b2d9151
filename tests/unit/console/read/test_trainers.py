"""Rows of `penstock trainers ls`."""

from penstock.console.read.parts import trainer_rows


def test_a_subscription_that_only_reads_evaluations_has_no_row() -> None:
    actor = {"name": "actor", "lanes": "train,resume,suspect", "owned": True, "cursor": 3}
    reader = {"name": "eval", "lanes": "eval", "owned": True, "cursor": 2}
    silent = {"name": "second", "lanes": "train", "owned": False, "cursor": 0}
    state = {"subs": [actor, reader, silent], "trainers": [{"name": "actor", "rank": 0}], "waits": []}
    assert [(row["name"], row["state"]) for row in trainer_rows(state)] == [("actor", "running"), ("second", "gone")]
