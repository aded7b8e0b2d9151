"""``penstock samples`` on a run that goes on: its history and what is still in Redis, each sample once."""

import json
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.console.cli.main import execute
from penstock.console.read.samples import read_live
from penstock.history.writer import HistoryWriter
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.unit.penstock.history.rows import row


def listed(folder: Path, url: str, keys: Keys, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert execute(["samples", "ls", "--json", "--run", keys.run, "--redis", url, "--directory", str(folder)]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_what_is_in_redis_and_what_was_recorded_are_one_list(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play.subscribe(client, keys, mode="async", size=2)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [play.job(i) for i in range(3)])
    done, begun, _ = play.lease(client, keys, "w1", most=3, version=1)
    play.commit(client, keys, done, [0, 1], version=1)
    play.commit(client, keys, begun, [1], version=1)

    found = {one["id"]: (one["fate"], one["reason"]) for one in listed(tmp_path, redis_server.url, keys, capsys)}
    assert found == {
        f"{done.job}/0": ("", "ready"),
        f"{done.job}/1": ("", "ready"),
        f"{begun.job}/1": ("", "leased"),
    }

    for sample in found:
        assert execute(["trace", sample, "--run", keys.run, "--redis", redis_server.url]) == 0, "listed, so it is known"
        assert f"job: {sample.rpartition('/')[0]}" in capsys.readouterr().out

    writer = HistoryWriter(tmp_path / keys.run / "history", 1, max_bytes=2**30)
    writer.write([row(done.job, 0, fate="trained"), row("d/0/99", 0, fate="dropped", reason="stale")])
    writer.close()
    later = {one["id"]: (one["fate"], one["reason"]) for one in listed(tmp_path, redis_server.url, keys, capsys)}
    assert later == found | {f"{done.job}/0": ("trained", ""), "d/0/99/0": ("dropped", "stale")}

    client.append(keys.meta(done.job), b"\xc1")
    rows, _ = read_live(client, keys)
    assert [one.id for one in rows] == [f"{begun.job}/1"], "a group that cannot be read hides no other"


def test_all_groups_in_redis_are_read_however_many_there_are(client: redis.Redis, keys: Keys) -> None:
    """Ready, begun, retiring, and retired ones that wait to be recorded."""
    count = 4500
    play.subscribe(client, keys, mode="async", size=2)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    jobs = [play.job(i, n=1, dataset="held", epoch=1) for i in range(count)]
    for start in range(0, count, 500):
        play.admit(client, keys, jobs[start : start + 500], lane="eval", source="eval@1")
        play.complete(client, keys, 500, n=1, version=1)
    play.admit(client, keys, [play.job(i) for i in range(2)])
    begun, cancelled = play.lease(client, keys, "w1", most=2, version=1)
    play.commit(client, keys, begun, [0], version=1)
    play.commit(client, keys, cancelled, [0], version=1)
    client.hset(keys.of("history"), mapping={"backlog": 10, "patience": 10**9})
    run(client, scripts.cancel(keys, cancelled.job, ()))
    assert client.zcard(keys.unrecorded) == 1

    rows, _ = read_live(client, keys)

    assert len({one.job for one in rows}) == count + 2


def test_a_redis_that_is_gone_is_told_and_the_history_is_shown(
    keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = HistoryWriter(tmp_path / keys.run / "history", 1, max_bytes=2**30)
    writer.write([row("d/0/1")])
    writer.close()
    (tmp_path / keys.run / "redis.json").write_text('{"url": "redis://127.0.0.1:1/0"}')

    assert execute(["samples", "ls", "--directory", str(tmp_path)]) == 0

    out, err = capsys.readouterr()
    assert "d/0/1/0" in out
    assert err.startswith("Only what is in the history is shown: ")
