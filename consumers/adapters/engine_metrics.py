"""Serve the metrics of all engines of a run at one address, like a router's ``/engine_metrics``.

Every scrape queries the live engines; each series gets the labels ``worker`` and ``source`` (the engine's address).
Engines that do not respond, or were started without ``enable-metrics``, are skipped. The workers' own metrics are
included.
"""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from prometheus_client.core import Metric
from prometheus_client.exposition import start_http_server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from penstock.errors import EngineError
from penstock.protocol.engine_http import fetch
from penstock.protocol.presence import WorkerPresence

log = logging.getLogger(__name__)

PATH = "/engine_metrics"
#: Longest wait for one engine, in seconds.
SCRAPE_S = 5.0


class EngineMetrics(Collector):
    """Serve the metrics at any path, in threads, until ``close``.

    Args:
        workers: returns the live workers, like ``Trainer.workers``; called on every scrape.
        host: address to listen on, with a free port.
    """

    def __init__(self, workers: Callable[[], Iterable[WorkerPresence]], host: str = "127.0.0.1") -> None:
        self._workers = workers
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, _ = start_http_server(0, host, registry)

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
        """Return the metrics of all engines by name, each series labelled with its worker."""
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
    """Return the metrics addresses of a worker and its engines."""
    return [f"{url}/metrics" for url in worker.engine_urls] + ([worker.metrics] if worker.metrics else [])


def _scrape(url: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(fetch(url, timeout_s=SCRAPE_S).decode(errors="replace")))
    except (EngineError, ValueError) as exc:
        log.debug("no metrics from %s: %s", url, exc)
        return []
