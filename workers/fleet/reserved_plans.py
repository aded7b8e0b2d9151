"""Plans of a fleet on ports that nobody else has: reserved on their nodes, and given back with the engines."""

from collections.abc import Callable

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.workers.fleet.launcher import Launcher
from penstock.workers.fleet.nodes import Node
from penstock.workers.fleet.plan import Plan, extend, plan

#: Tries to find ports that are free.
MAX_PLANS = 20


class ReservedPlans:
    """Lays out one fleet on its nodes."""

    def __init__(self, config: Config, nodes: list[Node], launcher: Launcher) -> None:
        self._config = config
        self._nodes = nodes
        self._launcher = launcher
        #: Host -> ports that others turned out to have.
        self._taken: dict[str, frozenset[int]] = {}

    def first(self) -> Plan:
        """The fleet as it is configured. Raises ConfigError where it cannot be laid out."""
        return self._reserved(lambda: plan(self._config, self._nodes, self._taken), None)

    def extended(self, old: Plan, model: str, group: str) -> Plan:
        """One more engine in a group. Raises ConfigError where there is no room for it."""
        return self._reserved(lambda: extend(self._config, self._nodes, old, model, group, self._taken), old)

    def without(self, old: Plan, key: tuple[str, str, int]) -> Plan:
        """One engine less, whose ports are given back."""
        new = old.without(key)
        for host in {engine.host for engine in old.engines if engine.key == key and engine.host}:
            self._launcher.release(host, sorted(set(old.ports(host)) - set(new.ports(host))))
        return new

    def _reserved(self, lay_out: Callable[[], Plan], old: Plan | None) -> Plan:
        for _ in range(MAX_PLANS):
            new = lay_out()
            if not self._refused(new, old):
                return new
            for node in self._nodes:
                self._launcher.release(node.host, _added(new, old, node.host))
        raise ConfigError(
            f"fleet.ports {list(self._config.fleet.ports)}: others take its ports faster than they are planned."
        )

    def _refused(self, new: Plan, old: Plan | None) -> bool:
        """Reserve what a plan adds, on every node; True where others have some of it."""
        refused = False
        for node in self._nodes:
            if bad := self._launcher.reserve(node.host, _added(new, old, node.host)):
                self._taken[node.host] = self._taken.get(node.host, frozenset()) | frozenset(bad)
                refused = True
        return refused


def _added(new: Plan, old: Plan | None, host: str) -> list[int]:
    known = set(old.ports(host)) if old is not None else set()
    return [port for port in new.ports(host) if port not in known]
