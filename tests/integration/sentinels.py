"""A primary, a replica and a sentinel as real processes; replication can be cut, and the primary killed."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import redis

from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from penstock.system.processes import free_port
from tests.integration.parts import until

NAME = "control"


class Sentinels:
    """One sentinel over ``primary`` and ``replica``; its URL names a dead sentinel first."""

    def __init__(self, folder: Path) -> None:
        self.primary = RedisServer(folder / "primary")
        self.replica = RedisServer(folder / "replica")
        self._folder = folder
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self._port}/{NAME}"

    def start(self) -> None:
        self.primary.start()
        self.replica.start()
        with connect(self.primary.url) as client:
            # A user of its own, so that replication alone can be cut.
            client.execute_command("ACL", "SETUSER", "replica", "on", "nopass", "+psync", "+replconf", "+ping")
        with connect(self.replica.url) as client:
            client.config_set("masteruser", "replica")
            client.config_set("masterauth", "any")
            client.replicaof("127.0.0.1", self.primary.port)
        self.until_in_step()
        self._port = free_port()
        conf = self._folder / "sentinel.conf"
        conf.write_text(
            f"bind 127.0.0.1\nport {self._port}\ndir {self._folder}\nlogfile {self._folder}/sentinel.log\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self.primary.port} 1\n"
            f"sentinel down-after-milliseconds {NAME} 500\nsentinel failover-timeout {NAME} 2000\n"
        )
        command = [str(self.primary.binary), str(conf), "--sentinel"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        with redis.Redis(port=self._port) as sentinel:
            until(lambda: self._knows_replica(sentinel), "the sentinel to know the replica")

    def _knows_replica(self, sentinel: redis.Redis) -> bool:
        try:
            return bool(sentinel.sentinel_slaves(NAME))
        except redis.ConnectionError:
            return False

    def until_in_step(self) -> None:
        """Wait until the replica has all that the primary has."""

        def in_step() -> bool:
            with connect(self.primary.url) as primary, redis.Redis(port=self.replica.port) as replica:
                there = replica.info("replication")
                at = primary.info("replication")["master_repl_offset"]
                return there.get("master_link_status") == "up" and there["slave_repl_offset"] >= at

        until(in_step, "the replica to be in step")

    def cut_replication(self) -> None:
        """From now on the replica gets nothing; everything else goes on."""
        with connect(self.primary.url) as client:
            client.execute_command("ACL", "SETUSER", "replica", "off")
            client.execute_command("CLIENT", "KILL", "USER", "replica")

    def until_failed_over(self) -> None:
        """Wait until the sentinel names the other one."""
        with redis.Redis(port=self._port, decode_responses=True) as sentinel:
            until(
                lambda: sentinel.sentinel_get_master_addr_by_name(NAME)[1] == self.replica.port,
                "the failover",
                timeout_s=400,
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.primary.kill()
        self.replica.kill()


@contextlib.contextmanager
def sentinels(folder: Path) -> Iterator[Sentinels]:
    made = Sentinels(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
