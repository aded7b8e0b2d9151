"""Metrics of ``penstock run``: its processes and disks; and the file by which Prometheus finds the parts."""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import redis
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.config import Config
from penstock.errors import DiskFull
from penstock.metrics.series import counter, gauge
from penstock.metrics.server import Exporter, Group, targets, write_targets
from penstock.records.keys import Keys
from penstock.redis.append_only import read_synced
from penstock.redis.commands import Client
from penstock.redis.connect import translate
from penstock.system.disk import is_full
from penstock.system.processes import Child

log = logging.getLogger(__name__)

TARGETS_FILE = "targets.json"

UP = gauge("launcher_process_up", "1 while a process of the run is running, else 0.", "process")
STARTS = counter("launcher_process_starts", "Starts of a process, the first one among them.", "process")
FREE = gauge("launcher_disk_free_bytes", "Free space on the disk of the run's folder or weights.", "place")
SIZE = gauge("launcher_disk_size_bytes", "Size of that disk.", "place")

SYNCED = gauge(
    "launcher_redis_synced_seconds", "Since the append-only file of the run's own Redis was last taken to disk."
)

SERIES = (UP, STARTS, FREE, SIZE, SYNCED)


class LauncherCollector(Collector):
    """Collects metrics of processes and disks at each scrape. Called from the server's thread.

    Args:
        children: the launcher's own list, which grows while a run is started.
        places: name -> folder.
        redis: folder of a server that the launcher syncs.
    """

    def __init__(self, children: Sequence[Child], places: Mapping[str, Path], redis: Path | None = None) -> None:
        self._children = children
        self._places = places
        self._redis = redis

    def collect(self) -> Iterator[Metric]:
        children = list(self._children)
        # The launcher itself reaps ended processes: only test here whether one is running.
        yield UP.each([(child.name, float(child.pid is not None)) for child in children])
        yield STARTS.each([(child.name, child.num_starts) for child in children])
        disks = {name: shutil.disk_usage(_nearest(folder)) for name, folder in self._places.items()}
        yield FREE.each([(name, disk.free) for name, disk in disks.items()])
        yield SIZE.each([(name, disk.total) for name, disk in disks.items()])
        if self._redis is not None and (noted := read_synced(self._redis)) is not None:
            yield SYNCED.of(noted.age_s)


def _nearest(folder: Path) -> Path:
    """Return ``folder``, or its nearest existing parent."""
    return next(one for one in (folder, *folder.parents) if one.exists())


class RunMetrics:
    """Serve the launcher's metrics and keep ``targets.json`` current, from ``start`` to ``close``.

    Args:
        config: with ``redis.url`` set.
        synced: folder of the server that the launcher syncs, if there is one.
    """

    def __init__(self, config: Config, folder: Path, children: Sequence[Child], synced: Path | None = None) -> None:
        self._path = folder / TARGETS_FILE
        self._keys = Keys(config.run)
        self._url = str(config.redis.url)
        weights = Path(config.trainer.weights_dir or config.run_dir / "weights")
        places = {"run": folder.absolute(), "weights": weights.absolute()}
        self._exporter = Exporter.of(config, "launcher", "", LauncherCollector(children, places, synced))

    def look(self, client: Client) -> None:
        """Update the file. Blocks for a round trip; an error is logged, and the update tried again next time."""
        if self._exporter is None:
            return
        try:
            self._write(targets(client, self._keys))
        except redis.RedisError as exc:
            log.debug("%s", translate(exc, self._url))

    def close(self) -> None:
        """Stop serving, and empty the file, since no target is left. Blocks shortly."""
        if self._exporter is not None:
            self._exporter.close()
            self._write([])

    def _write(self, groups: list[Group]) -> None:
        try:
            write_targets(self._path, groups)
        except (DiskFull, OSError) as exc:
            if not is_full(exc):
                raise
            log.warning("%s is not up to date: %s", self._path, exc)
