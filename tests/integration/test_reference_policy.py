"""A reference policy that a real engine serves: how far the policy is from it is what transformers says, end to end."""

from pathlib import Path

import numpy as np
import pytest
import redis
import torch

from penstock.config import ModelConfig, TrainerConfig
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.trainer import Trainer
from penstock.names import REFERENCE_LOGPROBS
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.batch_factory import logprobs_of
from tests.integration import oracle
from tests.integration.parts import buffering
from tests.integration.worker_play import admit, all_in, job, make_config, presence, publish, until, working

#: k3 of log-probabilities that differ by what SGLang's kernels and torch's round otherwise, 1e-3 at the most.
NOTHING = 1e-6


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_T6_the_kl_to_a_served_reference_is_nothing_at_first_and_then_what_transformers_says(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    model_config: ModelConfig,
    publications: list[Publication],
    engine_url: str,
    tmp_path: Path,
) -> None:
    """The reference is the policy of step 0: the server that draws is asked for both."""
    reference = {"name": "first", "url": engine_url, "path": str(models[2]), "timeout_s": 600.0, "max_attempts": 1}
    config = make_config(
        redis_server.url,
        keys,
        model_config,
        tmp_path,
        engine={"url": engine_url},
        rollout={"reference": reference},
        reward={"function": "tests.integration.worker_parts:token_sum"},  # answers of a group differ, so weights change
        trainer={"batch_groups": 4},
    )
    publish(client, keys, publications[2])
    with buffering(config), Trainer(config) as trainer:
        jobs = admit(client, keys, [job(i, not_before=2) for i in range(4)])
        async with working(config):
            await until(lambda: presence(client, keys)["state"] == "serving")
            await until(all_in(client, keys, jobs, "ready"))
        batch = trainer.next(timeout=60)
        data = batch.padded()
        policy, first = oracle.load_model(models[2]), oracle.load_model(models[2])
        drawn = data["loss_mask"].bool()

        def said_by(model: torch.nn.Module) -> torch.Tensor:
            """[loss tokens] log-probability of each."""
            found = torch.zeros(drawn.shape, dtype=torch.float64)
            with torch.no_grad():
                for row, one in enumerate(batch.all_rows):
                    found[row, : one.length] = logprobs_of(model, data["tokens"][row, : one.length].tolist(), 1.0)
            return found[drawn]

        wanted = said_by(first)
        np.testing.assert_allclose(data[REFERENCE_LOGPROBS][drawn], wanted, atol=1e-3)

        settings = {"lr": 0.5, "warmup_steps": 0, "kl": {"weight": 0.1, "estimator": "k3"}}
        in_loss = TrainerConfig.model_validate(settings)
        learner = GRPO(policy, torch.optim.SGD(policy.parameters(), lr=0.5), in_loss)
        assert abs(learner.step(batch)["ref_kl"]) < NOTHING

        # The same tokens, after the update of the first step.
        away = wanted - said_by(policy)
        expected = float((away.exp() - 1 - away).mean())
        assert expected > 1000 * NOTHING
        assert learner.step(batch)["ref_kl"] == pytest.approx(expected, rel=0.02)

        # As a part of the reward it is of the policy that drew: the first one.
        in_reward = TrainerConfig.model_validate(settings | {"kl": {"weight": 0.1, "place": "reward"}})
        assert abs(GRPO(policy, torch.optim.SGD(policy.parameters()), in_reward).step(batch)["ref_kl"]) < NOTHING
