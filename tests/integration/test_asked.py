"""`penstock doctor` sees with the eyes of every worker: what each reaches from where it runs."""

import asyncio
import json
from typing import Any

import pytest
import redis

from penstock.console.cli.main import execute
from penstock.console.read import health
from penstock.metrics.probes import ASKED, KEEP_S, MAX_FINDINGS, MAX_TEXT, ask, read_answers
from penstock.protocol import scripts
from penstock.protocol.scripts import note, run
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import presence, until, working

HOSTILE = "\x1b[2J\u202e"


async def doctor(keys: Keys, url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    capsys.readouterr()
    await asyncio.to_thread(execute, ["doctor", "--json", "--run", keys.run, "--redis", url])
    return {one["what"]: one for one in json.loads(capsys.readouterr().out)}


async def test_a_worker_that_reaches_neither_weights_nor_payloads_says_so_from_where_it_is(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # However full the disk is that this runs on.
    monkeypatch.setattr("penstock.metrics.probes.NEARLY", 2.0)
    made = config()
    async with working(made):
        await until(lambda: presence(client, keys)["state"] == "serving")
        name = presence(client, keys)["name"]
        assert (await doctor(keys, redis_server.url, capsys))["workers"]["found"] == (
            "1 of 1 reach payload servers, weights and their disks"
        )
        assert 0 < client.ttl(keys.looks) <= KEEP_S

        model, now = made.model.name, float(client.time()[0])
        record = Publication(model, 900, "disk", "/nowhere/v900", step=900, published_s=now).to_bytes()
        client.xadd(keys.weights(model), {"p": record}, id="900-0")
        run(client, scripts.server(keys, "p1", pack({"url": "redis://:hush@127.0.0.1:1/0", "state": "live", "rev": 1})))

        found = await doctor(keys, redis_server.url, capsys)

    mine = {what.partition(": ")[2]: one for what, one in found.items() if what.startswith(f"worker {name} on ")}
    assert mine["payload server p1"]["level"] == "error"
    assert (mine[f"weights of {model}"]["level"], mine[f"weights of {model}"]["todo"]) == (
        *("error", "mount the folder of weights here"),
    )
    assert "hush" not in json.dumps(found)
    assert "workers" not in found, "none of them reaches all"


def test_who_does_not_answer_is_told_of(client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    now = float(client.time()[0]) + 600
    client.hset(keys.workers, "w.1", pack({"name": "w.1", "host": "h", "at": now, "state": "serving"}))
    monkeypatch.setattr(health, "ANSWER_S", 0.0)

    (told,) = health.look_from_workers(client, keys)

    assert (told.what, told.level.value) == ("worker w.1 on h", "warning")
    assert list(health.look_from_workers(client, Keys("nobody"))) == []


BAD: list[Any] = [
    b"\xc1",
    pack([1]),
    pack({"host": "h", "findings": []}),
    pack({"host": 7, "findings": [], "at": 9e9}),
    pack({"host": "h", "findings": [["a", "ok", "b"]], "at": 9e9}),
    pack({"host": "h", "findings": [["a", "fatal", "b", ""]], "at": 9e9}),
    pack({"host": "h", "findings": [[1, "ok", "b", ""]], "at": 9e9}),
    pack({"host": "h", "findings": {}, "at": float("nan")}),
]


def test_what_no_worker_wrote_is_left_out_and_what_is_too_long_is_cut(client: redis.Redis, keys: Keys) -> None:
    asked_at = ask(client, keys)
    for index, record in enumerate(BAD):
        run(client, note(keys, keys.looks, f"bad.{index}", record))
    run(client, note(keys, keys.looks, "old.1", pack({"host": "h", "findings": [], "at": asked_at - 1})))
    rows = [["a" * 1000, "error", HOSTILE, "x"]] * 200
    run(client, note(keys, keys.looks, "long.1", pack({"host": "h", "findings": rows, "at": asked_at})))

    (only,) = read_answers(client, keys, asked_at)

    assert (only.worker, len(only.findings), len(only.findings[0].what)) == ("long.1", MAX_FINDINGS, MAX_TEXT)
    assert client.hexists(keys.looks, ASKED)
