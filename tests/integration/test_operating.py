"""The verbs by which a person holds up, looks through and clears a run, through the real command line."""

import json
from pathlib import Path

import pytest
import redis

from penstock.names import Lane
from penstock.protocol import scripts, user_failures
from penstock.protocol.scripts import run
from penstock.records.causes import BatchNotCut, GroupsMissing
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import NoJobs
from penstock.workers.fleet.state import read_wanted, write_state
from tests.integration import play
from tests.integration.parts import wait_record
from tests.integration.test_inspection import Cli, cli

__all__ = ["cli"]

#: What moves a terminal's cursor, turns the direction of writing, and is markup of ours.
HOSTILE = "\x1b[2J\u202e[/red]<script>"


def test_a_paused_lane_hands_out_nothing_until_it_is_resumed_and_why_says_by_whom(
    cli: Cli, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "anna")
    assert cli("pause", "train")[1] == "lane train is paused; leased jobs continue\n"
    assert cli.json("pause", "train") == {"changed": False, "lane": "train"}
    assert play.lease(client, keys, version=1) == []
    said = cli("why")[1].splitlines()[-1]
    assert said.startswith("lane train is paused by operator anna, ")
    assert said.endswith(" s ago, with 1 jobs in it; `penstock resume train` continues it")
    client.delete(keys.of("wake"))
    assert cli("resume", "train")[1] == "lane train is resumed\n"
    assert client.llen(keys.of("wake")) == 1, "workers sleep on it"
    assert cli("resume", "train")[1] == "lane train was not paused\n"
    assert "paused" not in cli("why")[1]
    assert [held.job for held in play.lease(client, keys, version=1)] == ["d/0/4"]
    assert cli("pause", "trian")[0] == 2


def test_a_lane_is_paused_and_resumed_while_redis_is_full(client: redis.Redis, keys: Keys) -> None:
    client.config_set("maxmemory", 1)
    try:
        assert user_failures.pause(client, keys, Lane.EVAL, "anna")
        assert user_failures.resume(client, keys, Lane.EVAL)
    finally:
        client.config_set("maxmemory", 0)


def test_what_stands_there_for_who_paused_a_lane_keeps_nobody_from_looking(
    cli: Cli, client: redis.Redis, keys: Keys
) -> None:
    client.sadd(keys.paused, "train", b"\xff")
    for record in (b"", b"\xc1", pack([1]), pack({"by": 7, "at": "x"}), pack({"at": 1.0})):
        client.hset(keys.paused_by, "train", record)
        assert "lane train is paused by a person, with 1 jobs in it" in cli("why")[1]
    client.hset(keys.paused_by, "train", pack({"by": HOSTILE, "at": 1.0}))
    assert "\x1b" not in cli("why")[1]
    assert cli.json("status")["paused"] == ["\\xff", "train"]


def test_peek_shows_what_the_next_lease_takes_and_moves_nothing(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(i) for i in range(5, 9)])
    client.hset(keys.clock, f"version:{play.MODEL}", 2)
    run(client, scripts.cancel(keys, "d/0/6", []))
    play.admit(client, keys, [play.job(i) for i in range(9, 30)])
    run(client, scripts.requeue(keys, "d/0/1", play.MODEL))

    rows = cli.json("peek", "--limit", "30")

    every = [row["job"] for row in rows]
    assert every[:5] == ["d/0/4", "d/0/5", "d/0/7", "d/0/8", "d/0/9"]
    assert every[-1] == "d/0/1", "queued again, behind the others of its version"
    assert (rows[0]["lane"], rows[0]["place"], rows[0]["prompt"], rows[0]["blocked_by"]) == ("train", 1, "p4", "")
    assert rows[-1]["blocked_by"] == "no engine has version 2 yet"
    assert len(cli.json("peek", "train")) == 10
    assert cli.json("peek", "eval") == []
    older = [row["job"] for row in cli.json("peek", "--version", "1")]
    assert older == [held.job for held in play.lease(client, keys, most=10, version=1)]
    assert every[4:] == [held.job for held in play.lease(client, keys, most=30, version=2)]


