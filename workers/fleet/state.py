"""The state of a fleet in Redis, and requests to scale it: fields of the hash ``fleet``."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, FiniteFloat, ValidationError

from penstock.config.reading.validation_errors import explain
from penstock.errors import ConfigError, ProtocolError
from penstock.metrics.series import counter, gauge
from penstock.protocol import scripts
from penstock.protocol.presence import GONE_S
from penstock.protocol.scripts import run
from penstock.records.codec import pack, unpack, unpack_map
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.text import safe_repr

PROCESSES = gauge("fleet_processes", "Processes of the fleet, by kind and state.", "kind", "state")
STARTS = counter("fleet_process_starts", "Starts of a process, the first one included.", "process")
ENGINES = gauge("fleet_engines", "Engines of a group, starting and draining ones included.", "group")
LEAVING = gauge("fleet_leaving_engines", "Engines of a group that are being drained.", "group")
REFUSED = gauge("fleet_refused", "1 if the group could not be scaled as requested.", "group")

SERIES = (PROCESSES, STARTS, ENGINES, LEAVING, REFUSED)


class FleetCollector(Collector):
    """Read the fleet's published state. Called in the server's thread.

    Args:
        shown: returns the last record, which is never changed.
    """

    def __init__(self, shown: Callable[[], Mapping[str, Any]]) -> None:
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        record = self._shown()
        processes, groups = record.get("processes", []), record.get("groups", {})
        yield PROCESSES.each(Counter((one["kind"], str(one["state"])) for one in processes))
        yield STARTS.each([(one["name"], one["starts"]) for one in processes])
        yield ENGINES.each({name: one["engines"] for name, one in groups.items()})
        yield LEAVING.each({name: one["leaving"] for name, one in groups.items()})
        yield REFUSED.each({name: float(bool(one["refused"])) for name, one in groups.items()})


STATE, WANTED, CAPACITY = "state", "wanted", "capacity"
#: Most engines of a group that may be requested.
MAX_WANTED = 100_000


class _Group(BaseModel):
    worker_type: str
    engines: int


class _Autoscaler(BaseModel):
    group: str
    engines: int
    wanted: int
    binds: str
    capacity_tokens_per_s: float


class _State(BaseModel):
    """Fields of a fleet's record that readers rely on; it may have more."""

    at: FiniteFloat
    host: str
    groups: dict[str, _Group]
    processes: list[dict[str, Any]]
    endpoints: dict[str, str]
    autoscale: _Autoscaler | None


def write_state(client: Client, keys: Keys, record: dict[str, Any]) -> None:
    """Publish the state of the fleet; an empty record removes it."""
    value = pack(record | {"at": time.time()}) if record else b""
    run(client, scripts.note(keys, keys.fleet, STATE, value))


def read_state(client: Client, keys: Keys) -> dict[str, Any]:
    """Return the fleet's last record, with ``age_s``.

    Raises:
        ConfigError: no fleet runs.
        ProtocolError: penstock did not write the record.
    """
    what = "The state of the fleet"
    if data := client.hget(keys.fleet, STATE):
        record = unpack_map(data, what)
        try:
            state = _State.model_validate(record | {"autoscale": record.get("autoscale") or None}, strict=True)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            name = ".".join(map(safe_repr, error["loc"]))
            raise ProtocolError(f"{what} has an invalid field {name}: {explain(error)}.") from exc
        if (age_s := time.time() - state.at) <= GONE_S:
            return record | {"age_s": age_s}
    raise ConfigError(f"No fleet of run {keys.run} is running: start one with `penstock fleet up --config FILE`.")


def write_wanted(client: Client, keys: Keys, group: str, count: int) -> None:
    """Request a number of engines of a group, ``MODEL.GROUP``; requests for other groups stay."""
    wanted = read_wanted(client, keys) | {group: count}
    run(client, scripts.note(keys, keys.fleet, WANTED, pack(wanted)))


def clear_wanted(client: Client, keys: Keys) -> None:
    """Remove all requests: the configuration counts."""
    run(client, scripts.note(keys, keys.fleet, WANTED, b""))


def read_wanted(client: Client, keys: Keys) -> dict[str, int]:
    """Return the requested engines, by ``MODEL.GROUP``. Raises ProtocolError if the record is not such a map."""
    data = client.hget(keys.fleet, WANTED)
    value = unpack(data, "what is wanted of the fleet") if data else {}
    fine = isinstance(value, dict) and all(type(n) is int and 0 <= n <= MAX_WANTED for n in value.values())
    if not fine:
        raise ProtocolError("What is wanted of the fleet is not a map of groups to numbers.")
    return dict(value)


def write_capacity(client: Client, keys: Keys, tokens_per_s: float) -> None:
    """Save the token rate of a worker of this run with full slots, for the next fleet."""
    run(client, scripts.note(keys, keys.fleet, CAPACITY, pack(tokens_per_s)))


def read_capacity(client: Client, keys: Keys) -> float:
    """Return the rate that an earlier fleet saved; 0 if none. Raises ProtocolError if it is not a rate."""
    data = client.hget(keys.fleet, CAPACITY)
    value = unpack(data, "the capacity of a worker") if data else 0.0
    if not isinstance(value, float) or not 0 <= value < float("inf"):
        raise ProtocolError("The capacity of a worker is not a rate that penstock wrote.")
    return value
