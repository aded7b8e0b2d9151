"""Prometheus metrics of one worker, on loopback: what it has done, and how it stands now."""

import logging
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.errors import ConfigError
from workers.services import Services

log = logging.getLogger(__name__)

HOST = "127.0.0.1"


class WorkerCollector(Collector):
    """Reads the worker's sums when it is scraped; nothing is counted twice. Called from the server's thread."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        services, tally, engine = self._services, self._services.tally, self._services.engine
        yield _counter("generated_tokens", "Tokens drawn.", tally.generated_tokens)
        yield _counter("committed_samples", "Samples committed.", tally.committed_samples)
        yield _counter("committed_groups", "Groups whose last sample was committed.", tally.committed_groups)
        yield _counters("failed_jobs", "Tries of jobs that failed.", "reason", tally.failures)
        yield _counters("crashed_jobs", "Jobs charged with an engine's death, by lane after.", "to", tally.crashes)
        yield _counter("handed_back_jobs", "Jobs handed back without a charge.", tally.handed_back)
        yield _counter("lost_leases", "Leases that were taken over.", tally.lost_leases)
        yield _counter("engine_restarts", "Restarts of the engine.", tally.engine_restarts)
        yield _counter("weight_updates", "Publications loaded into the running engine.", tally.weight_updates)
        yield _counter("weight_pause_seconds", "Time without generation while weights loaded.", tally.weight_pause_s)
        yield _gauge("weight_version", "Version of the engine's weights; -1: none.", engine.version)
        yield _gauge("running_samples", "Samples that hold a slot.", services.num_running)
        yield _gauge("slots", "Samples generated at once, at most.", services.config.worker.slots)
        yield _gauge("engine_requests", "Requests sent to the engine and not answered.", engine.num_running)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"penstock_worker_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"penstock_worker_{name}", text, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"penstock_worker_{name}", text, value=value)


class Metrics:
    """Serves ``/metrics`` on loopback from a thread until ``close``.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(self, services: Services, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(WorkerCollector(services))
        try:
            self._server, self._thread = start_http_server(port, addr=HOST, registry=registry)
        except OSError as exc:
            raise ConfigError(
                f"worker.metrics_port {port} cannot be listened on ({exc.strerror}): set another one, or 0 for a free "
                "one; several workers on one machine need 0."
            ) from exc
        self.url = f"http://{HOST}:{self._server.server_port}/metrics"
        log.info("metrics at %s", self.url)

    def close(self) -> None:
        """Stop serving. Blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
