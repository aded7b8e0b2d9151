"""Metrics of one fleet: its processes, the engines of each group, and failed requests to scale."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.system.metrics.series import counter, gauge

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
