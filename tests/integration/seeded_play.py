"""Small runs on a server that draws by seeds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from penstock.config import ModelConfig
from penstock.protocol.scripts import ensure_lanes
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from tests.integration import worker_play
from tests.integration.worker_play import admit, all_in, job, publish, read_group, tended, until, working

NUM_JOBS = 8
NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class SeededRuns:
    """Runs on one server, each under a name of its own."""

    client: redis.Redis
    redis_url: str
    keys: Keys
    model: ModelConfig
    publication: Publication
    engine_url: str
    folder: Path

    def keys_of(self, run: str) -> Keys:
        return Keys(f"{self.keys.run}-{run}")

    async def draw(self, run: str, seed: int, **sections: dict[str, Any]) -> list[list[int]]:
        """Tokens of two answers to each of 8 prompts, in the order of the ids; ``sections``: the configuration's."""
        keys, client = self.keys_of(run), self.client
        rollout = {"sampling": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}}
        sections["rollout"] = rollout | sections.get("rollout", {})
        config = worker_play.make_config(
            self.redis_url, keys, self.model, self.folder / run, engine={"url": self.engine_url}, **sections
        )
        ensure_lanes(client, keys)
        publish(client, keys, self.publication)
        prompts = [[5, 6, 7, 8 + i % 3, 9 + i] for i in range(NUM_JOBS)]
        jobs = admit(client, keys, [job(i, prompt=None, prompt_ids=prompt) for i, prompt in enumerate(prompts)])
        async with tended(client, keys, lease_ms=60_000), working(config.model_copy(update={"seed": seed})) as worker:
            await until(all_in(client, keys, jobs, "ready"))
            assert worker.services.engine.info.deterministic
        return [payload.tokens.tolist() for name in jobs for _, payload in read_group(client, keys, name)]

    async def assert_seeds_decide(self) -> list[list[int]]:
        """The same seed draws the same, whatever runs beside it and is computed at once; another one, others."""
        first = await self.draw("first", 7)
        assert await self.draw("alone", 7, worker={"slots": 2}) == first
        other = await self.draw("other", 8)
        assert not any(a == b for a, b in zip(other, first, strict=True))
        assert len({tuple(tokens) for tokens in first}) == len(first) == 2 * NUM_JOBS, "answers of a group differ too"
        return first
