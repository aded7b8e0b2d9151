"""The loop of the README, without the reference trainer: every view shows what it trains."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import redis
import torch
import yaml
from starlette.testclient import TestClient

from penstock.config import Config
from penstock.config.subscription import ASKED
from penstock.console.cli.main import execute
from penstock.console.launch.observer import queue_row
from penstock.console.web.app import make_app
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.adapters.rollout_manager import RolloutManager
from penstock.consumers.grpo.rows import Rows, of_steps, read_rows
from penstock.consumers.trainer import Trainer
from penstock.errors import WaitTimeout
from penstock.protocol.snapshot import snapshot
from penstock.records.causes import GroupsMissing
from penstock.records.keys import Keys
from penstock.redis.saved_config import keep_config
from penstock.redis.server import RedisServer, write_address
from tests.integration import play
from tests.integration.docs_blocks import blocks
from tests.integration.parts import PATIENCE_S, Player, beside, buffering, make_config, producing, until_waits

#: Versions that the loop publishes; PENSTOCK_TEST_OWN_LOOP_VERSIONS names another number.
VERSIONS = int(os.environ.get("PENSTOCK_TEST_OWN_LOOP_VERSIONS", "12"))


class Enough(Exception):
    """End the loop, which has no end of its own."""


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    """Two groups per batch, and two prompts that are evaluated at every tenth version."""
    (tmp_path / "held.jsonl").write_text('{"prompt": "h0", "label": "x"}\n{"prompt": "h1", "label": "x"}\n')
    data = {
        "train": [{"name": "d", "path": str(tmp_path / "train.jsonl"), "shuffle": False}],
        "eval": [{"name": "held", "path": str(tmp_path / "held.jsonl")}],
        "eval_every": 10,
    }
    made = make_config(redis_server.url, keys.run, tmp_path, data=data)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    made.run_dir.mkdir(parents=True)
    keep_config(made, tmp_path / "run.yaml", replace=True)
    write_address(made.run_dir, redis_server.url)
    return made


def answering(client: redis.Redis, keys: Keys) -> Callable[[Event], None]:
    """A worker that answers every job under the newest version until its event is set."""

    def work(ended: Event) -> None:
        player = Player(client, keys)
        while not ended.wait(0.001):
            if version := player.clock:
                for held in player.lease(8, version=version):
                    player.answer(held, [version])

    return work


def run_the_readmes_loop(folder: Path, monkeypatch: pytest.MonkeyPatch, versions: int) -> list[dict[str, Any]]:
    """Execute the block of the README until it has published ``versions`` more versions; the data of each step."""
    (page,) = (one for one in blocks() if one.key.startswith("README.md: from penstock import Trainer"))
    seen: list[dict[str, Any]] = []

    def checkpoint(state: dict[str, Any]) -> None:
        (folder / "state.json").write_text(json.dumps(state))
        if len(seen) == versions:
            raise Enough

    def restore() -> dict[str, Any] | None:
        path = folder / "state.json"
        state: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return state

    names = {"rank": 0, "world": 1, "num_batches": math.inf, "model": {"weight": torch.zeros(1)}, "step": seen.append}
    monkeypatch.chdir(folder)
    with pytest.raises(Enough):
        exec(compile(page.text, page.page, "exec"), {**names, "restore": restore, "checkpoint": checkpoint})
    return seen


class Views:
    """What a person sees of a run."""

    def __init__(self, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
        self.config = config
        self._capsys = capsys
        self._page = TestClient(make_app(config.directory), base_url="http://localhost:8420")

    def cli(self, *command: str) -> Any:
        """What a verb prints with ``--json``."""
        self._capsys.readouterr()
        assert execute([*command, "--run", self.config.run, "--redis", str(self.config.redis.url), "--json"]) == 0
        return json.loads(self._capsys.readouterr().out)

    def page(self, path: str) -> Any:
        answer = self._page.get(f"/api/runs/{self.config.run}/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def rows(self) -> Rows:
        return read_rows(self.config.run_dir)


def test_every_view_shows_a_loop_of_ones_own(
    config: Config,
    client: redis.Redis,
    keys: Keys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    views = Views(config, capsys)
    with buffering(config), producing(config), beside(answering(client, keys)):
        seen = run_the_readmes_loop(tmp_path, monkeypatch, VERSIONS)
        rows = views.rows().steps
        assert [row["step"] for row in rows] == [row["batch"] for row in rows] == list(range(1, VERSIONS + 1))
        assert [row["version"] for row in rows] == list(range(1, VERSIONS + 1))
        assert [row["samples"] for row in rows] == [len(data["rewards"]) for data in seen]
        assert {row["reward_mean"] for row in rows} == {0.5}
        for key in ("wait_s", "step_s", "publish_s", "time_s", "staleness_mean", "staleness_max", "tokens"):
            assert all(isinstance(row[key], int | float) for row in rows), key
        assert all(row["publish_s"] > 0 for row in rows)

        status = views.cli("status")
        assert (status["step"], status["version"]) == (VERSIONS, VERSIONS + 1)
        (trainer,) = status["trainers"]
        assert (trainer["name"], trainer["step"], trainer["reward_mean"]) == ("actor", VERSIONS, 0.5)
        (listed,) = views.cli("trainers", "ls")
        assert (listed["step"], listed["cursor"], listed["wait_share"] is None) == (VERSIONS, VERSIONS, False)

        figures = views.page("overview")["figures"]
        assert (figures["step"], figures["version"]) == (VERSIONS, VERSIONS + 1)
        assert (figures["reward"], figures["staleness_mean"] is None) == (0.5, False)
        assert figures["steps"] is None, "trainer.steps is of the reference trainer"
        points = {one["id"]: len(one["lines"][0]["value"]) for one in views.page("curves")["charts"]}
        for chart in ("reward", "staleness", "length", "masked", "time", "wait"):
            assert points[chart] == VERSIONS
    assert of_steps(config, views.rows())["samples"] == 4 * VERSIONS


def test_T15_a_step_that_comes_again_after_a_restore_has_one_row(
    config: Config,
    client: redis.Redis,
    keys: Keys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    views = Views(config, capsys)
    with buffering(config), producing(config), beside(answering(client, keys)):
        run_the_readmes_loop(tmp_path, monkeypatch, 4)
        state = json.loads((tmp_path / "state.json").read_text())
        # The last state_dict was returned, and never confirmed: the loop goes back to the one before.
        assert state["batch"] == 4
        (tmp_path / "state.json").write_text(json.dumps(state | {"batch": 3}))
        run_the_readmes_loop(tmp_path, monkeypatch, 3)
        rows = views.rows().steps
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        (again,) = (row for row in rows if row["step"] == 4)
        assert again["version"] == 4, "a batch keeps the version that it was cut for"
        assert views.cli("status")["step"] == 6


def test_a_trainer_with_prompts_of_its_own_is_shown_too(
    config: Config, client: redis.Redis, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the adapters of verl, TRL and slime's rollout function are: a batch is trained after its answers are read."""
    views, weights = Views(config, capsys), {"weight": torch.zeros(1)}
    with buffering(config), beside(answering(client, keys)):
        with Requests(config, name="mine") as requests:
            for step in range(1, 4):
                requests.publish(weights)
                groups = requests.answer([Request(prompt="2+2=", n=2), Request(prompt="3+3=", n=2)], timeout=PATIENCE_S)
                assert [len(group) for group in groups] == [2, 2]
                requests.report(loss=1.0 / step)
            with Requests(config, name="mine-validation", lane="eval") as validation:
                validation.answer([Request(prompt="h=", n=2)], timeout=PATIENCE_S)
        rows = views.rows().steps
        assert [(row["step"], row["trainer"], row["samples"]) for row in rows] == [(n, "mine", 4) for n in (1, 2, 3)]
        assert [row["loss"] for row in rows] == [1.0, 0.5, 1.0 / 3]
        assert [row["publish_s"] > 0 for row in rows] == [True, True, False], "the last batch was not published"
        assert all(row["wait_s"] > 0 for row in rows)
        status = views.cli("status")
        assert (status["trainer"], status["mode"], status["step"], status["version"]) == ("mine", ASKED, 3, 3)
        assert views.page("overview")["figures"]["reward"] == 0.5


