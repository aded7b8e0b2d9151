"""Servers that are not SGLang: starts that fail, and processes that must not stay."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError, EngineDied, EngineError
from penstock.workers.sglang import server as servers

MODEL = ModelConfig(path="/models/tiny", dtype="float32")


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)
    return str(path)


def make_fifo(folder: Path) -> Path:
    path = folder / "pids"
    os.mkfifo(path)
    return path


async def start(config: EngineConfig, tmp_path: Path, timeout_s: float = 30) -> servers.Server:
    async with aiohttp.ClientSession() as session:
        return await servers.start(lambda: servers.spawn(config, MODEL, name="t", log_dir=tmp_path), session, timeout_s)


#: A server that is well, and writes down what is posted to it.
_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        open({posted!r}, "a").write(self.path + chr(10))
        self.send_response({code})
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("code", [200, 404])
async def test_a_server_that_is_ready_leaves_what_it_imported_out_of_collections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    program, posted = tmp_path / "program.py", tmp_path / "posted"
    program.write_text(_SERVER.format(posted=str(posted), code=code))
    server = await start(EngineConfig(python=script(tmp_path, f'exec {sys.executable} {program} "$@"')), tmp_path)
    try:
        assert posted.read_text() == "/freeze_gc\n"
        assert ("refused /freeze_gc (status 404)" in caplog.text) == (code == 404)
    finally:
        await server.stop()


async def test_a_missing_interpreter_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="penstock engine install"):
        await start(EngineConfig(python=str(tmp_path / "nothing")), tmp_path)


async def test_an_environment_without_sglang_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no sglang"):
        await start(EngineConfig(python=script(tmp_path, "echo \"No module named 'sglang'\"; exit 1")), tmp_path)


async def test_a_death_during_the_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="exit code 3") as caught:
        await start(EngineConfig(python=script(tmp_path, "echo not enough memory; exit 3")), tmp_path)
    assert "not enough memory" in str(caught.value)
    with pytest.raises(EngineDied, match="signal SIGKILL"):
        await start(EngineConfig(python=script(tmp_path, "kill -9 $$")), tmp_path)


async def test_a_port_that_was_taken_meanwhile_is_tried_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    python = script(tmp_path, f"echo x >> {count}; echo Address already in use; exit 1")
    with pytest.raises(EngineDied):
        await start(EngineConfig(python=python), tmp_path)
    assert len(count.read_text().split()) == 3


async def test_a_start_that_takes_too_long_leaves_nothing(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    python = script(tmp_path, f"setsid sleep 1000 & echo $! >> {pids}; echo $$ >> {pids}; wait")
    pids.touch()
    for timeout_s in (0.5, 5.0, 50.0):  # a busy machine takes its time to come to the script
        with pytest.raises(EngineError, match="start_timeout_s"):
            await start(EngineConfig(python=python), tmp_path, timeout_s=timeout_s)
        if len(started := pids.read_text().split()) >= 2:
            break
    assert started
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


#: A worker that spawns a server with a grandchild in a session of its own, and waits to be killed.
_PARENT = """
import sys, time
from pathlib import Path
from penstock.config import EngineConfig, ModelConfig
from penstock.workers.sglang import server
started = server.spawn(EngineConfig(python=sys.argv[1]), ModelConfig(path="."), name="t", log_dir=Path(sys.argv[2]))
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("whole_group", [False, True])
def test_nothing_outlives_the_worker(tmp_path: Path, number: int, whole_group: bool) -> None:
    fifo = make_fifo(tmp_path)
    inner = f"trap '' TERM HUP; sleep 1000 & echo $! $$ {'$'}PPID > {fifo}; wait"
    python = script(tmp_path, f"trap '' TERM HUP; setsid bash -c \"{inner.replace('$', chr(92) + '$')}\" & wait")
    command = [sys.executable, "-c", _PARENT, python, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    pids = [int(pid) for pid in fifo.read_text().split()]
    assert len(pids) == 3
    pidfds = [os.pidfd_open(pid) for pid in pids]

    (os.killpg if whole_group else os.kill)(parent.pid, number)
    parent.wait()

    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 10)[0], "a process of the engine outlived its worker"
        os.close(pidfd)
    assert parent.stdout is not None
    parent.stdout.close()


async def test_a_supervisor_that_is_told_to_end_takes_the_server_along(tmp_path: Path) -> None:
    fifo = make_fifo(tmp_path)
    config = EngineConfig(python=script(tmp_path, f"setsid sleep 1000 & echo $! $$ $PPID > {fifo}; wait"))
    server = servers.spawn(config, MODEL, name="t", log_dir=tmp_path)
    *pids, supervisor = [int(pid) for pid in fifo.read_text().split()]

    os.kill(supervisor, signal.SIGTERM)

    assert await server.died() == "ended with signal SIGKILL"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    await server.stop()
