"""The last evaluation of a run goes on where it was, however often its trainer ends; a run that is over stays over.

Producer, buffer, worker and trainer are processes of their own, Redis is real, the engine is played.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.protocol.audit import audit
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.part_processes import PartProcess, StartPart, start_part
from tests.integration.parts import until
from tests.integration.storage_rig import fake_in_a_thread
from tests.integration.worker_play import make_config

__all__ = ["start_part"]

NUM_PROMPTS = 4


def versions(client: redis.Redis, keys: Keys) -> list[int]:
    entries = client.xrange(keys.weights("policy"))
    return [Publication.from_bytes(fields[b"p"], "publication").version for _, fields in entries]


def evaluations(client: redis.Redis, keys: Keys) -> set[str]:
    return {name.decode() for name in client.hkeys(keys.source) if name.startswith(b"eval@")}


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Callable[..., Config]:
    """Makes configurations of this test's run."""
    for name, count in (("train", 100), ("held", NUM_PROMPTS)):
        lines = [json.dumps({"prompt": f"{name[0]}{i}=", "label": "x"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    def config(engine: str, reward: str | None = None, **data: Any) -> Config:
        train = [{"name": "d", "path": str(tmp_path / "train.jsonl"), "shuffle": False}]
        held = [{"name": "held", "path": str(tmp_path / "held.jsonl"), "shuffle": False, "reward": reward}]
        return make_config(
            redis_server.url,
            keys,
            model_config,
            tmp_path / "runs",
            data={"train": train, "eval": held, **data},
            staleness={"mode": "async", "bound": 4},
            trainer={"batch_groups": 2, "keep_versions": 2, "steps": 2, "num_threads": 1},
            worker={"lease_s": 30.0, "heartbeat_s": 1.0},
            engine={"url": engine},
            buffer={"lease_s": 5.0},
        )

    return config


def wait_for_exit(trainer: PartProcess) -> int:
    return int(trainer.process.wait(240))


@pytest.mark.timeout(600)
def test_I4_the_last_evaluation_goes_on_where_it_was_and_a_finished_run_stays_finished(
    redis_server: RedisServer, keys: Keys, make: Callable[..., Config], tmp_path: Path, start_part: StartPart
) -> None:
    with fake_in_a_thread() as fake, connect(redis_server.url) as client:
        # Half of the last evaluation is drawn, the rest is held.
        fake.held = ("held/3/2/", "held/3/3/")
        for part in ("buffer", "producer", "worker"):
            start_part(part, make(fake.url))
        first = start_part("trainer", make(fake.url), "first")

        def half_is_drawn() -> bool:
            assert first.process.poll() is None, first.text()
            return [play.state(client, keys, f"held/3/{i}") for i in range(2)] == ["ready"] * 2

        until(half_is_drawn, first.text(), 240)
        assert (versions(client, keys), evaluations(client, keys)) == ([1, 2, 3], {"eval@1", "eval@3"})
        first.kill()

        third = start_part("trainer", make(fake.url), "third")
        until(lambda: "restored step 2 from" in third.text(), third.text(), 240)
        third.signal(15)
        assert wait_for_exit(third) == 130, third.text()

        fourth = start_part("trainer", make(fake.url), "fourth")
        until(lambda: "restored step 2 from" in fourth.text(), fourth.text(), 240)
        fake.let_go()
        assert wait_for_exit(fourth) == 0, fourth.text()
        rows = (tmp_path / "runs" / keys.run / "eval.jsonl").read_text()
        found = [(row["version"], row["num"], row["asked_share"]) for row in map(json.loads, rows.splitlines())]
        assert found == [(1, NUM_PROMPTS, found[0][2]), (3, NUM_PROMPTS, 1.0)]

        again = start_part("trainer", make(fake.url), "again")
        assert wait_for_exit(again) == 0, again.text()
        assert (tmp_path / "runs" / keys.run / "eval.jsonl").read_text() == rows
        assert (versions(client, keys), evaluations(client, keys)) == ([1, 2, 3], {"eval@1", "eval@3"})
        assert audit(client, keys).ok


@pytest.mark.timeout(600)
def test_I8_an_evaluation_of_which_nothing_is_answered_ends_a_run_in_words(
    redis_server: RedisServer, keys: Keys, make: Callable[..., Config], start_part: StartPart
) -> None:
    with fake_in_a_thread() as fake, connect(redis_server.url) as client:
        config = make(fake.url, "tests.integration.worker_parts:raises")
        for part in ("buffer", "producer", "worker"):
            start_part(part, config)
        trainer = start_part("trainer", config)
        assert wait_for_exit(trainer) == 1, trainer.text()
        assert "Version 3 will get no accuracy on held: no prompt was answered" in trainer.text()
        assert "Version 1 will get no accuracy on held" in trainer.text()
        assert client.xlen(keys.dead) == 2 * NUM_PROMPTS
