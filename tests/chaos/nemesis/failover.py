"""A failover by a sentinel to a replica that is behind: what it did not have yet is lost, and must be reported."""

import contextlib
import time
from collections.abc import Callable
from random import Random
from typing import Any

import redis

from penstock.system.processes import free_port
from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.redis_conf import redis_conf
from tests.chaos.cluster.supervisor import Part
from tests.chaos.nemesis.act import Facts, Ground, Kind

#: As the sentinel calls the server.
NAME = "control"
#: The other server of the two.
OTHER = {"redis": "replica", "replica": "redis"}
#: A primary that is silent for so long is down to the sentinel (ms). A failover that is wanted is asked for: one that
#: it begins by itself, since a busy machine kept a primary from answering, loses writes outside of every fault.
DOWN_MS = 30_000
#: User by which one copies the other, so that this alone can be cut.
COPIER = "replica"


class Failover:
    """A replica and a sentinel beside the Redis of a cluster; every part asks the sentinel where the primary is.

    Made before the cluster is entered, since it tells the parts whom to ask.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sentinel_port = free_port()
        self._ports = {"redis": cluster.redis_port, "replica": free_port()}
        self.primary = "redis"
        # A dead sentinel first, which all have to get over.
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self._sentinel_port}/{NAME}"
        cluster.url_for = lambda name: url

    def start(self) -> None:
        """Start them; blocks until the replica is in step and the sentinel knows it."""
        cluster = self._cluster
        self._add("replica", "redis.conf", redis_conf(cluster.binary, self._ports["replica"], cluster.workload.redis))
        for name in self._ports:
            self._prepare(name)
        self._copies("replica", "redis")
        conf = (
            f"bind 127.0.0.1\nport {self._sentinel_port}\ndir .\n"
            f"sentinel monitor {NAME} 127.0.0.1 {self._ports['redis']} 1\n"
            f"sentinel down-after-milliseconds {NAME} {DOWN_MS}\nsentinel failover-timeout {NAME} 2000\n"
        )
        self._add("sentinel", "sentinel.conf", conf, "--sentinel")
        self._cluster.wait("the sentinel to know the replica", self._is_known)

    def _add(self, name: str, file: str, conf: str, *words: str) -> None:
        folder = self._cluster.folder / name
        folder.mkdir(exist_ok=True)
        (folder / file).write_text(conf)
        shell = 'cd "$0" && exec "$@"'
        command = ["/bin/sh", "-c", shell, str(folder), str(self._cluster.binary), file, *words]
        part = Part("sentinel", name, command, {}, log=self._cluster.folder / "logs" / f"{name}.log")
        self._cluster.supervisor.add(part)

    def client(self, name: str) -> redis.Redis:
        return redis.Redis(port=self._ports[name], socket_timeout=5.0, retry=None)

    def _prepare(self, name: str) -> None:
        """What a server forgets when it is started again."""

        def prepared() -> bool:
            with self.client(name) as client:
                client.execute_command("ACL", "SETUSER", COPIER, "on", "nopass", "+psync", "+replconf", "+ping")
                client.config_set("masteruser", COPIER)
                client.config_set("masterauth", "any")
                return True

        self._cluster.wait(f"{name} to answer", lambda: _true(prepared))

    def _copies(self, name: str, of: str) -> None:
        """``name`` becomes a replica, and gets in step."""
        with self.client(name) as client, self.client(of) as primary:
            self._cluster.wait(f"{name} to follow", lambda: _true(lambda: self._follows(client, of)))
            self._cluster.wait(f"{name} to be in step", lambda: _true(lambda: _in_step(client, primary)))

    def _follows(self, client: redis.Redis, of: str) -> bool:
        return bool(client.replicaof("127.0.0.1", self._ports[of]))

    def _is_known(self) -> bool:
        with redis.Redis(port=self._sentinel_port, retry=None) as sentinel:
            return _true(lambda: bool(sentinel.sentinel_slaves(NAME)))

    def fall_behind(self) -> None:
        """From now on the replica gets nothing; everything else goes on."""
        with self.client(self.primary) as client:
            client.execute_command("ACL", "SETUSER", COPIER, "off")
            client.execute_command("CLIENT", "KILL", "USER", COPIER)

    def fail_over(self) -> None:
        """Kill the primary; blocks until the other one is it, and the old one follows."""
        cluster, old = self._cluster, self.primary
        cluster.hold_down(cluster.parts[old])
        cluster.kill(cluster.parts[old])
        new = OTHER[old]
        cluster.wait("the failover", lambda: self._has_moved_to(self._ports[new]))
        with self.client(new) as client:
            cluster.wait("the new primary to take writes", lambda: _true(lambda: _role(client) == "master"))
        self.primary = new
        cluster.move_to(self._ports[new])
        self._prepare(new)
        cluster.let_up(cluster.parts[old])
        self._prepare(old)
        cluster.wait(f"{old} to be in step", lambda: _true(self._is_settled))

    def _has_moved_to(self, port: int) -> bool:
        """Whether the sentinel names it as the primary; else it is asked for a failover, if none is under way."""
        if self._named() == port:
            return True
        with redis.Redis(port=self._sentinel_port, retry=None) as sentinel, contextlib.suppress(redis.ResponseError):
            sentinel.execute_command("SENTINEL", "FAILOVER", NAME)
        return False

    def _is_settled(self) -> bool:
        """Does the one copy the other? On a slow machine a sentinel may fail over once more, back to the old one."""
        named = self._named()
        name = next((name for name, port in self._ports.items() if port == named), "")
        if not name:
            return False
        with self.client(OTHER[name]) as client, self.client(name) as primary:
            if _role(primary) != "master":
                return False
            if name != self.primary:
                self.primary = name
                self._cluster.move_to(named)
            if client.info("replication").get("master_port") != named:
                self._follows(client, name)
            return _in_step(client, primary)

    def _named(self) -> int:
        with redis.Redis(port=self._sentinel_port, decode_responses=True, retry=None) as sentinel:
            address = sentinel.sentinel_get_master_addr_by_name(NAME)
        return int(address[1]) if address else 0


def _in_step(replica: redis.Redis, primary: redis.Redis) -> bool:
    there = replica.info("replication")
    at = primary.info("replication")["master_repl_offset"]
    return there.get("master_link_status") == "up" and int(there["slave_repl_offset"]) >= at - 1


def _role(client: redis.Redis) -> str:
    return str(client.info("replication")["role"])


def _true(ask: Callable[[], Any]) -> bool:
    try:
        return bool(ask())
    except redis.RedisError:
        return False


def _choose(ground: Ground, rng: Random) -> Facts | None:
    return {"behind_s": round(rng.uniform(0.2, 2.0), 3)} if ground.failover is not None else None


def _strike(ground: Ground, facts: Facts) -> None:
    assert ground.failover is not None
    ground.failover.fall_behind()
    time.sleep(facts["behind_s"])
    ground.failover.fail_over()


#: Kinds that lose what was acknowledged, by their nature.
LOSSY = frozenset({"sentinel:failover_behind"})


def kinds() -> dict[str, Kind]:
    """By name."""
    return {"sentinel:failover_behind": Kind(_choose, _strike)}
