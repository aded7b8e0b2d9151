"""What a trainer counts of its batches, and how that is served."""

from typing import Any

import pytest

from penstock.consumers.metrics.tally import Tally
from penstock.consumers.metrics.trainer import TrainerCollector
from penstock.records.manifest import Manifest, Row
from tests.batch_factory import make_manifest


def row(job: int, k: int, generated: int, oldest: int, reward: float = 0.0, status: str = "completed") -> Row:
    loss = generated if oldest >= 0 else 0
    return Row(f"d/0/{job}", k, "t", "s", 0, 0, generated + 1, 1, generated, loss, 4, 5, oldest, reward, status)


def batch(n: int, **fields: Any) -> Manifest:
    """Two groups, trained at version 6, of which version 5 is abandoned: lags 1, 0, 0 and none."""
    rows = [row(0, 0, 10, 4, 1.0), row(0, 1, 20, 6, 1.0, "truncated"), row(1, 0, 30, 6, 1.0), row(1, 1, 40, -1)]
    return make_manifest(rows, n=n, train_version=6, abandoned=[[5, 5]], num_loss_tokens=60, **fields)


def served(tally: Tally) -> dict[str, float]:
    """``NAME{label values}`` -> value."""
    samples = [one for family in TrainerCollector(tally).collect() for one in family.samples]
    return {f"{one.name}{''.join(f' {value}' for value in one.labels.values())}": one.value for one in samples}


def test_sums_grow_with_each_batch() -> None:
    tally = Tally()
    tally.commit(batch(1))
    tally.commit(batch(2))

    found = served(tally)

    assert found["penstock_trainer_batches_total"] == 2
    assert found["penstock_trainer_samples_total"] == 8
    assert found["penstock_trainer_generated_tokens_total"] == 200
    assert found["penstock_trainer_loss_tokens_total"] == 120
    assert found["penstock_trainer_batch"] == 2


def test_tokens_of_answers_that_were_given_were_not_drawn() -> None:
    tally = Tally()
    tally.commit(make_manifest([row(0, 0, 10, 6), row(0, 1, 7, 6, status="given")], num_loss_tokens=17))
    found = served(tally)
    assert found["penstock_trainer_generated_tokens_total"] == 10
    assert found["penstock_trainer_loss_tokens_total"] == 17, "they bear loss"


def test_staleness_counts_versions_of_the_living_lineage_and_tokens_that_bear_loss() -> None:
    tally = Tally()
    tally.commit(batch(1))

    found = served(tally)

    assert found["penstock_trainer_staleness_versions_bucket 0"] == 2
    assert found["penstock_trainer_staleness_versions_bucket 1"] == 3, "one version between is abandoned"
    assert found["penstock_trainer_staleness_versions_bucket +Inf"] == 3, "a sample without loss is of no age"


def test_figures_of_the_last_batch_have_the_names_of_slime() -> None:
    tally = Tally()
    tally.commit(batch(1))

    found = served(tally)

    lengths = {kind: found[f"rollout_response_len_{kind}"] for kind in ("mean", "median", "max", "min")}
    assert lengths == {"mean": 25, "median": 25, "max": 40, "min": 10}
    assert found["rollout_truncated_ratio"] == 0.25
    assert found["rollout_raw_reward"] == 0.75
    assert found["rollout_zero_std_count 1.0"] == 1, "the group whose samples have one reward"


def test_what_filters_dropped_between_two_batches_is_told_by_reason() -> None:
    def ledger(count: int) -> dict[str, Any]:
        totals = {"dropped": {"filter/all_wrong": count, "stale": 1}, "raised": 0}
        return totals | {"rejected_samples": 0, "rejected_reward": 0.0, "aged_samples": 0, "aged_tokens": 0}

    tally = Tally()
    tally.commit(batch(1, ledger=ledger(1)))
    tally.commit(batch(2, ledger=ledger(4)))

    assert served(tally)["rollout_dynamic_filter_drop all_wrong"] == 3


def test_waits_publications_reports_and_evaluations_are_told() -> None:
    tally = Tally()
    with tally.waiting("batch"):
        pass
    tally.publish(1000, 2.0, 0.5)
    tally.report({"loss": 0.5, "name": "actor", "norm": float("nan")})
    tally.evaluate([{"dataset": "d", "version": v, "accuracy": v / 10, "truncated_ratio": 0.0} for v in (3, 2)])
    tally.evaluate([{"dataset": "e", "version": 3, "accuracy": 0.5, "pass@1": 0.5, "pass@16": 0.75}])

    found = served(tally)

    assert found["penstock_trainer_wait_seconds_total batch"] > 0
    assert found["penstock_trainer_wait_seconds_total ranks"] == 0
    assert found["penstock_trainer_published_bytes_total"] == 1000
    assert found["perf_update_weights_time"] == 2.5
    assert found["penstock_trainer_reported loss"] == 0.5
    assert "penstock_trainer_reported norm" not in found
    assert found["eval d"] == pytest.approx(0.3), "the newest version"
    assert found["penstock_trainer_evaluated_version d"] == 3
    assert found["eval_pass_at e 16"] == 0.75
    assert "eval_pass_at d 1" not in found


def test_a_row_of_an_evaluation_that_is_no_number_hurts_nobody() -> None:
    tally = Tally()
    tally.evaluate([{"dataset": "d", "version": "3", "accuracy": "x"}, {"dataset": "d", "version": 4}])

    assert served(tally)["penstock_trainer_evaluated_version d"] == 4
