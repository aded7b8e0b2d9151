"""The append-only file of our own server: the kernel's before a client has its answer, the disk's within a second."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.console.cli.main import execute
from penstock.protocol import scripts
from penstock.records.keys import Keys
from penstock.redis import append_only
from penstock.redis.append_only import read_synced
from penstock.redis.commands import Client
from penstock.redis.connect import connect
from penstock.redis.refusals import DiskRefused, disk_trouble
from penstock.redis.server import RedisServer, find_binary

#: A disk whose syncs end when ``held`` is gone, for the server alone; ``entered`` is there from the first one on.
SLOW_DISK = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int fdatasync(int fd) {
    if (access(getenv("HELD"), F_OK) == 0) close(open(getenv("ENTERED"), O_CREAT | O_WRONLY, 0600));
    while (access(getenv("HELD"), F_OK) == 0) usleep(10000);
    return syscall(SYS_fdatasync, fd);
}
"""


#: A disk whose syncs fail while ``broken`` is there, for the server alone.
BROKEN_DISK = r"""
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int fdatasync(int fd) {
    if (access(getenv("BROKEN"), F_OK) == 0) { errno = EIO; return -1; }
    return syscall(SYS_fdatasync, fd);
}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis")
    made.start()
    yield made
    made.kill()


def test_status_tells_of_an_append_only_file_that_is_not_synced(
    server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect(server.url) as client:
        scripts.ensure_lanes(client, Keys("r"))

    def told() -> str:
        assert execute(["status", "--run", "r", "--redis", server.url]) == 0
        return capsys.readouterr().out

    assert "redis appendfsync" not in told()
    server._sync.stop()  # type: ignore[union-attr]
    os.utime(server.folder / "synced", (time.time() - 60,) * 2)
    assert "redis appendfsync: by penstock, which has not synced it for 6" in told()


def on_a_slow_disk(folder: Path) -> Path:
    """A redis-server whose syncs last for as long as ``folder``/held is there."""
    return on_a_disk(folder, SLOW_DISK, {"HELD": "held", "ENTERED": "entered"})


def on_a_broken_disk(folder: Path) -> Path:
    """A redis-server whose syncs fail for as long as ``folder``/broken is there."""
    return on_a_disk(folder, BROKEN_DISK, {"BROKEN": "broken"})


def on_a_disk(folder: Path, code: str, files: Mapping[str, str]) -> Path:
    (folder / "disk.c").write_text(code)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make such a disk with")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "disk.so", "disk.c"], cwd=folder, check=True)
    script = folder / "redis-server"
    names = " ".join(f'{name}="{folder}/{file}"' for name, file in files.items())
    script.write_text(f'#!/bin/sh\nLD_PRELOAD="{folder}/disk.so" {names} exec "{find_binary()}" "$@"\n')
    script.chmod(0o755)
    return script


def test_I4_what_it_acknowledges_while_its_disk_is_slow_outlives_kill_9(tmp_path: Path) -> None:
    """Redis' own ``everysec`` holds writes back for up to two seconds while a sync is under way, and answers."""
    server = RedisServer(tmp_path / "redis", binary=on_a_slow_disk(tmp_path))
    server.start()
    try:
        (tmp_path / "held").touch()
        said, until = 0, time.monotonic() + 2.5
        with connect(server.url) as client:
            # As long as it takes a server that syncs itself to begin.
            while not (tmp_path / "entered").exists() and time.monotonic() < until:
                said = client.incr("said")
            for _ in range(100):
                said = client.incr("said")
            server.kill()
        (tmp_path / "held").unlink()
        server.start()
        with connect(server.url) as client:
            assert int(client.get("said")) == said
    finally:
        server.kill()


def test_I4_a_disk_that_fails_to_sync_has_redis_refuse_writes_until_it_syncs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a server with ``everysec`` does by itself: what is acknowledged then might be lost."""
    broken, fdatasync = tmp_path / "broken", os.fdatasync

    def fails(file: int) -> None:
        if broken.exists():
            raise OSError(5, "Input/output error")
        fdatasync(file)

    monkeypatch.setattr(append_only.os, "fdatasync", fails)
    server = RedisServer(tmp_path / "redis", binary=on_a_broken_disk(tmp_path), password="p")
    server.start()
    try:
        with connect(server.url) as client:
            noted = until(lambda: read_synced(server.folder))
            assert noted.trouble == ""
            assert client.config_get("appendfsync") == {"appendfsync": "no"}
            broken.touch()
            until(lambda: refuses(client))
            assert "Input/output error" in read_synced(server.folder).trouble
            assert disk_trouble(client)
            assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
            broken.unlink()
            until(lambda: not refuses(client))
            until(lambda: read_synced(server.folder).trouble == "")
            until(lambda: client.config_get("appendfsync") == {"appendfsync": "no"})
            assert client.incr("said") > 1
        # The disk of every server of this process has failed.
        said = [one for one in caplog.records if one.levelname == "ERROR" and str(server.folder) in one.getMessage()]
        assert len(said) == 1, "said once"
    finally:
        server.kill()


def test_I4_a_server_that_dies_while_its_disk_fails_refuses_writes_again_after_its_restart(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher starts a Redis that died without a stop: it begins without syncs of its own."""

    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    def syncs_itself() -> bool:
        with connect(server.url) as client:
            client.incr("said")
            return bool(client.config_get("appendfsync") == {"appendfsync": "everysec"})

    monkeypatch.setattr(append_only.os, "fdatasync", fails)
    until(syncs_itself)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not server.alive())
    server.start()
    until(syncs_itself, 10)


def refuses(client: Client) -> bool:
    try:
        client.incr("said")
    except DiskRefused:
        return True
    return False


def until(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def test_what_it_wrote_is_synced_within_a_second_after_a_rewrite_too(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(append_only.os, "fdatasync", lambda file: synced.add(os.fstat(file).st_ino))
    keeper = f"redis://keeper:{server._keeper_password}@127.0.0.1:{server.port}/0"

    def newest() -> int:
        files = [*server.folder.glob("appendonlydir/*.incr.aof"), *server.folder.glob("appendonly.aof")]
        return max(files, key=lambda path: path.stat().st_mtime_ns).stat().st_ino

    with connect(server.url) as client, connect(keeper, check=False) as keeping:
        for _ in range(2):
            client.incr("a")
            deadline = time.monotonic() + 60
            while newest() not in synced:
                assert time.monotonic() < deadline, "never synced"
                time.sleep(0.02)
            before = newest()
            keeping.bgrewriteaof()
            while newest() == before:
                assert time.monotonic() < deadline, "never rewritten"
                client.incr("a")
                time.sleep(0.02)
