"""What a trainer that validates by requests of its own has drawn: the run's eval_sampling is over its sampling."""

from typing import Any

import pytest

from penstock.config import RolloutConfig
from penstock.consumers.adapters.requests import eval_sampling
from penstock.records.job import Job
from penstock.workers.jobs.sampling import sampling_for


@pytest.mark.parametrize(
    ("of_the_run", "limit", "wanted"),
    [
        ({"temperature": 0.0}, None, {"temperature": 0.0, "max_new_tokens": 64}),
        ({"temperature": 0.6, "top_p": 0.95}, 64, {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 64}),
        ({"temperature": 0.0, "max_new_tokens": 32}, 64, {"temperature": 0.0, "max_new_tokens": 32}),
        ({"max_new_tokens": 512}, None, {"temperature": 0.8, "max_new_tokens": 512}),
        ({"max_new_tokens": 512}, 64, {"temperature": 0.8, "max_new_tokens": 64}),
        ({}, None, {"temperature": 0.8, "max_new_tokens": 64}),
    ],
)
def test_validation_is_drawn_as_the_run_says_within_the_length_that_the_trainer_can_hold(
    of_the_run: dict[str, Any], limit: int | None, wanted: dict[str, Any]
) -> None:
    rollout = RolloutConfig(sampling={"temperature": 1.0, "max_new_tokens": 9}, eval_sampling=of_the_run)
    own = {"temperature": 0.8, "max_new_tokens": 64}
    job = Job("v/0/0", 1, prompt="p", lane="eval", sampling=eval_sampling(own, rollout, limit))
    assert sampling_for(job, rollout) == wanted
