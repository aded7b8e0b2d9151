"""Metrics of one worker: what it has done, and how it stands now."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.system.metrics.series import counter, gauge, slime
from workers.services import Services

TOKENS = counter("worker_generated_tokens", "Tokens drawn, those that were lost again too.")
SAMPLES = counter("worker_committed_samples", "Samples committed.")
GROUPS = counter("worker_committed_groups", "Groups whose last sample was committed.")
COMMITTED = counter("worker_committed_tokens", "Generated tokens of committed samples.")
CACHED = counter("worker_cached_tokens", "Tokens of committed samples that the engine had in its prefix cache.")
CACHED_MEAN = slime(
    "rollout/avg_cached_tokens_per_sample", "Cached tokens per committed sample, since this worker began."
)
FAILURES = counter("worker_failed_jobs", "Tries of jobs that failed.", "reason")
CRASHES = counter("worker_crashed_jobs", "Jobs charged with an engine's death, by lane after.", "to")
HANDED_BACK = counter("worker_handed_back_jobs", "Jobs handed back without a charge.")
LOST_LEASES = counter("worker_lost_leases", "Leases that were taken over.")
RESTARTS = counter("worker_engine_restarts", "Restarts of the engine.")
UPDATES = counter("worker_weight_updates", "Publications loaded into the running engine.")
PAUSE = counter("worker_weight_pause_seconds", "Time without generation while weights loaded.")
LOAD = counter("worker_weight_load_seconds", "Time that the engine took to load them; part of the pause.")
WAIT = counter("worker_weight_wait_seconds", "Time in which running samples ended, or came back, before a load.")
PREFIXES = counter("worker_prefix_checkpoints", "Prefixes of running samples that were kept in Redis.")
PREFIX_BYTES = counter("worker_prefix_checkpoint_bytes", "Bytes written for them.")
VERSION = gauge("worker_weight_version", "Version of the engine's weights; -1: none.")
RUNNING = gauge("worker_running_samples", "Samples that hold a slot.")
SLOTS = gauge("worker_slots", "Samples generated at once, at most.")
REQUESTS = gauge("worker_engine_requests", "Requests sent to the engine and not answered.")

SERIES = (
    TOKENS, SAMPLES, GROUPS, COMMITTED, CACHED, CACHED_MEAN, FAILURES, CRASHES, HANDED_BACK,
    LOST_LEASES, RESTARTS, UPDATES, PAUSE, LOAD, WAIT, PREFIXES, PREFIX_BYTES, VERSION, RUNNING, SLOTS, REQUESTS,
)  # fmt: skip


class WorkerCollector(Collector):
    """Reads the worker's sums when it is scraped; nothing is counted twice. Called from the server's thread."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        yield from self._sums()
        yield from self._weights()
        services, engine = self._services, self._services.engine
        yield VERSION.of(engine.version)
        yield RUNNING.of(services.num_running)
        yield SLOTS.of(services.config.worker.slots)
        yield REQUESTS.of(engine.num_running)

    def _sums(self) -> Iterator[Metric]:
        tally = self._services.tally
        yield TOKENS.of(tally.generated_tokens)
        yield SAMPLES.of(tally.committed_samples)
        yield GROUPS.of(tally.committed_groups)
        yield COMMITTED.of(tally.committed_tokens)
        yield CACHED.of(tally.cached_tokens)
        if tally.committed_samples:
            yield CACHED_MEAN.of(tally.cached_tokens / tally.committed_samples)
        yield FAILURES.each(list(tally.failures.items()))
        yield CRASHES.each(list(tally.crashes.items()))
        yield HANDED_BACK.of(tally.handed_back)
        yield LOST_LEASES.of(tally.lost_leases)
        yield PREFIXES.of(tally.checkpoints)
        yield PREFIX_BYTES.of(tally.checkpoint_bytes)

    def _weights(self) -> Iterator[Metric]:
        tally = self._services.tally
        yield RESTARTS.of(tally.engine_restarts)
        yield UPDATES.of(tally.weight_updates)
        yield PAUSE.of(tally.weight_pause_s)
        yield LOAD.of(tally.weight_load_s)
        yield WAIT.of(tally.weight_wait_s)
