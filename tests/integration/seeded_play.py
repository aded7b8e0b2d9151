"""A small run on a server that draws by seeds: the tokens of every sample, in the order of the ids."""

from pathlib import Path
from typing import Any

import redis

from penstock.config import ModelConfig
from penstock.keys import Keys
from penstock.messages import Publication
from tests.integration import worker_play
from tests.integration.worker_play import admit, all_in, job, publish, read_group, tended, until, working

NUM_JOBS = 8
NEW_TOKENS = 48


async def draw(
    client: redis.Redis,
    url: str,
    keys: Keys,
    model: ModelConfig,
    publication: Publication,
    folder: Path,
    *,
    engine_url: str,
    seed: int,
    **sections: dict[str, Any],
) -> list[list[int]]:
    """Draw two answers to each of 8 prompts under ``seed``; ``keys`` are those of a run of its own."""
    rollout = {"sampling": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}}
    sections["rollout"] = rollout | sections.get("rollout", {})
    config = worker_play.make_config(url, keys, model, folder, engine={"url": engine_url}, **sections)
    publish(client, keys, publication)
    prompts = [[5, 6, 7, 8 + i % 3, 9 + i] for i in range(NUM_JOBS)]
    jobs = admit(client, keys, [job(i, prompt=None, prompt_ids=prompt) for i, prompt in enumerate(prompts)])
    async with tended(client, keys, lease_ms=60_000), working(config.model_copy(update={"seed": seed})) as worker:
        await until(all_in(client, keys, jobs, "ready"), limit_s=150)
        assert worker.services.engine.deterministic
    return [payload.tokens.tolist() for name in jobs for _, payload in read_group(client, keys, name)]
