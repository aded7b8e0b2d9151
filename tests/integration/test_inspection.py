"""The commands that look into a run, through the real command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.console.cli.main import execute
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.causes import GateClosed
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer, write_address
from tests.integration import play
from tests.integration.parts import wait_record

GATE = GateClosed("actor", 4, 4)


class Cli:
    """``penstock ARGUMENTS`` against one run; what it printed and its exit code."""

    def __init__(self, url: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.target = ["--run", run, "--redis", url]
        self.capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = execute([*arguments, *self.target])
        out, err = self.capsys.readouterr()
        return code, out, err

    def json(self, *arguments: str) -> Any:
        code, out, err = self(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def cli(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Cli:
    """A run with a job in each state, a worker, a trainer and a wait."""
    monkeypatch.setenv("COLUMNS", "250")
    play.subscribe(client, keys, mode="async", size=2)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [play.job(i) for i in range(5)])
    ready, buried, leased, delayed = play.lease(client, keys, "w1", most=4, version=1)
    play.commit(client, keys, ready, [0, 1], version=1)
    for held, tries, reason in ((buried, 0, "reward_raised"), (delayed, 3, "engine_error")):
        detail = "Traceback\n  line\nValueError: no number"
        run(client, scripts.fail(keys, held.job, held.token, "w1", reason=reason, detail=detail, max_attempts=tries,
                                 retry_ms=10**6))  # fmt: skip
    assert leased.job == "d/0/2"
    now = float(client.time()[0])
    client.hset(keys.workers, "w1", pack({"name": "w1", "at": now, "engine": "sglang 1", "version": 1, "held": 1}))
    client.hset(keys.workers, "w0", pack({"name": "w0", "at": now - 1000}))
    client.hset(keys.trainers, "actor/0", pack({"name": "actor", "rank": 0, "at": now, "step": 3}))
    client.hset(keys.waits, "producer", wait_record(GATE, now - 5, now))
    return Cli(redis_server.url, keys.run, capsys)


def test_status_shows_queues_workers_trainers_subscriptions_and_waits(cli: Cli) -> None:
    state = cli.json("status")
    assert state["lanes"]["train"] == {"queued": 1, "leased": 1}
    assert (state["delayed"], state["dead"], state["ready"], state["inflight"]) == (1, 1, 1, 1)
    assert (state["mode"], state["bound"], state["version"]) == ("async", 1, 1)
    assert state["step"] == state["subs"][0].get("cursor", 0) == 0, "the step of a publication is not counted"
    assert [worker["name"] for worker in state["workers"]] == ["w1"], "w0 is gone"
    assert [sub["name"] for sub in state["subs"]] == ["actor"]
    assert "owner" not in state["subs"][0]
    assert state["waits"][0]["who"] == "producer"
    code, out, err = cli("status")
    assert (code, err) == (0, "")
    for words in ("async, bound 1, version 1", "delayed 1, dead 1, groups ready 1", "w1", "actor", "staleness limit"):
        assert words in out


def test_I8_why_names_waiters_and_causes(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    (found,) = cli.json("why")
    assert (found["who"], found["name"], found["fields"]) == ("producer", "gate_closed", GATE.fields())
    assert (found["what"], found["cause_name"]) == (str(GATE), "working")
    code, out, _ = cli("why")
    assert code == 0
    assert out.startswith("producer has waited ")
    assert f"s for {GATE}" in out
    client.delete(keys.waits)
    assert cli("why")[1] == "No part is waiting.\n"
    assert cli.json("why") == []


def test_jobs_are_listed_with_their_state_and_filtered(cli: Cli) -> None:
    rows = {row["job"]: row for row in cli.json("jobs", "ls")}
    states = {job: row["state"] for job, row in rows.items()}
    assert states == {"d/0/0": "ready", "d/0/1": "dead", "d/0/2": "leased", "d/0/3": "delayed", "d/0/4": "queued"}
    assert (rows["d/0/2"]["worker"], rows["d/0/3"]["attempts"]) == ("w1", 1)
    assert [row["job"] for row in cli.json("jobs", "ls", "--where", "state=leased")] == ["d/0/2"]
    assert len(cli.json("jobs", "ls", "--limit", "2")) == 2
    code, out, _ = cli("jobs", "ls")
    assert code == 0
    assert "d/0/4" in out


def test_I1_jobs_are_cancelled_in_whatever_state_they_are(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    every = [f"d/0/{i}" for i in range(5)]
    assert cli.json("jobs", "cancel", *every) == {
        "d/0/0": "ready",
        "d/0/1": "dead",
        "d/0/2": "leased",
        "d/0/3": "delayed",
        "d/0/4": "queued",
    }
    assert {play.state(client, keys, job) for job in every} == {"retiring"}
    code, out, _ = cli("jobs", "cancel", "d/0/0")
    assert (code, out) == (1, "d/0/0: there is no such job\n")
    assert cli("audit")[0] == 0
    play.assert_conserved(client, keys)


def test_I4_a_job_in_a_batch_that_may_be_read_again_is_not_cancelled(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, ["d/0/0"])
    assert play.cut(client, keys, leader, 1, ["d/0/0"]).outcome == "cut"
    code, out, _ = cli("jobs", "cancel", "d/0/0", "d/0/4")
    assert code == 1
    assert "d/0/0: it stays: a batch that a trainer may read again holds it" in out
    assert "d/0/4: cancelled, it was queued" in out


def test_dead_letters_are_listed_shown_and_dug_up(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    (letter,) = cli.json("dead", "ls")
    assert (letter["job"], letter["reason"], letter["worker"]) == ("d/0/1", "reward_raised", "w1")
    assert letter["detail"].startswith("Traceback")
    assert (letter["prompt_length"], letter["prompt_unit"], letter["answers"]) == (2, "characters", [])
    _, out, err = cli("dead", "ls")
    assert err == "by length of the prompt: up to 64 characters 1\n"
    assert "characters" in out
    assert "ValueError: no number" in out
    assert "Traceback" not in out
    shown = cli.json("dead", "show", "d/0/1")
    assert shown["record"]["prompt"] == "p1"
    assert "prompt" in cli("dead", "show", "d/0/1")[1]
    # Streams number their entries by the millisecond: two of one may have the same number.
    client.hset(keys.group("d/0/0"), "eid", client.hget(keys.group("d/0/1"), "eid") or b"")
    code, _, err = cli("dead", "show", "d/0/0")
    assert code == 2
    assert "'d/0/0' is not a dead letter; `penstock dead ls` lists" in err
    assert cli("dead", "requeue")[0] == 2, "one job, or --all"
    assert cli("dead", "requeue", "d/0/1", "--all")[0] == 2
    assert cli.json("dead", "requeue", "d/0/1") == ["d/0/1"]
    assert cli("dead", "requeue", "d/0/1")[0] == 2
    held = next(one for one in play.lease(client, keys, most=5, version=1) if one.job == "d/0/1")
    run(client, scripts.fail(keys, held.job, held.token, "w", reason="r", detail="", max_attempts=0, retry_ms=1))
    assert cli("dead", "requeue", "--all")[1] == "1 jobs are queued again\n"
    assert cli.json("dead", "ls") == []
    assert "dead letters: none" in cli("dead", "ls")[1]
    assert cli("audit")[0] == 0


def test_a_buried_record_that_cannot_be_read_is_shown_as_such(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    entry, fields = client.xrange(keys.dead)[0]
    client.xdel(keys.dead, entry)
    new = client.xadd(keys.dead, {**fields, b"body": b"\xc1"})
    client.hset(keys.group("d/0/1"), "eid", new)
    assert "is not a record that penstock wrote" in cli.json("dead", "show", "d/0/1")["record"]


def test_workers_are_listed_while_they_live(cli: Cli) -> None:
    assert [(row["name"], row["version"]) for row in cli.json("workers", "ls")] == [("w1", 1)]
    out = cli("workers", "ls")[1]
    assert "sglang 1" in out
    assert "w0" not in out


def test_I1_audit_exits_1_on_a_difference(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    report = cli.json("audit")
    assert (report["ok"], report["groups"], report["recount"]["admitted"]) == (True, 5, 5)
    code, out, _ = cli("audit")
    assert code == 0
    assert out.endswith("ok\n")
    client.zrem(keys.ready, "d/0/0")
    code, out, _ = cli("audit")
    assert code == 1
    assert "group d/0/0: ready, and in ready or not" in out
    code, out, _ = cli("audit", "--json")
    assert code == 1
    assert json.loads(out)["num_differences"] == 3, "its job, the sum of jobs, and the tokens that it holds"


def test_I1_audit_names_the_jobs_that_are_missing(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    ready, queued = "d/0/0", "d/0/4"
    client.delete(keys.group(queued))
    code, out, _ = cli("audit")
    assert code == 1
    assert f"source: 1 admitted jobs are neither done nor live: {queued}\n" in out, "its lane has it"
    client.delete(keys.group(ready), keys.meta(ready))
    client.zrem(keys.ready, ready)
    code, out, _ = cli("audit")
    assert f"2 admitted jobs are neither done nor live: {ready}, {queued}\n" in out, "by the gap that it leaves"
    code, out, _ = cli("audit", "--json")
    assert json.loads(out)["missing"] == [ready, queued]


def test_I1_audit_names_the_jobs_that_no_container_holds(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(i) for i in range(5, 35)])
    lost = [name for name in (f"d/0/{i}" for i in range(35)) if client.hget(keys.group(name), "cl") == b"train"
            and client.hget(keys.group(name), "st") in (b"queued", b"leased")]  # fmt: skip
    client.delete(keys.jobs("train"))
    out = cli("audit")[1]
    named = ", ".join(lost[:20])
    assert len(lost) > 20
    assert f"{len(lost)} are missing in the containers: {named} and {len(lost) - 20} more\n" in out
    assert json.loads(cli("audit", "--json")[1])["missing"] == lost[:20]


def test_I1_audit_names_20_missing_jobs_and_counts_the_rest(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(i) for i in range(5, 35)])
    client.delete(*(keys.group(f"d/0/{i}") for i in range(6, 30)))
    out = cli("audit")[1]
    named = ", ".join(f"d/0/{i}" for i in range(6, 26))
    assert f"24 admitted jobs are neither done nor live: {named} and 4 more\n" in out


def test_I1_audit_names_a_missing_job_of_a_shuffled_epoch_that_is_over(
    cli: Cli, client: redis.Redis, keys: Keys
) -> None:
    """Indices of the epoch under way have gaps of their own."""
    play.admit(client, keys, [play.job(i, dataset="s", epoch=epoch) for epoch in (0, 1) for i in (7, 3, 5)])
    play.admit(client, keys, [play.job(7, dataset="s", epoch=2)])
    client.delete(keys.group("s/0/5"), keys.jobs("train"))
    out = cli("audit")[1]
    assert "1 admitted jobs are neither done nor live: s/0/5\n" in out


def test_a_run_is_found_by_its_folder_and_a_wrong_one_is_a_sentence(
    cli: Cli, redis_server: RedisServer, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / keys.run
    folder.mkdir()
    write_address(folder, redis_server.url)
    assert execute(["status", "--directory", str(tmp_path)]) == 0
    assert f"run {keys.run}:" in capsys.readouterr().out
    config = {"run": keys.run, "model": {"path": "m"}, "data": {"train": [{"name": "t", "path": "t"}]}}
    (tmp_path / "run.yaml").write_text(json.dumps(config | {"redis": {"url": redis_server.url}}))
    for arguments in ([keys.run, "--directory", str(tmp_path)], ["--config", str(tmp_path / "run.yaml")]):
        assert execute(["status", *arguments]) == 0
        assert f"run {keys.run}:" in capsys.readouterr().out
    for arguments, says in (
        (["--directory", str(tmp_path / "none")], "There is no run under"),
        (["--run", "other", "--directory", str(tmp_path)], "No Redis is known for run 'other'"),
        (["--run", "other", "--redis", redis_server.url], "knows no run 'other'"),
        (["--run", keys.run, "--redis", "redis://127.0.0.1:1/0"], "No Redis answers at redis://127.0.0.1:1/0"),
    ):
        assert execute(["status", *arguments]) == 2
        assert says in capsys.readouterr().err
