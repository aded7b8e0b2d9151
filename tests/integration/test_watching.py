"""What is watched: `penstock top` on a real terminal, and `penstock status --watch` in a pipe."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from penstock.console.cli import main as cli
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import PATIENCE_S


@contextmanager
def on_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process and our side of its terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *arguments],
        env={**os.environ, "COLUMNS": "120", "LINES": "30", "TERM": "xterm"},
        cwd=Path(cli.__file__).resolve().parents[2],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def until_shown(terminal: int, words: bytes) -> None:
    shown, deadline = b"", time.monotonic() + PATIENCE_S
    while words not in shown:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], shown
        shown += os.read(terminal, 65536)


def test_top_shows_a_run_looks_into_a_job_and_ends_by_q(
    redis_server: RedisServer, client: redis.Redis, keys: Keys
) -> None:
    play.subscribe(client, keys, mode="async", size=2)
    play.admit(client, keys, [play.job(i) for i in range(3)])
    with on_a_terminal("top", "--run", keys.run, "--redis", redis_server.url) as (process, terminal):
        until_shown(terminal, keys.run.encode())
        os.write(terminal, b"2")
        until_shown(terminal, b"d/0/2")
        os.write(terminal, b"s\r")
        until_shown(terminal, b"prompt")
        os.write(terminal, b"q")
        assert process.wait(PATIENCE_S) == 0


def test_status_is_shown_again_as_it_changes(redis_server: RedisServer, client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    play.admit(client, keys, [play.job(0)])
    command = ["status", "--watch", "--every", "0.2", "--run", keys.run, "--redis", redis_server.url]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *command],
        cwd=Path(cli.__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        until_shown(process.stdout.fileno(), b"delayed 0, dead 0, groups ready 0")
        play.complete(client, keys, 1)
        until_shown(process.stdout.fileno(), b"delayed 0, dead 0, groups ready 1")
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 141, "nobody reads it any more"
    finally:
        process.kill()
        process.wait()
