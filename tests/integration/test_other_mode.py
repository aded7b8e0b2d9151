"""Another staleness.mode on a live subscription is refused: its groups were admitted for the one it has."""

import itertools
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.part_processes import StartPart, start_part
from tests.integration.parts import Player, make_config, publish, step, until

__all__ = ["start_part"]

MODES = {"sync": 0, "one_step": 1, "async": 1}


def of_mode(url: str, keys: Keys, folder: Path, mode: str) -> Config:
    prompts = folder / "train.jsonl"
    prompts.write_text("".join(f'{{"prompt": "p{i}", "label": "x"}}\n' for i in range(100)))
    return make_config(url, keys.run, folder, staleness={"mode": mode, "bound": MODES[mode]})


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(MODES, 2)))
def test_T5_another_mode_is_refused_on_a_live_subscription_naming_both(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, before: str, after: str
) -> None:
    with Trainer(of_mode(redis_server.url, keys, tmp_path, before)) as trainer:
        publish(trainer)
    definition = client.hgetall(keys.sub("actor"))
    words = f"is of staleness.mode {before}, and is now asked for as {after}"
    with pytest.raises(ConfigError, match=words), Trainer(of_mode(redis_server.url, keys, tmp_path, after)):
        pass
    assert not client.exists(keys.owner("actor")), "nobody waits for who was refused"
    kept = client.hgetall(keys.sub("actor"))
    assert {name: kept[name] for name in (b"mode", b"sampler", b"bound", b"on_expiry")} == {
        name: definition[name] for name in (b"mode", b"sampler", b"bound", b"on_expiry")
    }
    with pytest.raises(ConfigError, match=words):
        run(client, scripts.subscribe(keys, "actor", {"mode": after}, operator=True))
    with Trainer(of_mode(redis_server.url, keys, tmp_path, before)) as trainer:
        assert trainer.position == 0


def test_T5_a_trainer_process_of_another_mode_ends_with_the_reason_and_nothing_is_dropped(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    tmp_path: Path,
    models: list[Path],
    start_part: StartPart,
) -> None:
    """Groups are drawn, half of them committed; the buffer and the producer run on in the mode of before."""
    config = of_mode(redis_server.url, keys, tmp_path, "async")
    for part in ("buffer", "producer"):
        start_part(part, config)
    worker = Player(client, keys)
    with Trainer(config) as trainer:
        publish(trainer)
        until(lambda: play.counter(client, keys, "seq:train") == 4, "the gate to be filled")
        worker.work(3, 1)
        step(trainer)
    changed = of_mode(redis_server.url, keys, tmp_path, "sync")
    model = changed.model.model_copy(update={"path": str(models[0])})
    other = start_part("trainer", changed.model_copy(update={"model": model}), "other")
    assert other.process.wait(120) == 2
    assert "is of staleness.mode async, and is now asked for as sync" in other.text()
    assert "Traceback" not in other.text()
    assert [name for name in client.hkeys(keys.sub("actor")) if name.startswith(b"drop:")] == []
    with Trainer(config) as trainer:
        trainer.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 1})
        publish(trainer, 1)
        until(lambda: play.counter(client, keys, "seq:train") > 4, "the gate to open")
        worker.work(1, 3)
        assert len(step(trainer).all_rows) == 4, "a whole batch"
    assert audit(client, keys).ok
