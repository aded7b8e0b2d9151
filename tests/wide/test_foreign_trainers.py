"""An optimizer step inside verl and inside TRL, each a real process in its own environment, on a real SGLang server."""

from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.records.keys import Keys
from tests.wide.foreign import PROCESS_S, _adapters, config, run_inside

__all__ = ["_adapters", "config"]

pytestmark = [pytest.mark.engine, pytest.mark.timeout(PROCESS_S + 60)]


def test_verl_takes_a_step_on_generated_sequences_and_draws_from_the_new_weights(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    found = run_inside("tests.adapters.verl_step", config, client, keys, tmp_path, groups=10)
    first, second = found["first"], found["second"]
    assert first["shapes"] == {
        "prompts": [9, 6], "responses": [9, 12], "response_mask": [9, 12], "rollout_log_probs": [9, 12],
        "rollout_versions": [9, 12], "rm_scores": [9, 12], "input_ids": [9, 18], "attention_mask": [9, 18],
        "position_ids": [9, 18], "old_log_probs": [9, 12], "advantages": [9, 12],
    }  # fmt: skip
    assert first["prompts"][::3] == [[0, 0, 0, 2, 3, 4], [0, 5, 6, 7, 8, 9], [0, 0, 0, 0, 12, 13]]
    assert first["uid"] == [f"u0-{i}" for i in range(3) for _ in range(3)]
    assert first["positions_as_verl"]
    assert first["rewards"] == [total % 10 for total in first["sums"]], "rm_scores are what the run's reward gave"
    # T6: verl's own pass over its own padding, at the temperature it was handed, gives what the engine drew with.
    assert first["difference"] < 2e-3
    assert found["temperature"] == 0.8
    assert "meta_info names temperature 1, but this VerlRollout samples at 0.8" in found["named"]
    assert found["fed"]["temperature"] == 0.7
    assert "sampled at temperature 0.7, but actor_rollout_ref.rollout.temperature is 1" in found["fed"]["other"]
    assert "temperature" in found["fed"]["union"], "verl itself sees that its loop names another one"
    assert first["versions"] == [1]
    # compute_log_prob: the engine scores what it drew as it drew it.
    assert found["scored"]["shape"] == [9, 12]
    assert found["scored"]["versions"] == [1]
    assert found["scored"]["difference"] < 2e-3
    assert found["metrics"]["grad_norm"] > 0
    assert found["moved"] > 0.1
    # The second rollout is of the weights that the step made: they were far from the first ones.
    assert found["version"] == 2
    assert second["versions"] == [2]
    assert second["difference"] < 2e-3
    greedy = found["greedy"]
    assert greedy[0] == greedy[1] == greedy[2]


def test_trl_trains_two_steps_by_its_rollout_func(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    found = run_inside("tests.adapters.trl_step", config, client, keys, tmp_path, groups=6)
    assert found["steps"] == 2
    assert [set(call["penstock_version"]) for call in found["calls"]] == [{1}, {2}], "published before each rollout"
    for call in found["calls"]:
        assert len(call["prompts"]) == 12
        # T6: of the weights that TRL holds at that step.
        assert call["difference"] < 2e-3
    rewards = [sum(call["penstock_reward"]) / 12 for call in found["calls"]]
    logged = [entry["reward"] for entry in found["log"] if "reward" in entry]
    assert logged == pytest.approx(rewards, rel=1e-3)
    assert found["moved"] > 1e-3
