"""TRL's GRPOTrainer in two processes, started by accelerate, on a real SGLang server."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.protocol.audit import audit
from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.parts import buffering, until
from tests.wide.foreign import PROCESS_S, PYTHON, _adapters, config, working

__all__ = ["_adapters", "config"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3 * PROCESS_S)]

#: As docs/adapters.md; without MPI, accelerate starts several processes on CPU only by its launcher for GPUs.
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]


@contextlib.contextmanager
def training(config: Config, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    settings = folder / "config.json"
    settings.write_text(config.model_dump_json())
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    command = [PYTHON, *LAUNCH, "--main_process_port", "0", "--module", "tests.adapters.trl_processes"]
    with (folder / "trl.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, str(settings), str(folder / "out")],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trained(config: Config, folder: Path) -> list[dict[str, Any]]:
    with training(config, folder) as process:
        assert process.wait(PROCESS_S) == 0, (folder / "trl.log").read_text()[-6000:]
    return [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(2)]


def check(found: list[dict[str, Any]], version: int) -> None:
    """One step, each process with a share of its own, all of them with the same weights after it."""
    assert [one["processes"] for one in found] == [2, 2]
    assert [one["steps"] for one in found] == [1, 1]
    assert found[0]["moved"] > 1e-3
    assert found[0]["sum"] == pytest.approx(found[1]["sum"], rel=1e-12)
    [first], [second] = (one["calls"] for one in found)
    assert [len(call["prompts"]) for call in (first, second)] == [8, 8]
    assert sorted({*first["prompts"], *second["prompts"]}) == ["ab", "cde", "f", "gh"], "nothing twice, all of them"
    assert not {*first["prompts"]} & {*second["prompts"]}
    for call in (first, second):
        lengths = [len(prompt) for prompt in call["prompts"]]
        assert [len(ids) for ids in call["prompt_ids"]] == lengths, "each has the answers to its own"
        assert set(call["penstock_version"]) == {version}


def test_each_process_has_its_own_share_and_nothing_comes_twice(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    with buffering(config), working(config, tmp_path):
        check(trained(config, tmp_path), 1)
        until(lambda: play.counter(client, keys, "retired") == play.counter(client, keys, "admitted") == 4)
    assert audit(client, keys).ok


def test_I4_a_process_that_is_killed_ends_the_others_and_the_next_start_asks_anew(
    config: Config, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    with buffering(config):
        with training(config, tmp_path) as process:
            until(lambda: play.counter(client, keys, "admitted") == 4 or process.poll() is not None, "prompts to wait")
            assert process.poll() is None, (tmp_path / "trl.log").read_text()[-6000:]
            pids = [int((tmp_path / f"out.{rank}.pid").read_text()) for rank in range(2)]
            os.kill(pids[1], signal.SIGKILL)
            assert process.wait(PROCESS_S) != 0
            for pid in pids:
                until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the process to be gone")
        assert not list(tmp_path.glob("out.*.json"))
        with working(config, tmp_path):
            check(trained(config, tmp_path), 2)
            until(lambda: play.counter(client, keys, "admitted") == 8)
    assert audit(client, keys).ok
