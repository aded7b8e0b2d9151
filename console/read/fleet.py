"""The running fleet: its groups, its processes, and the decisions of its autoscaler."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.protocol.keys import Keys
from penstock.redis.commands import Client

_DECISION = ("at", "before", "engines", "wanted", "binds", "terms")


def read_fleet(client: Client, keys: Keys) -> dict[str, Any] | None:
    """Return the state published by ``penstock fleet up``; None if no fleet runs. Blocks for a round trip.

    Raises ProtocolError.

    Returns:
        ``groups`` and ``processes`` as rows; ``autoscale``: the current limit, {} if nothing is scaled;
        ``decisions``: changes of its size, latest first; unreadable ones are skipped.
    """
    from penstock.workers.fleet.state import read_state

    try:
        state = read_state(client, keys)
    except ConfigError:
        return None
    auto = state["autoscale"]
    return {
        "host": state["host"],
        "age_s": state["age_s"],
        "groups": [{"group": name, **group} for name, group in state["groups"].items()],
        "processes": state["processes"],
        "endpoints": state["endpoints"],
        "autoscale": {name: value for name, value in auto.items() if name != "decisions"},
        "decisions": decisions_of(auto),
    }


def decisions_of(autoscale: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the autoscaler's decisions, latest first; invalid ones are skipped."""
    told = autoscale.get("decisions", [])
    decisions = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    return [{name: one.get(name) for name in _DECISION} for one in reversed(decisions)]
