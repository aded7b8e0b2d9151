"""First fit of GPUs and ports on machines that are known beforehand."""

import fcntl
import os
import socket
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.metrics.gpu_load import visible_gpus
from penstock.system.disk import own_file, own_folder
from penstock.workers.fleet.launcher import Slot

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine, by the address at which the others reach it."""

    host: str
    gpus: tuple[int, ...] = ()
    #: Names for CUDA_VISIBLE_DEVICES on that machine; empty: their ids.
    names: tuple[str, ...] = ()

    def slot(self, gpus: tuple[int, ...]) -> Slot:
        names = (self.names[self.gpus.index(gpu)] if self.names else str(gpu) for gpu in gpus)
        return Slot(self.host, gpus, ",".join(names))


def local_nodes(config: Config) -> list[Node]:
    """Return the nodes of ``fleet.nodes``; without them this machine with the GPUs that this process may use."""
    if config.fleet.nodes:
        return [Node(node.host, tuple(range(node.num_gpus))) for node in config.fleet.nodes]
    names = visible_gpus()
    return [Node(LOOPBACK, tuple(range(len(names))), names)]


def gpus_per_node(engine: str, num_gpus: int, largest: int) -> int:
    """Return the GPUs that an engine takes on each node. Raises ConfigError if they do not divide."""
    per_node = min(num_gpus, largest)
    if per_node == 0 or num_gpus % per_node:
        raise ConfigError(
            f"{engine}: an engine of {num_gpus} GPUs cannot be divided over nodes of {largest}: "
            "use a multiple of a node's GPUs, or fewer."
        )
    return per_node


class Nodes:
    """Machines and who has their GPUs and ports: the first free ones, in the order of nodes and numbers.

    Args:
        ports: first and last that may be used.
        reserves: reserve ports on this machine; False only plans.
    """

    def __init__(self, nodes: list[Node], ports: tuple[int, int], *, reserves: bool = False) -> None:
        self.nodes = nodes
        self._owners: dict[tuple[str, int], str] = {}
        self._load: Counter[str] = Counter()
        self._ports = {node.host: Ports(node.host, *ports, reserves=reserves) for node in nodes}

    @property
    def hosts(self) -> list[str]:
        return [node.host for node in self.nodes]

    def take(
        self, engine: str, num_gpus: int, host: str | None = None, gpus: tuple[int, ...] | None = None
    ) -> list[Slot]:
        """Assign GPUs; see Places."""
        nodes = [node for node in self.nodes if host in (None, node.host)]
        if not nodes:
            known = ", ".join(self.hosts) or "none"
            raise ConfigError(
                f"{engine}: host {host} is not a node of the fleet (there: {known}); add it to fleet.nodes."
            )
        if gpus is not None:
            self._check_exactly(engine, nodes, gpus)
            return self._assigned(engine, [nodes[0].slot(gpus)])
        if num_gpus == 0:
            return self._assigned(engine, [min(nodes, key=lambda one: self._load[one.host]).slot(())])
        per_node = gpus_per_node(engine, num_gpus, max(len(node.gpus) for node in nodes))
        count, free = num_gpus // per_node, {node.host: self._free(node) for node in nodes}
        slots = [node.slot(free[node.host][:per_node]) for node in nodes if len(free[node.host]) >= per_node]
        if len(slots) < count:
            shown = ", ".join(f"{node.host} {len(free[node.host])} of {len(node.gpus)}" for node in nodes)
            raise ConfigError(
                f"{engine} needs {num_gpus} GPUs ({per_node} on each of {count} node{'s' if count > 1 else ''}), and "
                f"what is free is: {shown}; lower num_gpus or name more nodes in fleet.nodes."
            )
        return self._assigned(engine, slots[:count])

    def _free(self, node: Node) -> tuple[int, ...]:
        return tuple(gpu for gpu in node.gpus if (node.host, gpu) not in self._owners)

    def _check_exactly(self, engine: str, nodes: list[Node], gpus: tuple[int, ...]) -> None:
        if len(nodes) > 1:
            raise ConfigError(f"{engine}: gpus {list(gpus)} do not say on which node they are: set host too.")
        for gpu in gpus:
            host = nodes[0].host
            if gpu not in nodes[0].gpus:
                raise ConfigError(f"{engine}: host {host} has no GPU {gpu}, but {len(nodes[0].gpus)} GPUs from 0 on.")
            if other := self._owners.get((host, gpu)):
                raise ConfigError(
                    f"{engine} and {other} both want GPU {gpu} of {host}: give each group GPUs of its own."
                )

    def _assigned(self, engine: str, slots: list[Slot]) -> list[Slot]:
        for slot in slots:
            self._load[slot.host] += 1
            self._owners |= {(slot.host, gpu): engine for gpu in slot.gpus}
        return slots

    def port(self, owner: str, host: str, count: int = 1) -> int:
        """Assign ports; see Places."""
        return self._ports[host].take(owner, count)

    def release(self, owner: str) -> None:
        """Release GPUs and ports; see Places."""
        self._owners = {gpu: who for gpu, who in self._owners.items() if who != owner}
        for ports in self._ports.values():
            ports.release(owner)


class Ports:
    """Assign ports of one machine, each once, in order.

    Args:
        first, last: the range, both included.
        reserves: reserve ports on this machine; False: all are free.
    """

    def __init__(self, host: str, first: int, last: int, *, reserves: bool = False) -> None:
        self._host, self._first, self._last = host, first, last
        self._reserves = reserves
        self._owners: dict[int, str] = {}
        self._locks: dict[int, int] = {}

    def take(self, owner: str, count: int = 1) -> int:
        """Return the first of ``count`` ports in a row. Raises ConfigError if the range is used up."""
        start = self._first
        while start + count - 1 <= self._last:
            row = range(start, start + count)
            blocked = next((port for port in row if port in self._owners or not self._held(port)), None)
            if blocked is None:
                self._owners |= dict.fromkeys(row, owner)
                return start
            start = blocked + 1
            self._close_unused()
        raise ConfigError(
            f"fleet.ports [{self._first}, {self._last}] is too small for host {self._host}: no {count} free port"
            f"{'s in a row' if count > 1 else ''} left for {owner}; widen the range."
        )

    def release(self, owner: str) -> None:
        """Release the ports of an owner."""
        self._owners = {port: who for port, who in self._owners.items() if who != owner}
        self._close_unused()

    def _held(self, port: int) -> bool:
        if not self._reserves:
            return True
        if (lock := reserve(port)) is not None:
            self._locks[port] = lock
        return lock is not None

    def _close_unused(self) -> None:
        for port in self._locks.keys() - self._owners.keys():
            os.close(self._locks.pop(port))


def reserve(port: int) -> int | None:
    """Reserve a port against other penstock fleets of this user on this machine, until the returned file is closed.

    Returns None if it is reserved or in use.

    Raises:
        ConfigError: another user owns the folder of reservations.
    """
    folder = Path(tempfile.gettempdir()) / f"penstock-ports-{os.getuid()}"
    try:
        own_folder(folder)
        lock = own_file(folder / str(port))
    except PermissionError as exc:
        raise ConfigError(f"fleet.ports cannot be reserved ({exc}): set TMPDIR to a folder of your own.") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            # As a server does that reuses the port of another: closing connections do not block it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))
    except OSError:
        os.close(lock)
        return None
    return lock
