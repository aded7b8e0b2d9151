"""Metrics of one fleet: its processes, the engines of each group, and what it could not do."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.system.metrics.series import counter, gauge

PROCESSES = gauge("fleet_processes", "Processes of the fleet, by what they are and how they stand.", "kind", "state")
STARTS = counter("fleet_process_starts", "Starts of a process, the first one among them.", "process")
ENGINES = gauge("fleet_engines", "Engines of a group, those on their way in or out too.", "group")
LEAVING = gauge("fleet_leaving_engines", "Those of them that are drained, and then go.", "group")
REFUSED = gauge("fleet_refused", "1 where the group could not be made as large as it was asked to be.", "group")

SERIES = (PROCESSES, STARTS, ENGINES, LEAVING, REFUSED)


class FleetCollector(Collector):
    """Reads what the fleet shows of itself. Called from the server's thread.

    Args:
        shown: the record as it was made last, which nobody changes any more.
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