def test_the_dead_are_purged_by_filter_and_only_who_is_still_dead(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [play.job(i) for i in range(5, 8)])
    for held in play.lease(client, keys, most=4, version=1):
        reason = "refused" if held.job == "d/0/7" else "reward_raised"
        run(client, scripts.fail(keys, held.job, held.token, "w2", reason=reason, detail="", max_attempts=0,
                                 retry_ms=1))  # fmt: skip
    assert [row["job"] for row in cli.json("dead", "ls", "--where", "worker=w2", "--sort", "-job")] == [
        *("d/0/7", "d/0/6", "d/0/5", "d/0/4"),
    ]
    code, _, err = cli("dead", "purge", "--where", "reason=reward_raised")
    assert (code, "purge 4 dead-lettered jobs for good: pass --yes" in err) == (2, True)
    assert cli.json("dead", "purge", "--where", "reason=refused", "--dry-run") == ["d/0/7"]
    assert cli("dead", "purge", "--where", "reason=reward_raised", "--where", "worker=w2", "--yes")[1] == (
        "3 jobs are purged\n"
    )
    assert [row["job"] for row in cli.json("dead", "ls")] == ["d/0/1", "d/0/7"]
    assert cli("dead", "requeue", "--where", "reason=refused", "--dry-run")[1] == "1 jobs would be queued again\n"
    assert cli.json("dead", "requeue", "--where", "reason=refused") == ["d/0/7"]
    assert run(client, scripts.cancel(keys, "d/0/7", ["actor"], only="dead")) == "", "it is queued again"
    code, _, err = cli("dead", "purge", "d/0/7", "--yes")
    assert (code, "'d/0/7' is not a dead letter" in err) == (2, True)
    assert cli("dead", "purge", "--yes")[0] == 2, "one job, a filter, or --all"
    assert cli.json("dead", "purge", "--all", "--yes") == ["d/0/1"]
    assert cli("audit")[0] == 0
    play.assert_conserved(client, keys)


