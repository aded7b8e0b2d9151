"""Metrics of one producer: admitted jobs, and its position in the prompts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.system.metrics.series import counter, gauge

ADMITTED = counter("producer_admitted_jobs", "Jobs that this producer admitted.", "lane")
POSITION = gauge("producer_position", "Prompts of the train data that were admitted, of all epochs and producers.")
EPOCH = gauge("producer_epoch_prompts", "Prompts of one epoch; 0 while the end of a stream is not known yet.")
CLOSED = gauge("producer_waits", "1 while it has something to wait for; `penstock why` says for what.")
WAITED = counter("producer_wait_seconds", "Time in which it admitted nothing, for the gate or for something else.")

SERIES = (ADMITTED, POSITION, EPOCH, CLOSED, WAITED)


@dataclass(slots=True)
class Tally:
    """Running sums of one producer, written by its loop and read by scrapes."""

    epoch_prompts: int = 0
    position: int = 0
    admitted: Counter[str] = field(default_factory=Counter)
    waits: bool = False
    waited_s: float = 0.0


class ProducerCollector(Collector):
    """Reads the sums for each scrape. Called from the server's thread."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        tally = self._tally
        yield ADMITTED.each(list(tally.admitted.items()))
        yield POSITION.of(tally.position)
        yield EPOCH.of(tally.epoch_prompts)
        yield CLOSED.of(tally.waits)
        yield WAITED.of(tally.waited_s)
