"""The page's server over a run whose Redis answers: its parts are played by verbs."""

import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis
from starlette.testclient import TestClient

from penstock.console.cli.main import execute
from penstock.console.web.app import make_app
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.causes import UserWait
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer, write_address
from tests.integration import play
from tests.integration.parts import wait_record

HOSTILE = "<b>\x1b[31m\u202e\x00</script>"
TOKEN = "t0ken"


class Page:
    """The page's server, and what it answers of one run."""

    def __init__(self, directory: Path, run: str) -> None:
        self.run = run
        self.client = TestClient(make_app(directory, token=TOKEN), base_url="http://localhost:8420")

    def __call__(self, path: str, **parameters: Any) -> Any:
        answer = self.client.get(f"/api/runs/{self.run}/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def list(self, noun: str, **parameters: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self(f"lists/{noun}", **parameters)["rows"]
        return rows

    def post(self, path: str, wish: dict[str, Any]) -> Any:
        answer = self.client.post(f"/api/runs/{self.run}/{path}", json=wish, headers={"x-penstock-token": TOKEN})
        return answer.json() | {"status": answer.status_code}


@pytest.fixture
def page(redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path) -> Page:
    """A run with a job in each state, a worker, a trainer and a wait."""
    play.subscribe(client, keys, mode="async", size=2)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [*(play.job(i) for i in range(4)), Job(id="d/0/4", n=2, prompt=HOSTILE, label="x")])
    ready, buried, leased, delayed = play.lease(client, keys, "w1", most=4, version=1)
    play.commit(client, keys, ready, [0, 1], version=1)
    for held, tries, reason in ((buried, 0, "reward_raised"), (delayed, 3, "engine_error")):
        run(client, scripts.fail(keys, held.job, held.token, "w1", reason=reason, detail=f"Traceback\n{HOSTILE}",
                                 max_attempts=tries, retry_ms=10**6))  # fmt: skip
    assert leased.job == "d/0/2"
    now = float(client.time()[0])
    about = {"at": now, "state": "serving", "version": 1, "held": 1, "running": 2, "slots": 4, "tokens_per_s": 12.5}
    client.hset(keys.workers, "w1", pack({"name": "w1", **about}))
    client.hset(keys.trainers, "actor/0", pack({"name": "actor", "rank": 0, "at": now, "step": 3, "wait_share": 0.5}))
    client.hset(keys.waits, "producer", wait_record(UserWait(f"the gate {HOSTILE}"), now - 5, now))
    folder = tmp_path / "runs" / keys.run
    folder.mkdir(parents=True)
    write_address(folder, redis_server.url)
    return Page(tmp_path / "runs", keys.run)


def test_the_overview_of_a_live_run_is_what_its_parts_show(page: Page) -> None:
    seen = page("overview")
    assert (seen["live"], seen["silent"]) == (True, "")
    figures = seen["figures"]
    assert (figures["step"], figures["version"], figures["ready"], figures["dead"]) == (0, 1, 1, 1)
    assert (figures["tokens_per_s"], figures["trainer_wait"]) == (12.5, 0.5)
    parts = {one["id"]: one for one in seen["parts"]}
    assert (parts["workers"]["is"], parts["trainer"]["is"]) == ("well", "well")
    assert (parts["producer"]["is"], parts["buffer"]["is"]) == ("gone", "gone")
    assert ["train", "1 queued, 1 leased"] in parts["queue"]["facts"]
    (gate,) = [value for name, value in parts["producer"]["facts"] if name == "gate of actor"]
    assert gate.endswith("of 8 groups")
    assert seen["chains"][0]["links"][0]["what"] == str(UserWait(f"the gate {HOSTILE}"))
    edges = {one["from"]: one["depth"] for one in seen["edges"]}
    assert edges == {"producer": 1, "queue": 1, "workers": 1, "buffer": 0, "trainer": 0}


def test_lanes_have_depth_and_age(page: Page) -> None:
    lanes = {one["lane"]: one for one in page.list("lanes")}
    assert (lanes["train"]["queued"], lanes["train"]["leased"], lanes["train"]["paused"]) == (1, 1, False)
    assert 0 <= lanes["train"]["oldest_s"] < 600
    assert lanes["eval"]["oldest_s"] is None


def test_page_and_command_line_say_the_same(
    page: Page, capsys: pytest.CaptureFixture[str], redis_server: RedisServer
) -> None:
    target = ["--run", page.run, "--redis", redis_server.url, "--json"]
    for verb, noun, other in (("jobs", "jobs", ["--sort", "job"]), ("dead", "dead", []), ("weights", "weights", [])):
        assert execute([verb, "ls", *target, *other]) == 0
        told = json.loads(capsys.readouterr().out)
        shown = page.list(noun)
        assert [{**row, "age_s": 0} for row in shown] == [{**row, "age_s": 0} for row in told], noun


