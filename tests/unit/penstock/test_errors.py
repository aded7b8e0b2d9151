"""Errors reach whoever waits for a task in another process."""

import pickle

import pytest

from penstock import errors
from penstock.errors import HookError, PenstockError, QueueFull, RewardError, RolesApart
from penstock.records.worker_causes import NotReported

KINDS = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PenstockError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_pickling(kind: type[PenstockError]) -> None:
    error = kind.__new__(kind, "what was wrong")
    error.cause = NotReported()  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, "what was wrong", vars(error))


def test_errors_with_further_arguments_keep_them() -> None:
    for error in (
        QueueFull("raise maxmemory", NotReported()),
        RewardError("reward_raised", "it raised"),
        HookError("hook_raised", "it raised"),
        RolesApart(3, "go back"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
        assert vars(again)
