"""First fit of GPUs and ports on machines that are known beforehand."""

import socket
from dataclasses import dataclass

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.metrics.gpu_load import numbered, visible_gpus
from penstock.workers.fleet.launcher import Slot

LOOPBACK = "127.0.0.1"
#: Ports of one process.
BLOCK = 10


@dataclass(frozen=True, slots=True)
class Node:
    """One machine, by the address at which the others reach it."""

    host: str
    #: Names of its GPUs for CUDA_VISIBLE_DEVICES; their ids are the positions here.
    names: tuple[str, ...] = ()


def local_nodes(config: Config) -> list[Node]:
    """Return the nodes of ``fleet.nodes``; without them this machine with the GPUs that this process may use."""
    return [Node(node.host, numbered(node.num_gpus)) for node in config.fleet.nodes] or [Node(LOOPBACK, visible_gpus())]


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
    """Machines and the slots on them: the first free GPUs and ports, in the order of nodes and numbers.

    Args:
        ports: first and last that may be used.
        reserves: reserve ports on this machine; False only plans.
    """

    def __init__(self, nodes: list[Node], ports: tuple[int, int], *, reserves: bool = False) -> None:
        self.nodes = nodes
        self._assigned: list[tuple[str, Slot]] = []
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
            return self._assign(engine, [(self._check_exactly(engine, nodes, gpus), gpus)])
        if num_gpus == 0:
            return self._assign(engine, [(min(nodes, key=lambda node: len(self._on(node))), ())])
        per_node = gpus_per_node(engine, num_gpus, max(len(node.names) for node in nodes))
        count, free = num_gpus // per_node, [(node, self._free(node)) for node in nodes]
        fitting = [(node, gpus[:per_node]) for node, gpus in free if len(gpus) >= per_node]
        if len(fitting) < count:
            shown = ", ".join(f"{node.host} {len(gpus)} of {len(node.names)}" for node, gpus in free)
            raise ConfigError(
                f"{engine} needs {num_gpus} GPUs ({per_node} on each of {count} node{'s' if count > 1 else ''}), and "
                f"what is free is: {shown}; lower num_gpus or name more nodes in fleet.nodes."
            )
        return self._assign(engine, fitting[:count])

    def _on(self, node: Node) -> list[tuple[str, Slot]]:
        return [(engine, slot) for engine, slot in self._assigned if slot.host == node.host]

    def _free(self, node: Node) -> tuple[int, ...]:
        taken = {gpu for _, slot in self._on(node) for gpu in slot.gpus}
        return tuple(gpu for gpu in range(len(node.names)) if gpu not in taken)

    def _check_exactly(self, engine: str, nodes: list[Node], gpus: tuple[int, ...]) -> Node:
        """Return the node that has these GPUs free. Raises ConfigError if none is named, or it has not."""
        if len(nodes) > 1:
            raise ConfigError(f"{engine}: gpus {list(gpus)} do not say on which node they are: set host too.")
        (node,) = nodes
        for gpu in gpus:
            if gpu >= len(node.names):
                raise ConfigError(f"{engine}: host {node.host} has no GPU {gpu}, but {len(node.names)} GPUs from 0 on.")
            if other := next((other for other, slot in self._on(node) if gpu in slot.gpus), None):
                raise ConfigError(
                    f"{engine} and {other} both want GPU {gpu} of {node.host}: give each group GPUs of its own."
                )
        return node

    def _assign(self, engine: str, places: list[tuple[Node, tuple[int, ...]]]) -> list[Slot]:
        slots = [Slot(node.host, gpus, ",".join(node.names[gpu] for gpu in gpus)) for node, gpus in places]
        self._assigned += [(engine, slot) for slot in slots]
        return slots

    def ports(self, owner: str, host: str) -> int:
        """Assign ports; see Places."""
        return self._ports[host].take(owner)

    def release(self, owner: str) -> None:
        """Release GPUs and ports; see Places."""
        self._assigned = [(engine, slot) for engine, slot in self._assigned if engine != owner]
        for ports in self._ports.values():
            ports.release(owner)


class Ports:
    """Assign blocks of ``BLOCK`` ports of one machine, each once, in order.

    Args:
        first, last: the range, both included.
        reserves: reserve ports on this machine; False: all are free.
    """

    def __init__(self, host: str, first: int, last: int, *, reserves: bool = False) -> None:
        self._host, self._first, self._last = host, first, last
        self._reserves = reserves
        #: First port of a block -> its owner and its reservation.
        self._taken: dict[int, tuple[str, socket.socket | None]] = {}

    def take(self, owner: str) -> int:
        """Return the first port of a free block. Raises ConfigError if the range is used up."""
        # Blocks begin at the same ports in every range, so that two fleets never share a part of one.
        for first in range(-(-self._first // BLOCK) * BLOCK, self._last - BLOCK + 2, BLOCK):
            if first not in self._taken:
                reservation = reserve(first) if self._reserves else None
                if reservation is not None or not self._reserves:
                    self._taken[first] = (owner, reservation)
                    return first
        raise ConfigError(
            f"fleet.ports [{self._first}, {self._last}] is too small for host {self._host}: no block of {BLOCK} ports "
            f"from a multiple of {BLOCK} is free for {owner}; widen the range."
        )

    def release(self, owner: str) -> None:
        """Release the ports of an owner."""
        for first, (who, reservation) in list(self._taken.items()):
            if who == owner:
                del self._taken[first]
                if reservation is not None:
                    reservation.close()


def reserve(first: int) -> socket.socket | None:
    """Reserve a block of ports against other fleets on this machine, until the returned socket is closed.

    Returns None if it is reserved, or one of its ports is in use.
    """
    reservation = socket.socket(socket.AF_UNIX)
    try:
        # An abstract name lives as long as its socket, in the network namespace that the ports belong to.
        reservation.bind(f"\0penstock-ports-{first}")
        for port in range(first, first + BLOCK):
            with socket.socket() as probe:
                # As a server does that reuses the port of another: closing connections do not block it.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))
    except OSError:
        reservation.close()
        return None
    return reservation
