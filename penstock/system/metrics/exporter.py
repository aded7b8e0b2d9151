"""Metrics of a process without a loop that writes its presence: served, and listed in the run's ``parts``."""

import logging
import threading
from typing import Self

from prometheus_client.registry import Collector

from penstock.config import Config
from penstock.errors import PenstockError
from penstock.protocol.attendance import Attendance
from penstock.protocol.keys import Keys
from penstock.redaction import redact
from penstock.redis.connect import connect
from penstock.redis.control import PASSING
from penstock.system.metrics.server import MetricsServer, serve

log = logging.getLogger(__name__)

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
