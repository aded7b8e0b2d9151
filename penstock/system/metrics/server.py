"""The metrics server of one process, with threads of its own."""

import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.config import Config
from penstock.config.net.hosts import cannot_listen, host_in_url
from penstock.config.net.watching import MetricsConfig
from penstock.errors import PenstockError
from penstock.redaction import redact
from penstock.redis.control import PASSING
from penstock.system.metrics.bounded_threads import STALL_S, BoundedThreads
from penstock.system.metrics.series import counter, gauge
from penstock.version import __version__

log = logging.getLogger(__name__)

#: Interval of warnings about a collector that fails.
SAY_S = 60.0

INFO = gauge("part_info", "1; its labels say which part of which run this is.", "run", "part", "name", "version")
STARTED = gauge("part_start_time_seconds", "When it began to serve metrics, in seconds since 1970.")
FAILED = counter("part_failed_scrapes", "Scrapes that lack figures, for a server did not answer; the log says why.")
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
        self._said = float("-inf")

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
            if time.monotonic() - self._said >= SAY_S:
                self._said = time.monotonic()
                log.warning("a scrape lacks figures: %s", redact(str(exc)))
            return []


class MetricsServer:
    """Serves ``/metrics`` from threads until ``close``.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, config: MetricsConfig, part: Part) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(part)
        try:
            self._server = _server(config.host, config.port or 0, registry)
        except OSError as exc:
            raise cannot_listen("metrics", config.host, config.port or 0, exc) from exc
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        #: Address for other processes.
        self.url = f"http://{host_in_url(config.host, config.reached_at)}:{self._server.server_port}/metrics"
        log.info("metrics at %s", self.url)

    def close(self) -> None:
        """Stop serving. Blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = STALL_S

    def log_message(self, format: str, *args: object) -> None:
        """Do not log scrapes."""


def _server(host: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    """Make the server. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)

    class Server(BoundedThreads, WSGIServer):
        address_family = found[0][0]

    return make_server(str(found[0][4][0]), port, make_wsgi_app(registry), Server, _Handler)


def serve(config: Config, part: str, name: str, *collectors: Collector) -> MetricsServer | None:
    """Serve the metrics of a process if ``metrics.port`` is set. Returns at once; raises as ``MetricsServer``."""
    if config.metrics.port is None:
        return None
    return MetricsServer(config.metrics, Part(config.run, part, name, collectors))