def test_a_loop_shaped_as_slimes_is_shown_too(
    config: Config, client: redis.Redis, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    views, weights = Views(config, capsys), {"weight": torch.zeros(1)}
    with buffering(config), producing(config), beside(answering(client, keys)):
        with RolloutManager(config, prefetch=1) as manager:
            manager.load()
            manager.publish(weights, -1)
            for rollout_id in range(3):
                manager.generate(rollout_id)
                manager.report(loss=float(rollout_id))
                manager.publish(weights, rollout_id)
                manager.save(rollout_id)
        rows = views.rows().steps
        assert [(row["step"], row["loss"], row["publish_s"] > 0) for row in rows] == [
            (1, 0.0, True),
            (2, 1.0, True),
            (3, 2.0, True),
        ]
        assert views.cli("status")["step"] == 3


def test_groups_are_ready_in_each_view_as_the_buffer_counts_them(
    config: Config, client: redis.Redis, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations that are complete, and groups that a batch holds, are not ready to be trained."""
    views, player = Views(config, capsys), Player(client, keys)
    play.admit(client, keys, [play.job(i) for i in range(2)])
    with buffering(config), Trainer(config) as trainer:
        trainer.publish({"weight": torch.zeros(1)})
        player.work(2, 1)
        trainer.commit(trainer.next(timeout=PATIENCE_S))
        assert trainer.next_nowait() is None
        play.admit(client, keys, [play.job(i, dataset="held", epoch=1) for i in range(3)], lane="eval", source="eval")
        player.work(3, 1)
        until_waits(client, keys, "buffer:actor", GroupsMissing, have=0, size=2)

        status = views.cli("status")
        assert (status["ready"], status["ready_lanes"]["train"], status["ready_lanes"]["eval"]) == (0, 0, 3)
        assert status["kept"] == 5, "two are trained, and no checkpoint is past them"
        assert execute(["status", "--run", keys.run, "--redis", str(config.redis.url)]) == 0
        assert "groups ready 0, of lane eval 3, kept 5" in capsys.readouterr().out
        assert execute(["audit", "--run", keys.run, "--redis", str(config.redis.url)]) == 0
        said = capsys.readouterr().out
        assert "groups ready 0, of lane eval 3, kept 5" in said
        assert "kept 5, retired 0" in said, "the recount names what it counts as status does"
        recounted = views.cli("audit")
        assert (recounted["ready_lanes"], recounted["recount"]["kept"]) == (status["ready_lanes"], status["kept"])
        assert views.page("overview")["figures"]["ready"] == 0
        lanes = {one["lane"]: one["ready"] for one in views.page("lists/lanes")["rows"]}
        assert (lanes["train"], lanes["eval"]) == (0, 3)
        row = queue_row(snapshot(client, keys))
        assert (row["ready"], row["eval_ready"], row["queued"], row["step"]) == (0, 3, 0, 1)
        rows = views.cli("buffer", "ls", "--where", "state=ready")
        assert {one["lane"] for one in rows} == {"eval"}


def test_figures_reported_while_no_batch_is_there_are_of_the_last_step(
    config: Config, client: redis.Redis, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, player = {"weight": torch.zeros(1)}, Player(client, keys)
    with buffering(config), Trainer(config) as trainer:
        trainer.publish(weights)
        for n in (1, 2):
            play.admit(client, keys, [play.job(2 * n - 2 + i) for i in range(2)])
            player.work(2, 1)
            batch = trainer.next(timeout=PATIENCE_S)
            if n == 2:
                trainer.publish(weights)  # of batch 1
            trainer.commit(batch)
            assert trainer.next_nowait() is None
            trainer.report(loss=float(n))
    rows = read_rows(config.run_dir).steps
    assert [(row["step"], row["loss"], row["publish_s"] > 0) for row in rows] == [(1, 1.0, True), (2, 2.0, False)]


def test_figures_reported_after_a_call_that_timed_out_are_of_the_last_answers(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with buffering(config), Requests(config, name="mine") as requests:
        with beside(answering(client, keys)):
            requests.publish({"weight": torch.zeros(1)})
            requests.answer([Request(prompt="2+2=", n=2)], timeout=PATIENCE_S)
        with pytest.raises(WaitTimeout):
            requests.answer([Request(prompt="3+3=", n=2)], timeout=0.0)
        requests.report(loss=1.0)
        with beside(answering(client, keys)):
            requests.answer([Request(prompt="3+3=", n=2)], timeout=PATIENCE_S)
    rows = read_rows(config.run_dir).steps
    assert [(row["step"], row.get("loss")) for row in rows] == [(1, 1.0), (2, None)]
