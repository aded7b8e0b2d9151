"""The metrics server of one process, with threads of its own."""

import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.config import Config
from penstock.config.serving import MetricsConfig, cannot_listen, host_in_url
from penstock.errors import PenstockError
from penstock.metrics.series import counter, gauge
from penstock.names import __version__
from penstock.protocol.presence import GONE_S, Attendance, parse_workers
from penstock.protocol.snapshot import present_parts
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.connect import connect
from penstock.redis.control import PASSING
from penstock.system.disk import put
from penstock.text import redact

log = logging.getLogger(__name__)

#: A valid address: writers in Redis must not make Prometheus request anything else.
_URL = re.compile(r"http://([A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})/metrics")
#: Most processes in the list.
MAX_TARGETS = 10_000

Group = dict[str, Any]


def targets(client: Client, keys: Keys) -> list[Group]:
    """Return groups of Prometheus' file_sd format, one for each running process with metrics, by address.

    Processes come and go, each with its own port, so the file is made from their presence records in Redis. Labels are
    ``run``, ``part`` (worker, buffer, producer, trainer, scorer, verifiers, fleet, recorder, launcher) and ``name``.
    Blocks for one round trip; raises redis' errors.
    """
    pipe = client.pipeline(transaction=False)
    pipe.hgetall(keys.workers)
    pipe.hgetall(keys.parts)
    workers, parts = pipe.execute()
    found = [("worker", one.started_as, one.metrics) for one in parse_workers(workers) if one.age_s < GONE_S]
    shown = [one for one in present_parts(parts) if one["age_s"] < GONE_S]
    found += [(one["part"], one.get("name", ""), one.get("metrics", "")) for one in shown]
    return list(_groups(keys.run, sorted(set(found), key=lambda one: one[::-1])[:MAX_TARGETS]))


def _groups(run: str, found: list[tuple[str, str, str]]) -> Iterator[Group]:
    for part, name, url in found:
        if (address := _URL.fullmatch(url)) and 0 < int(address[2]) < 65536:
            yield {"targets": [f"{address[1]}:{address[2]}"], "labels": {"run": run, "part": part, "name": name}}


def write_targets(path: Path, groups: list[Group]) -> bool:
    """Replace the file if it differs; return whether it did. Blocks; raises OSError.

    Readable by all: Prometheus is another user, and it holds no secrets.
    """
    text = json.dumps(groups, indent=1) + "\n"
    if path.is_file() and path.read_text(errors="replace") == text:
        return False
    put(path, text, mode=0o644)
    return True


#: Interval of warnings about a collector that fails.
LOG_EVERY_S = 60.0

INFO = gauge("part_info", "1; the labels identify the part and its run.", "run", "part", "name", "version")
STARTED = gauge("part_start_time_seconds", "Time at which the part began to serve metrics, in seconds since 1970.")
FAILED = counter(
    "part_failed_scrapes", "Scrapes with missing series because a server did not respond; the log has the reason."
)
SERIES = (INFO, STARTED, FAILED)


class Part(Collector):
    """Metrics of the process itself, followed by those of its collectors.

    If a server does not answer a collector, its figures are left out, with a warning and a count.
    """

    def __init__(self, run: str, part: str, name: str, collectors: Sequence[Collector]) -> None:
        self._labels = (run, part, name, __version__)
        self._collectors = collectors
        self._started = time.time()
        self._failed = 0
        self._logged_s = float("-inf")

    def collect(self) -> Iterator[Metric]:
        yield INFO.each({self._labels: 1.0})
        yield STARTED.of(self._started)
        for collector in self._collectors:
            yield from self._families(collector)
        yield FAILED.of(self._failed)

    def _families(self, collector: Collector) -> Iterable[Metric]:
        try:
            return list(collector.collect())
        except (PenstockError, *PASSING) as exc:
            self._failed += 1
            if time.monotonic() - self._logged_s >= LOG_EVERY_S:
                self._logged_s = time.monotonic()
                log.warning("metrics missing from a scrape: %s", redact(str(exc)))
            return []


class MetricsServer:
    """Serves ``/metrics`` from threads until ``close``.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, config: MetricsConfig, part: Part, reached_at: str | None = None) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(part)
        try:
            self._server, self._thread = start_http_server(config.port or 0, config.host, registry)
        except OSError as exc:
            raise cannot_listen("metrics", config.host, config.port or 0, exc) from exc
        #: Address for other processes.
        self.url = f"http://{host_in_url(config.host, reached_at)}:{self._server.server_port}/metrics"
        log.info("metrics at %s", self.url)

    def close(self) -> None:
        """Stop serving. Blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(config: Config, part: str, name: str, *collectors: Collector) -> MetricsServer | None:
    """Serve the metrics of a process if ``metrics.port`` is set. Returns at once; raises as ``MetricsServer``."""
    if config.metrics.port is None:
        return None
    return MetricsServer(config.metrics, Part(config.run, part, name, collectors), config.reached_at)


#: Seconds between two checks whether its record is to be confirmed.
LOOK_S = 0.5
#: Longest wait for Redis to take the record; the process itself never waits for it.
TIMEOUT_S = 2.0


class Exporter:
    """Serves the metrics of one process and publishes their address, from threads, until ``close``.

    Args:
        config: with ``redis.url`` set.
        part: kind of the process: trainer, scorer, launcher.
        name: name of the process.
    """

    def __init__(self, server: MetricsServer, config: Config, part: str, name: str) -> None:
        assert config.redis.url is not None
        self.url = server.url
        self._server = server
        self._closed = threading.Event()
        self._client = connect(config.redis.url, timeout_s=TIMEOUT_S, check=False)
        self._attendance = Attendance(self._client, Keys(config.run), part, name=name, metrics=self.url)
        self._thread = threading.Thread(target=self._show, name="metrics-shown", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: Config, part: str, name: str, *collectors: Collector) -> Self | None:
        """Start an exporter if ``metrics.port`` is set. Returns at once; raises as ``MetricsServer``."""
        server = serve(config, part, name, *collectors)
        return None if server is None else cls(server, config, part, name)

    def close(self) -> None:
        """Stop serving and publishing. Blocks for at most twice ``TIMEOUT_S``."""
        self._closed.set()
        self._thread.join()
        self._client.close()
        self._server.close()

    def _show(self) -> None:
        try:
            self._attendance.confirm()
            while not self._closed.wait(LOOK_S):
                self._attendance.confirm()
            self._attendance.end()
        except (PenstockError, *PASSING) as exc:
            log.warning("where the metrics are is not shown any more: %s", redact(str(exc)))
