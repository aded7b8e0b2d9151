"""rollout.name=penstock in verl's own registries, and the server behind it; the worker's part is played."""

import json
import os
import subprocess
import threading
from pathlib import Path

import redis

from penstock.config.load import save_resolved
from penstock.protocol.audit import audit
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import Player, buffering, make_config, until
from tests.wide.foreign import PROCESS_S, PYTHON, _adapters

__all__ = ["_adapters"]


def answer(worker: Player, stop: threading.Event) -> None:
    """The prompt's token + 1 and + 2, the label's length as reward; a prompt of 40 is never answered."""
    while not stop.wait(0.05):
        for held in worker.lease(8, version=worker.clock):
            job = Job.from_bytes(held.body)
            assert job.prompt_ids is not None
            first = job.prompt_ids[0]
            if first == 40:
                continue
            sample = Sample(job, 0)
            sample.append(job.prompt_ids)
            sample.prompt_length = 1
            sample.append([first + 1, first + 2], version=worker.clock, logprobs=[-0.5, -0.25])
            sample.status, sample.finish_reason, sample.reward = "completed", "stop", float(len(job.label))
            worker.commit(held, [sample], worker.clock, temperature=job.sampling["temperature"])


def test_the_name_is_in_verls_registries_and_its_server_answers_agent_loops(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, models: list[Path], tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    save_resolved(config, tmp_path / "run.yaml")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")} | {
        "PYTHONPATH": os.getcwd(),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    module, out = "tests.adapters.verl_server_calls", tmp_path / "out.json"
    command = [PYTHON, "-m", module, str(tmp_path / "run.yaml"), str(models[0]), str(out)]
    stop = threading.Event()
    worker = threading.Thread(target=answer, args=(Player(client, keys), stop))
    with buffering(config):
        worker.start()
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=PROCESS_S, check=False
            )
        finally:
            stop.set()
            worker.join()
        assert done.returncode == 0, done.stderr[-6000:]
        until(lambda: play.counter(client, keys, "retired") == 7)
    assert audit(client, keys).ok
    found = json.loads(out.read_text())
    assert (found["replica"], found["adapter"]) == ("PenstockReplica", "PenstockAdapter")
    assert (found["where"], found["version"], found["again"]) == ("penstock-0", 1, 2)
    for i, one in enumerate(found["answers"]):
        first = 9 if i == 4 else 2 + i
        assert (one["ids"], one["log_probs"], one["stop"]) == ([first + 1, first + 2], [-0.5, -0.25], "completed")
        assert one["fields"]["penstock_reward"] == (0 if i == 4 else 2)
        assert (one["fields"]["min_global_steps"], one["fields"]["max_global_steps"]) == (0, 0)
    assert (found["aborted"]["ids"], found["aborted"]["stop"]) == ([], "aborted")
    assert found["after"]["fields"]["global_steps"] == 1
    assert "carries text alone" in found["image"]
    assert found["lanes"] == ["train", "eval", "eval"]
    assert "set trainer.use_v1=False" in found["newer"]
