"""Samples of a job that was tried three times, at round times."""

from typing import Any

from penstock.history.row import SampleRow
from tests.unit.penstock.history.rows import row

#: Crashed, failed, committed.
TRIES = "train:w-1:1010000:1020000:crashed;resume:w-2:1025000:1030000:failed reward_raised;resume:w-1:1040000"
_TIMES: dict[str, Any] = {
    "admitted_s": 1000.0,
    "leased_s": 1010.0,
    "started_s": 1042.0,
    "first_token_s": 1043.0,
    "drawn_s": 1048.0,
    "rewarded_s": 1049.0,
    "committed_s": 1050.0,
    "ready_s": 1055.0,
    "cut_s": 1060.0,
    "trained_s": 1070.0,
    "generate_s": 5.0,
    "pauses": [[1044.0, 1045.0]],
}


def sample(job: str = "math/0/7", k: int = 0, **fields: Any) -> SampleRow:
    """One that went through every stage."""
    return row(job, k, **({"tries": TRIES} | _TIMES | fields))
