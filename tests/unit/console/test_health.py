"""``penstock doctor``: each thing that hurts a run is an error or a warning that says what to do."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from penstock.console.cli import main as cli
from penstock.console.read import health
from penstock.console.read.health import look_at_clocks, look_at_redis, sync_trouble
from penstock.errors import ConfigError
from penstock.metrics import probes
from penstock.metrics.probes import Finding, Level, look_at_disk, run_checks
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.redis.append_only import IDENT, NOTE
from penstock.redis.commands import Client
from penstock.redis.server import write_address

GOOD: dict[str, Any] = {
    "redis_version": "7.2.4",
    "aof_enabled": 1,
    "maxmemory": 0,
    "used_memory": 10**6,
    "aof_last_write_status": "ok",
}
SETTINGS = {
    b"appendfsync": b"everysec",
    b"maxmemory-policy": b"noeviction",
    b"syslog-ident": b"redis",
    b"dir": b"/nowhere",
}


class Server:
    """A Redis that says what it is told to say."""

    def __init__(self, settings: dict[bytes, bytes] | None = None, ahead_s: float = 0.0, **info: Any) -> None:
        self._info = GOOD | info
        self._settings = SETTINGS | (settings or {})
        self._ahead_s = ahead_s
        self.workers: dict[bytes, bytes] = {}

    def info(self, _: str | None = None) -> dict[str, Any]:
        return self._info

    def config_get(self, name: str) -> dict[bytes, bytes]:
        if not self._settings[name.encode()]:
            raise redis.ResponseError("unknown command CONFIG")
        return {name.encode(): self._settings[name.encode()]}

    def time(self) -> tuple[int, int]:
        return int(time.time() + self._ahead_s), 0

    def hgetall(self, _: str) -> dict[bytes, bytes]:
        return self.workers


def levels(findings: Iterator[Finding]) -> dict[str, str]:
    return {one.what: one.level.value for one in findings if one.level is not Level.OK}


@pytest.mark.parametrize(
    ("server", "found"),
    [
        (Server(), {}),
        (Server(redis_version="6.0.16"), {"redis version": "error"}),
        (Server(aof_enabled=0), {"redis appendonly": "error"}),
        (Server({b"appendfsync": b"no"}), {"redis appendfsync": "warning"}),
        (Server({b"appendfsync": b"always"}), {}),
        (Server({b"maxmemory-policy": b"allkeys-lru"}), {"redis maxmemory-policy": "error"}),
        (Server({b"appendfsync": b""}, maxmemory_policy="noeviction"), {"redis appendfsync": "warning"}),
        (Server(maxmemory=10**6), {"redis memory": "error"}),
        (Server(maxmemory=10**9), {}),
        (Server(aof_last_write_status="err"), {"redis disk": "error"}),
    ],
)
def test_settings_of_redis_by_which_jobs_are_lost_are_told(server: Server, found: dict[str, str]) -> None:
    told = list(look_at_redis(cast(Client, server)))
    assert levels(iter(told)) == found
    assert all(one.todo for one in told if one.level is not Level.OK)


@pytest.mark.parametrize(
    ("policy", "trouble", "late_s", "level", "words"),
    [
        ("no", "", -600.0, Level.OK, "by penstock, each second"),
        ("no", "", 60.0, Level.WARNING, "which has not synced it for "),
        ("no", "OSError: EIO", 2.0, Level.WARNING, "s: OSError: EIO: a power loss"),
        ("everysec", "OSError: EIO", 60.0, Level.ERROR, "by Redis itself, since penstock could not sync"),
        ("no", None, 0.0, Level.WARNING, "visible on the server's machine only"),
    ],
)
def test_a_server_of_our_own_is_told_of_by_what_its_keeper_noted(
    tmp_path: Path, policy: str, trouble: str | None, late_s: float, level: Level, words: str
) -> None:
    if trouble is not None:
        (tmp_path / NOTE).write_text(trouble)
        at = time.time() - late_s
        os.utime(tmp_path / NOTE, (at, at))
    settings = {b"appendfsync": policy.encode(), b"syslog-ident": IDENT.encode(), b"dir": bytes(tmp_path)}
    [told] = [one for one in look_at_redis(cast(Client, Server(settings))) if one.what == "redis appendfsync"]
    assert told.level is level
    assert words in told.found
    assert bool(told.todo) == (level is not Level.OK)
    shown = sync_trouble(cast(Client, Server(settings)))
    assert shown == ("" if level is Level.OK or trouble is None else f"redis appendfsync: {told.found}; {told.todo}")


@pytest.mark.parametrize(("ahead_s", "found"), [(0.0, {}), (5.0, "warning"), (-60.0, "error")])
def test_a_clock_that_is_off_is_told(ahead_s: float, found: Any) -> None:
    told = levels(look_at_clocks(cast(Client, Server(ahead_s=ahead_s)), Keys("r")))
    assert told == (found and {"clock of redis": found})


@pytest.mark.parametrize(
    ("off_s", "beats", "found"),
    [
        (0.0, True, {}),
        (6.0, True, {"clock of worker w on h": "warning"}),
        (-8.0, True, {"clock of worker w on h": "warning"}),
        (-90.0, True, {"clock of worker w on h": "error"}),
        (-8.0, False, {"worker w": "warning"}),
    ],
)
def test_the_clock_of_a_worker_is_told_from_a_worker_that_is_late(
    off_s: float, beats: bool, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()

    def shows(at: float) -> None:
        server.workers = {b"w": pack({"name": "w", "host": "h", "at": at})}

    shows(time.time() + off_s)
    monkeypatch.setattr(health.time, "sleep", lambda _: shows(time.time() + off_s) if beats else None)
    assert levels(health._worker_clocks(cast(Client, server), Keys("r"))) == found


def test_a_disk_that_is_full_or_not_ours_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_blocks, f_frsize, f_bfree, f_bavail = 100, 10**9, 55, 50

    monkeypatch.setattr(probes.os, "statvfs", lambda _: Disk)
    assert look_at_disk("d", tmp_path / "not" / "made").level is Level.OK
    for left, level in ((8, Level.WARNING), (2, Level.ERROR)):
        Disk.f_bavail, Disk.f_bfree = left, left + 5
        assert look_at_disk("d", tmp_path).level is level
    monkeypatch.setattr(probes.os, "access", lambda *_: False)
    assert "cannot be written" in look_at_disk("d", tmp_path).found


def test_a_check_that_fails_is_a_finding_and_the_others_go_on() -> None:
    def fails() -> Iterator[Finding]:
        yield Finding("a", Level.OK, "fine")
        raise ConfigError("No redis://:hush@h.")

    def works() -> list[Finding]:
        return [Finding("b", Level.OK, "fine")]

    found = list(run_checks([("a", fails), ("b", works)]))
    assert [(one.what, one.level.value) for one in found] == [("a", "ok"), ("a", "error"), ("b", "ok")]
    assert "hush" not in found[1].found


def test_a_run_that_is_over_is_no_error_and_its_masked_password_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "demo"
    (folder / "redis").mkdir(parents=True)
    (folder / "run.json").write_text('{"state": "finished", "started_s": 1.0}')
    write_address(folder, "redis://:hush@127.0.0.1:1/0", {})
    (folder / "config.yaml").write_text(
        "run: demo\nmodel: {path: m}\ndata: {train: [{name: t, path: t.jsonl}]}\n"
        "redis: {url: redis://:***@127.0.0.1:1/0}\nengine: {python: /nowhere/python}\n"
    )
    monkeypatch.chdir(tmp_path)

    assert cli.execute(["doctor", "--json"]) == 1, "its engine is away"

    out = capsys.readouterr().out
    found = {one["what"]: one for one in json.loads(out)}
    assert (found["redis"]["level"], "Run demo is over (finished)" in found["redis"]["found"]) == ("warning", True)
    assert [what for what, one in found.items() if one["level"] == "error"] == ["engine's interpreter"]
    assert found["run's folder"]["found"].startswith("runs/demo")
    assert "hush" not in out
