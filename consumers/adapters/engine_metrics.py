"""Serve the metrics of all engines of a run at one address, as a router's ``/engine_metrics`` does.

Every scrape queries the live engines; each series gets the labels ``worker`` and ``source`` (the engine's address). An
engine that does not answer, or was started without ``enable-metrics``, is skipped. The workers' own metrics are
included.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from penstock.errors import EngineError
from penstock.metrics.server import STALL_S, BoundedThreads
from penstock.protocol.engine_http import fetch
from penstock.protocol.presence import WorkerPresence

log = logging.getLogger(__name__)

PATH = "/engine_metrics"
#: Longest wait for one engine.
SCRAPE_S = 5.0


class _Server(BoundedThreads, HTTPServer):
    """An HTTP server with a bounded number of threads."""


class EngineMetrics(Collector):
    """Serve ``PATH`` from threads until ``close``.

    Args:
        workers: returns the live workers, as ``Trainer.workers`` does; called at every scrape.
        host: address to listen at; the port is a free one.
    """

    def __init__(self, workers: Callable[[], Iterable[WorkerPresence]], host: str = "127.0.0.1") -> None:
        self._workers = workers
        registry = CollectorRegistry(auto_describe=False)
        self._server = _Server((host, 0), _handler(registry))
        registry.register(self)
        Thread(target=self._server.serve_forever, name="engine-metrics", daemon=True).start()

    @property
    def address(self) -> str:
        """Return ``http://HOST:PORT``, without the path."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all engines, by name, each sample labelled with its worker."""
        found: dict[str, Metric] = {}
        asked = [(worker.name, url) for worker in self._workers() for url in _urls(worker)]
        with ThreadPoolExecutor(16) as pool:
            for (worker, url), families in zip(asked, pool.map(_scrape, [url for _, url in asked]), strict=True):
                mine = {"worker": worker, "source": url.removesuffix("/metrics")}
                for family in families:
                    into = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                    into.samples += [sample._replace(labels=sample.labels | mine) for sample in family.samples]
        return found.values()


def _urls(worker: WorkerPresence) -> list[str]:
    """Return the addresses of the metrics of a worker's engines, and of the worker."""
    return [f"{url}/metrics" for url in worker.engine_urls] + ([worker.metrics] if worker.metrics else [])


def _scrape(url: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(fetch(url, timeout_s=SCRAPE_S).decode(errors="replace")))
    except (EngineError, ValueError) as exc:
        log.debug("no metrics from %s: %s", url, exc)
        return []


def _handler(registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = STALL_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in (PATH, "/metrics"):
                self.send_error(404)
                return
            body = generate_latest(registry)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    return Handler
