"""Plans of a fleet on free ports: reserved on their nodes, and released with the engines."""

from collections.abc import Callable

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.workers.fleet.launcher import Launcher
from penstock.workers.fleet.nodes import Node
from penstock.workers.fleet.plan import Plan, extend, plan

#: Attempts to find free ports.
MAX_PLANS = 20


class ReservedPlans:
    """Plan one fleet on its nodes."""

    def __init__(self, config: Config, nodes: list[Node], launcher: Launcher) -> None:
        self._config = config
        self._nodes = nodes
        self._launcher = launcher
        #: Host -> ports found to be in use by others.
        self._taken: dict[str, frozenset[int]] = {}

    def first(self) -> Plan:
        """Return the plan of the configured fleet. Raises ConfigError if it cannot be placed."""
        return self._reserved(lambda: plan(self._config, self._nodes, self._taken), None)

    def extended(self, old: Plan, model: str, group: str) -> Plan:
        """Return a plan with one more engine in a group. Raises ConfigError if it cannot be placed."""
        return self._reserved(lambda: extend(self._config, self._nodes, old, model, group, self._taken), old)

    def without(self, old: Plan, key: tuple[str, str, int]) -> Plan:
        """Return a plan without one engine, and release its ports."""
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
        """Reserve what a plan adds, on every node; return True if others use some of it."""
        refused = False
        for node in self._nodes:
            if bad := self._launcher.reserve(node.host, _added(new, old, node.host)):
                self._taken[node.host] = self._taken.get(node.host, frozenset()) | frozenset(bad)
                refused = True
        return refused


def _added(new: Plan, old: Plan | None, host: str) -> list[int]:
    known = set(old.ports(host)) if old is not None else set()
    return [port for port in new.ports(host) if port not in known]