def test_what_would_be_done_is_said_and_not_done(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    assert cli("jobs", "cancel", "d/0/4", "d/0/9", "--dry-run")[1] == (
        "d/0/4: would be cancelled, it is queued\nd/0/9: there is no such job\n"
    )
    assert play.state(client, keys, "d/0/4") == "queued"
    assert cli("subs", "drop", "actor", "--dry-run")[1] == (
        "would drop subscription actor, whose trainer is running, with 0 groups held for it for good\n"
    )
    assert cli.json("subs", "drop", "actor", "--dry-run") == {"would_drop": "actor"}
    assert [row["name"] for row in cli.json("subs", "ls")] == ["actor"]
    assert cli("subs", "drop", "nobody", "--dry-run")[0] == 2
    url = "redis://:hush@127.0.0.1:1/0"
    run(client, scripts.server(keys, "p1", pack({"url": url, "state": "live", "rev": 1})))
    for verb, says in (("drain", "would drain payload server p1"), ("lose", "would abandon payload server p1")):
        out = cli("payloads", verb, "p1", "--dry-run")[1]
        assert (out.startswith(says), "hush" in out) == (True, False)
    assert cli.json("payloads", "ls")[0]["state"] == "live"
    assert cli.json("payloads", "lose", "p1", "--dry-run") == {"would_lose": "p1"}
    fleet = {"host": "h", "groups": {"m.g": {"worker_type": "regular", "engines": 3}}, "processes": [],
             "endpoints": {}, "autoscale": {}}  # fmt: skip
    write_state(client, keys, fleet)
    assert cli("fleet", "scale", "1", "--dry-run")[1] == "would have m.g drain 2 engines of 3\n"
    assert cli("fleet", "scale", "5", "--dry-run")[1] == "would have m.g grow from 3 engines to 5\n"
    assert read_wanted(client, keys) == {}
    assert cli.json("fleet", "scale", "1", "--yes") == {"group": "m.g", "engines": 3, "wanted": 1}
    assert read_wanted(client, keys) == {"m.g": 1}
    assert (
        "would release weights of every engine of model policy, and stop"
        in (cli("engines", "offload", "--tags", "weights", "--dry-run")[1])
    )
    assert cli.json("engines", "onload", "--dry-run") == {"would_onload": ["weights", "cuda_graph", "kv_cache"]}
    assert not client.exists(keys.memory(play.MODEL))


def test_a_job_is_shown_with_all_that_is_known_of_it_in_every_state(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    ready = cli.json("jobs", "show", "d/0/0")
    assert (ready["state"], ready["committed"], ready["record"]) == ("ready", 2, "its record went when it was finished")
    assert [(one["k"], one["reward"], one["newest"]) for one in ready["samples"]] == [(0, 1.0, 1), (1, 1.0, 1)]
    for job, state in (("d/0/1", "dead"), ("d/0/2", "leased"), ("d/0/3", "delayed"), ("d/0/4", "queued")):
        found = cli.json("jobs", "show", job)
        assert (found["state"], found["record"]["prompt"]) == (state, f"p{job[-1]}")
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, ["d/0/0"])
    assert play.cut(client, keys, leader, 1, ["d/0/0"]).outcome == "cut"
    assert cli.json("jobs", "show", "d/0/0")["subscriptions"] == {"actor": {"uses": 1, "given_up": "", "batch": 1}}
    out = cli("jobs", "show", "d/0/0")[1]
    assert "state: ready" in out
    assert "actor" in out
    code, _, err = cli("jobs", "show", "d/0/99")
    assert (code, "There is no job 'd/0/99'" in err) == (2, True)


def test_a_worker_is_shown_with_its_jobs_and_waits_under_either_name(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    now = float(client.time()[0])
    client.hset(keys.workers, "w1", pack({"name": "w1", "at": now + 600, "state": "serving"}))
    client.hset(keys.waits, "worker:w1:intake", wait_record(NoJobs(1), now - 5, now))
    found = cli.json("workers", "show", "w1")
    assert ([row["job"] for row in found["jobs"]], [one["name"] for one in found["waits"]]) == (["d/0/2"], ["no_jobs"])
    out = cli("workers", "show", "w1")[1]
    for words in ("state: serving", "d/0/2", "worker:w1:intake", "jobs"):
        assert words in out
    assert cli("workers", "show", "w9")[0] == 2
    assert cli.json("workers", "ls", "--where", "state=draining") == []


def test_buffer_ls_says_why_each_group_is_not_cut(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    def stands() -> tuple[str, str]:
        (row,) = cli.json("buffer", "ls")
        assert (row["job"], row["subscription"], row["oldest"], row["bound"]) == ("d/0/0", "actor", 1, None)
        return row["state"], row["why"]

    assert stands() == ("ready", "the buffer has yet to keep the payloads of 2 samples")
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, ["d/0/0"])
    assert stands() == ("ready", "its trainer has not asked for batch 1")
    now = float(client.time()[0])
    client.hset(
        keys.waits, "buffer:actor", wait_record(missing := GroupsMissing(0, 1, "groups", running=0), now, now + 600)
    )
    assert stands() == ("ready", f"batch 1 waits for {missing}")
    assert play.cut(client, keys, leader, 1, ["d/0/0"]).outcome == "cut"
    assert stands() == ("cut", "batch 1 is not committed yet")
    play.commit_batch(client, keys, 1)
    assert stands() == ("cut", "batch 1 is committed, and no checkpoint is past it yet")
    client.hset(keys.group("d/0/0"), "u:actor", -1)
    assert stands() == ("given up", "stale")
    assert "given up" in cli("buffer", "ls")[1]


def test_buffer_ls_counts_staleness_as_the_cut_does(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, ["d/0/0"])
    client.hset(keys.sub("actor"), "model", play.MODEL)
    client.hset(keys.clock, f"version:{play.MODEL}", 2)
    (row,) = cli.json("buffer", "ls")
    assert (row["staleness"], row["bound"], row["why"]) == (1, 1, "its trainer has not asked for batch 1")
    client.hset(keys.clock, f"version:{play.MODEL}", 3)
    client.hset(keys.sub("actor"), "on_expiry", "drop")
    (row,) = cli.json("buffer", "ls")
    assert (row["staleness"], row["why"]) == (2, "it is too old, and is about to be given up")


def test_trainers_and_weights_are_listed(cli: Cli, client: redis.Redis, keys: Keys, tmp_path: Path) -> None:
    now = float(client.time()[0])
    client.hset(keys.waits, "trainer:actor", wait_record(batch := BatchNotCut("actor", 1), now, now + 600))
    play.subscribe(client, keys, "judge", driving=0)
    first, second = cli.json("trainers", "ls")
    assert (first["name"], first["rank"], first["state"], first["waits_for"]) == ("actor", 0, "running", str(batch))
    assert (second["name"], second["state"], second["step"]) == ("judge", "gone", None)
    assert "batch 1" in cli("trainers", "ls")[1]

    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    for version, path in ((2, str(tmp_path)), (3, "/nowhere/v3")):
        record = Publication(play.MODEL, version, "disk", path, step=version, published_s=now).to_bytes()
        client.xadd(keys.weights(play.MODEL), {"p": record}, id=f"{version}-0")
    client.hset(keys.pins(play.MODEL), "eval", 2)
    client.hset(keys.loading(play.MODEL), "w1", pack({"versions": [1, 3], "at": now}))
    client.hset(keys.aside(play.MODEL), "2-0", HOSTILE)
    newest, older, oldest = cli.json("weights", "ls")
    assert (newest["version"], newest["num_bytes"], newest["loading"], newest["state"]) == (3, None, ["w1"], "newest")
    assert (older["num_bytes"], older["pinned_by"], older["workers"]) == (1000, ["eval"], [])
    assert "is not a record" in oldest["state"], "the test published a record of its own"
    out = cli("weights", "ls")[1]
    assert ("not seen from here" in out, "\x1b" in out, "\u202e" in out) == (True, False, False)


def test_hostile_text_in_records_is_shown_harmlessly_by_every_list(cli: Cli, client: redis.Redis, keys: Keys) -> None:
    play.admit(client, keys, [Job(id="d/0/5", n=1, prompt=HOSTILE, label=HOSTILE)])
    now = float(client.time()[0])
    client.hset(keys.workers, "w1", pack({"name": "w1", "at": now + 600, "state": HOSTILE, "why": HOSTILE}))
    client.hset(keys.trainers, "actor/0", pack({"name": "actor", "at": now, "reward_mean": float("nan")}))
    client.hset(keys.trainers, "x/0", pack({"name": HOSTILE, "at": now, "rank": 1}))
    client.hset(keys.group("d/0/0"), mapping={"ln": HOSTILE, "u:actor": HOSTILE})
    client.hset(keys.group("d/0/4"), mapping={"att": HOSTILE})
    client.hset(keys.of("group:e/0/\x1b"), "st", HOSTILE)
    client.set(keys.meta("d/0/4"), b"\xc1")
    client.hset(keys.sub("actor"), "cut", HOSTILE)
    verbs = ("jobs ls", "jobs show d/0/0", "jobs show d/0/4", "jobs show d/0/5", "dead ls", "peek", "workers ls",
             "workers show w1", "trainers ls", "buffer ls", "weights ls", "subs ls", "why", "status")  # fmt: skip
    for verb in verbs:
        code, out, err = cli(*verb.split())
        assert code == 0, (verb, err)
        assert not {"\x1b", "\u202e"} & set(out + err), verb
        code, out, _ = cli(*verb.split(), "--json")
        assert code == 0, verb
        assert "\x1b" not in out
        json.loads(out)
