"""Commands that show something answer after a run's end, from a copy of what its Redis left."""

import json
from pathlib import Path

import pytest

from penstock.console.cli.main import execute
from penstock.protocol import scripts
from penstock.protocol.scripts import run
from penstock.records.keys import Keys
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer, write_address
from tests.integration import play


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run that is over, with a dead letter; its Redis was stopped."""
    folder, keys = tmp_path / "runs" / "demo", Keys("demo")
    server = RedisServer(folder / "redis")
    client = connect(server.start())
    scripts.ensure_lanes(client, keys)
    play.subscribe(client, keys, mode="async", size=2)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [play.job(i) for i in range(3)])
    (held,) = play.lease(client, keys, "w1", most=1, version=1)
    detail = "Traceback\n  line\nValueError: " + "no number " * 20 + "in 42"
    run(client, scripts.fail(keys, held.job, held.token, "w1", reason="reward_raised", detail=detail, max_attempts=0,
                             retry_ms=1))  # fmt: skip
    server.stop()
    write_address(folder, server.url)
    (folder / "run.json").write_text('{"state": "finished", "started_s": 1.0}')
    return tmp_path / "runs"


def left(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "demo" / "redis").rglob("*") if path.is_file()}


def test_lists_and_status_are_shown_and_nothing_is_written(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(directory)
    for verb, words in (
        ("status demo", "delayed 0, dead 1"),
        ("jobs ls", "queued"),
        ("dead ls", "in 42"),
        ("dead show d/0/0", "no number"),
        ("subs ls", "actor"),
        ("weights ls", "1-0"),
        ("workers ls", "workers: none"),
        ("why", "The run is over: no part runs."),
        ("audit", "ok"),
    ):
        assert execute([*verb.split(), "--directory", str(directory)]) == 0
        out, err = capsys.readouterr()
        assert words in out, verb
        assert "\nwaits" not in out, "no part runs that could wait"
        assert "run demo is over (finished); this is what its Redis held at the end\n" in err
    assert left(directory) == before


def test_json_has_the_same_rows(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["jobs", "ls", "--json", "--directory", str(directory)]) == 0
    states = {row["job"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert states == {"d/0/0": "dead", "d/0/1": "queued", "d/0/2": "queued"}


def test_what_changes_a_run_is_refused_and_says_how_to_serve_it(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["dead", "requeue", "--all", "--directory", str(directory)]) == 2
    err = capsys.readouterr().err
    assert "Run demo is over (finished), and its Redis ended with it: `penstock redis --config" in err
