"""Machines, and which of their GPUs are free."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.metrics.gpu_load import visible_gpus

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine, by the address at which the others reach it."""

    host: str
    gpus: tuple[int, ...] = ()
    #: Names for CUDA_VISIBLE_DEVICES on that machine; empty: their ids.
    names: tuple[str, ...] = ()

    def visible(self, gpus: Iterable[int]) -> str:
        """Return CUDA_VISIBLE_DEVICES for these ids."""
        return ",".join(self.names[self.gpus.index(gpu)] if self.names else str(gpu) for gpu in gpus)


def local_nodes(config: Config) -> list[Node]:
    """Return the nodes of ``fleet.nodes``; without them this machine with the GPUs that this process may use."""
    if config.fleet.nodes:
        return [Node(node.host, tuple(range(node.num_gpus))) for node in config.fleet.nodes]
    names = visible_gpus()
    return [Node(LOOPBACK, tuple(range(len(names))), names)]


@dataclass(slots=True)
class Inventory:
    """Assignment of GPUs. They are assigned in the order of nodes and ids."""

    nodes: list[Node]
    #: (host, gpu) -> engine that has it.
    owners: dict[tuple[str, int], str] = field(default_factory=dict)
    #: Processes per host.
    load: dict[str, int] = field(default_factory=dict)

    def node(self, host: str) -> Node:
        return next(node for node in self.nodes if node.host == host)

    def free(self, node: Node) -> list[int]:
        return [gpu for gpu in node.gpus if (node.host, gpu) not in self.owners]

    def assign(self, who: str, host: str, gpus: Iterable[int]) -> None:
        self.load[host] = self.load.get(host, 0) + 1
        for gpu in gpus:
            self.owners[host, gpu] = who

    def take(self, who: str, num_gpus: int, host: str | None) -> list[tuple[str, tuple[int, ...]]]:
        """Assign GPUs to one engine: on one node, or all of several nodes if it needs more than one has.

        Raises:
            ConfigError: not enough are free; the message says what is free on each node.
        """
        nodes = self._candidates(who, host)
        if num_gpus == 0:
            node = min(nodes, key=lambda one: self.load.get(one.host, 0))
            self.assign(who, node.host, ())
            return [(node.host, ())]
        largest = max(len(node.gpus) for node in nodes)
        per_node = min(num_gpus, largest)
        if per_node == 0 or num_gpus % per_node:
            raise ConfigError(
                f"{who}: an engine of {num_gpus} GPUs cannot be divided over nodes of {largest}: "
                "use a multiple of a node's GPUs, or fewer."
            )
        taken: list[tuple[str, tuple[int, ...]]] = []
        for node in nodes:
            if len(taken) < num_gpus // per_node and len(free := self.free(node)) >= per_node:
                gpus = tuple(free[:per_node])
                self.assign(who, node.host, gpus)
                taken.append((node.host, gpus))
        if len(taken) < num_gpus // per_node:
            shown = ", ".join(f"{node.host} {len(self.free(node))} of {len(node.gpus)}" for node in nodes)
            raise ConfigError(
                f"{who} needs {num_gpus} GPUs ({per_node} on each of {num_gpus // per_node} node"
                f"{'s' if num_gpus > per_node else ''}), and what is free is: {shown}; "
                "lower num_gpus or name more nodes in fleet.nodes."
            )
        return taken

    def take_exactly(self, who: str, host: str | None, gpus: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """Assign these GPU ids of one node; raises ConfigError if one does not exist or is assigned already."""
        nodes = self._candidates(who, host)
        if len(nodes) > 1:
            raise ConfigError(f"{who}: gpus {list(gpus)} do not say on which node they are: set host too.")
        node = nodes[0]
        for gpu in gpus:
            if gpu not in node.gpus:
                raise ConfigError(f"{who}: host {node.host} has no GPU {gpu}, but {len(node.gpus)} GPUs from 0 on.")
            if other := self.owners.get((node.host, gpu)):
                raise ConfigError(
                    f"{who} and {other} both want GPU {gpu} of {node.host}: give each group GPUs of its own."
                )
        self.assign(who, node.host, gpus)
        return [(node.host, gpus)]

    def _candidates(self, who: str, host: str | None) -> list[Node]:
        nodes = [node for node in self.nodes if host is None or node.host == host]
        if not nodes:
            known = ", ".join(node.host for node in self.nodes) or "none"
            raise ConfigError(f"{who}: host {host} is not a node of the fleet (there: {known}); add it to fleet.nodes.")
        return nodes
