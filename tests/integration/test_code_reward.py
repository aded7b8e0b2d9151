"""Reward ``code`` as a worker computes it: in processes of its own, in the jail that this machine has."""

import asyncio
import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, RewardConfig
from penstock.console.cli.check import look_at_jail
from penstock.console.launch.preflight import check_extras, runs_programs, steps
from penstock.errors import ConfigError, RewardError
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards.jail.detect import check_jail
from penstock.workers.rewards.score import Rewards
from tests.integration.worker_play import until
from tests.missing import need_jail

pytestmark = pytest.mark.usefixtures("jail")

SUMS = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]})
ADD = json.dumps({"inputs": [[1, 2], [30, 4]], "outputs": [3, 34], "fn_name": "add"})
RIGHT = "Like this:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```"


@pytest.fixture(scope="module")
def jail() -> None:
    need_jail()


def sample(text: str, label: str) -> Sample:
    made = Sample(Job("sums/0/0", 1, label=label), 0)
    made.text = text
    return made


async def scored(rewards: Rewards, text: str, label: str = SUMS) -> tuple[float, dict[str, Any]]:
    made = sample(text, label)
    await rewards.score(made)
    assert made.reward is not None
    return made.reward, made.reward_info


def settings(**code: Any) -> RewardConfig:
    return RewardConfig(function="code", code={"test_s": 2.0, "total_s": 100.0, **code}, timeout_s=300.0)


async def test_T11_answers_are_worth_what_their_programs_do() -> None:
    rewards = Rewards(settings())
    assert await scored(rewards, RIGHT) == (1.0, {"passed": 2, "tests": 2})
    assert await scored(rewards, "def add(a, b): return a + b", ADD) == (1.0, {"passed": 2, "tests": 2})
    found, info = await scored(rewards, "print(3)")
    assert (found, info["failed"]) == (0.0, {"test": 1, "why": "wrong_output"})
    found, info = await scored(rewards, "while True: pass")
    assert (found, info["failed"]) == (0.0, {"test": 0, "why": "out_of_time"})
    found, info = await scored(rewards, "import penstock")
    assert (found, "No module named 'penstock'" in info["failed"]["said"]) == (0.0, True)
    # What is wanted is nowhere in there: not in memory, nor in the program's own file.
    search = "import gc\nprint([one for one in gc.get_objects() if isinstance(one, dict) and 'outputs' in one][0])"
    assert (await scored(rewards, search))[0] == 0.0
    forged = "import os\nos.write(1, b'[true]'); os.write(2, b'ready'); os._exit(0)"
    assert (await scored(rewards, forged, ADD))[0] == 0.0
    lines = json.dumps(["assert add(1, 2) == 3", "assert add(2, 2) in (4, 5)"])
    assert await scored(rewards, "def add(a, b): return a + b", lines) == (1.0, {"passed": 2, "tests": 2})
    equal = "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()"
    for forged in (equal, "def add(a, b): raise SystemExit(0)", "import os\nos._exit(0)"):
        assert (await scored(rewards, forged, lines))[1]["failed"]["test"] == 0
    with pytest.raises(RewardError, match="the label '7' is not a map") as caught:
        await rewards.score(sample(RIGHT, "7"))
    assert caught.value.outcome == "reward_raised"
    await rewards.close()


async def test_what_is_asked_for_no_more_is_ended_with_all_that_it_started() -> None:
    rewards = Rewards(settings(test_s=90.0))
    mark = uuid.uuid4().hex
    hangs = (
        f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1e6)', '{mark}'])"
    )
    task = asyncio.create_task(scored(rewards, hangs))
    await until(lambda: running(mark) or task.done(), "it runs", limit_s=300)
    assert not task.done(), task.result()
    task.cancel()
    await until(lambda: not running(mark), "it is gone", limit_s=300)
    await rewards.close()


def running(mark: str) -> list[str]:
    """Processes with this word in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                found += [folder.name] if (folder / "cmdline").read_bytes().endswith(mark.encode() + b"\0") else []
            except OSError:
                continue
    return found


def test_a_start_says_which_jail_there_is_and_refuses_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(**reward: Any) -> Config:
        data = {"train": [{"name": "sums", "path": str(tmp_path / "sums.jsonl")}]}
        return Config.model_validate({"run": "r", "directory": tmp_path, "model": {"path": "m"}, "data": data,
                                      "reward": reward})  # fmt: skip

    assert not runs_programs(make())
    config = make(function="code")
    assert "jail" in [what for what, _ in steps(config)]
    (found,) = look_at_jail(config)
    assert (found.level, found.found.partition(":")[0]) in [("ok", "bwrap"), ("ok", "filters")]
    assert check_jail(config.reward) == found.found
    assert "jail" not in [what for what, _ in steps(make())]
    (found,) = look_at_jail(make(function="code", jail={"kind": "none"}))
    assert (found.level, found.found) == ("warning", "none: programs of answers may do what this user may")
    check_extras(config, ["trainer"])

    monkeypatch.setenv("PATH", "/nowhere")
    demanding = make(function="code", jail={"kind": "bwrap"})
    (found,) = look_at_jail(demanding)
    assert (found.level, "the program bwrap is not installed" in found.found) == ("error", True)
    with pytest.raises(ConfigError, match="no jail for programs of answers holds on this machine"):
        Rewards(demanding.reward)
