"""Collect the expert routing of a sample from its requests, in order (T17; workers/sglang/routed_experts.py)."""

import numpy as np

from penstock.errors import EngineError
from penstock.names import ROUTED_EXPERTS
from penstock.records.sample import Sample
from penstock.workers.engine import Rows


def add_rows(sample: Sample, returned: Rows | None) -> None:
    """Append the routing rows that a request returned to a sample with its tokens; truncate them to those tokens."""
    rows: Rows | None = sample.sides.get(ROUTED_EXPERTS)
    if returned is not None:
        rows = returned if rows is None else np.concatenate([rows, returned[len(rows) :]])
    if rows is not None:
        sample.sides[ROUTED_EXPERTS] = rows[: len(sample.tokens) - 1]


def has_all_routing(sample: Sample) -> bool:
    """Return whether every generated token of an unfinished sample has a routing row (T17)."""
    rows = sample.sides.get(ROUTED_EXPERTS)
    last = max((index for index, is_generated in enumerate(sample.generated) if is_generated), default=0)
    return last <= (0 if rows is None else len(rows))


def check_rows(sample: Sample) -> None:
    """Raise EngineError unless a finished sample has a routing row for every token except the last."""
    rows = sample.sides.get(ROUTED_EXPERTS)
    if rows is None or len(rows) != len(sample.tokens) - 1:
        raise EngineError(
            f"sample {sample.id}: the engine returned routing for {0 if rows is None else len(rows)} positions, but "
            f"{len(sample.tokens)} tokens need {len(sample.tokens) - 1}."
        )