def test_jobs_are_filtered_and_opened(page: Page) -> None:
    assert [row["job"] for row in page.list("jobs", where="state=leased")] == ["d/0/2"]
    assert [row["job"] for row in page.list("jobs", limit=2)] == ["d/0/0", "d/0/1"]
    found = page("job", id="d/0/4")
    assert (found["state"], found["record"]["prompt"]) == ("queued", HOSTILE)
    assert len(page("job", id="d/0/0")["samples"]) == 2
    for unknown in ("d/0/99", "", HOSTILE, "x" * 5000):
        assert page.client.get(f"/api/runs/{page.run}/job", params={"id": unknown}).status_code == 404
    assert page.client.get(f"/api/runs/{page.run}/lists/cats").status_code == 404
    assert page.client.get(f"/api/runs/{page.run}/lists/jobs", params={"where": "cats=1"}).status_code == 400
    assert page.client.get(f"/api/runs/{page.run}/lists/jobs", params={"limit": "x"}).status_code == 400


def test_workers_and_groups_are_listed(page: Page) -> None:
    (worker,) = page.list("workers", where="state=serving")
    assert (worker["name"], worker["leased"], worker["slots"]) == ("w1", 1, 4)
    (group,) = page.list("groups")
    assert (group["job"], group["subscription"], group["state"]) == ("d/0/0", "actor", "ready")


def test_buried_jobs_are_queued_again_and_given_up(page: Page, client: redis.Redis, keys: Keys) -> None:
    done = page.post("dead", {"do": "requeue", "jobs": ["d/0/1", "d/0/0", "none"]})
    assert done == {"done": ["d/0/1"], "status": 200}
    assert play.state(client, keys, "d/0/1") == "queued"
    (held,) = [one for one in play.lease(client, keys, "w1", most=5, version=1) if one.job == "d/0/1"]
    run(client, scripts.fail(keys, held.job, held.token, "w1", reason="x", detail="", max_attempts=0, retry_ms=1))
    assert page.post("dead", {"do": "purge", "jobs": ["d/0/1", "d/0/2"]}) == {"done": ["d/0/1"], "status": 200}
    assert play.state(client, keys, "d/0/1") == "retiring"
    play.assert_conserved(client, keys)
    for wish in ({"do": "drop", "jobs": []}, {"do": "purge"}, {"do": "purge", "jobs": [], "all": True}):
        assert page.post("dead", wish)["status"] == 400


def test_a_lane_is_closed_and_opened(page: Page, client: redis.Redis, keys: Keys) -> None:
    assert page.post("lane", {"lane": "train", "closed": True}) == {"changed": True, "status": 200}
    assert client.smembers(keys.paused) == {b"train"}
    assert page.post("lane", {"lane": "train", "closed": True})["changed"] is False
    assert page.post("lane", {"lane": "train", "closed": False})["changed"] is True
    assert client.smembers(keys.paused) == set()
    assert page.post("lane", {"lane": "nowhere", "closed": True})["status"] == 400


def test_a_redis_that_goes_and_comes_back_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.console.web.runs.EVERY_S", 0.0)
    monkeypatch.setattr("penstock.console.web.runs.RETRY_S", 0.0)
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        folder = tmp_path / "runs" / "demo"
        folder.mkdir(parents=True)
        write_address(folder, server.url)
        client = redis.Redis.from_url(server.url)
        scripts.ensure_lanes(client, Keys("demo"))
        play.admit(client, Keys("demo"), [play.job(1)])
        page = Page(tmp_path / "runs", "demo")
        assert page("overview")["live"]
        server.stop()
        gone = page("overview")
        assert (gone["live"], gone["silent"].startswith("The run's Redis does not answer: ")) == (False, True)
        assert page.client.get("/api/runs/demo/lists/lanes").status_code == 503
        server.start()
        assert page("overview")["live"]
    finally:
        server.stop()


def test_penstock_web_serves_until_it_is_ended(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code = [sys.executable, "-m", "penstock.cli", "web", "--port", "0", "--actions", "--directory", "runs"]
    with subprocess.Popen(code, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            assert process.stdout.readline().startswith("token of actions: ")
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{url}/api/runs", timeout=60) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
        assert process.wait(60) in (0, -15, 143)


def test_a_port_that_is_taken_and_a_folder_that_is_not_there_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert execute(["web", "--port", str(port), "--directory", str(tmp_path)]) == 2
        assert f"--port {port} cannot be had" in capsys.readouterr().err
    assert execute(["web", "--directory", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capsys.readouterr().err
