"""Metrics of one worker: what it has done, and how it stands now."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.system.metrics.series import Series, counter, gauge, slime
from penstock.workers.services import Services

TOKENS = counter("worker_generated_tokens", "Tokens drawn, those that were lost again too.")
SAMPLES = counter("worker_committed_samples", "Samples committed.")
GROUPS = counter("worker_committed_groups", "Groups that became complete here.")
COMMITTED = counter("worker_committed_tokens", "Generated tokens of committed samples.")
CACHED = counter("worker_cached_tokens", "Tokens of committed samples that the engine had in its prefix cache.")
CACHED_MEAN = slime(
    "rollout/avg_cached_tokens_per_sample", "Cached tokens per committed sample, since this worker began."
)
PROMPT = counter(
    "worker_prompt_tokens", "Prompt tokens of the engine's answers, those of prefixes that were sent again too."
)
PROMPT_CACHED = counter("worker_prompt_cached_tokens", "Those of them that the engine had in its prefix cache.")
RESENT = counter(
    "worker_resent_requests",
    "Answered requests that were sent again, with the tokens so far, after an answer that was aborted.",
)
HIT_RATE = slime("rollout/prefix_cache_hit_rate", "The second over the first, since this worker began.")
REPETITIVE = counter(
    "worker_repetitive_samples",
    "Committed samples of more than 10,000 characters the last of which say the same again.",
)
REPETITION = slime("rollout/repetition_frac", "Share of them among the committed samples, since this worker began.")
DRAFTED = counter("worker_drafted_tokens", "Tokens that speculative decoding drafted.")
RIGHT_DRAFTS = counter("worker_right_draft_tokens", "Drafted tokens that the model kept.")
DRAFT_CHECKS = counter("worker_draft_checks", "Times that the model looked at a draft.")
ACCEPT_RATE = slime("rollout/spec_accept_rate", "Share of drafted tokens that it kept, since this worker began.")
ACCEPT_LENGTH = slime("rollout/spec_accept_length", "Tokens drawn per look at a draft, since this worker began.")
GENERATE = counter(
    "worker_generate_seconds", "Time that requests of committed samples took at the engine, summed over samples."
)
REWARD = counter("worker_reward_seconds", "Time that their rewards took, summed over samples.")
GROUP_REWARDS = counter("worker_group_rewards", "Rewards of whole groups (reward.group).")
GROUP_REWARD = counter(
    "worker_group_reward_seconds", "Time that they took, that of reading the samples included, summed over groups."
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
COPIES = counter(
    "worker_weight_copies",
    "Copies of versions on this machine that the engine was given (trainer.transport delta), by how they came there: "
    "whole, deltas, here.",
    "how",
)
COPY_BYTES = counter("worker_weight_copy_bytes", "Bytes of whole versions and deltas that came for them.")
COPY = counter("worker_weight_copy_seconds", "Time until they were there; samples are generated meanwhile.")
PREFIXES = counter("worker_prefix_checkpoints", "Prefixes of running samples that were kept in Redis.")
PREFIX_BYTES = counter("worker_prefix_checkpoint_bytes", "Bytes written for them.")
VERSION = gauge("worker_weight_version", "Version of the engine's weights; -1: none.")
RUNNING = gauge("worker_running_samples", "Samples that hold a slot.")
SLOTS = gauge("worker_slots", "Samples generated at once, at most.")
GPU_USE = gauge(
    "worker_gpu_use_ratio",
    "Share of the time in which a GPU of its engine ran something; absent where it does not tell.",
    "gpu",
)
GPU_USED = gauge("worker_gpu_memory_used_bytes", "Memory of a GPU of its engine that is used, by whoever.", "gpu")
GPU_SIZE = gauge("worker_gpu_memory_size_bytes", "Memory that this GPU has.", "gpu")
REQUESTS = gauge("worker_engine_requests", "Requests sent to the engine and not answered.")

SERIES = (
    TOKENS, SAMPLES, GROUPS, COMMITTED, CACHED, CACHED_MEAN, PROMPT, PROMPT_CACHED, RESENT, HIT_RATE, REPETITIVE,
    REPETITION, DRAFTED, RIGHT_DRAFTS, DRAFT_CHECKS, ACCEPT_RATE, ACCEPT_LENGTH, GENERATE, REWARD, GROUP_REWARDS,
    GROUP_REWARD, FAILURES, CRASHES, HANDED_BACK, LOST_LEASES, RESTARTS, UPDATES, PAUSE, LOAD, WAIT, COPIES, COPY_BYTES,
    COPY, PREFIXES, PREFIX_BYTES, VERSION, RUNNING, SLOTS, REQUESTS, GPU_USE, GPU_USED, GPU_SIZE,
)  # fmt: skip


class WorkerCollector(Collector):
    """Reads the worker's sums when it is scraped; nothing is counted twice. Called from the server's thread."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        yield from self._sums()
        yield from self._answers()
        yield from self._weights()
        yield from self._gpus()
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
        yield from _share(CACHED_MEAN, tally.cached_tokens, tally.committed_samples)
        yield FAILURES.each(list(tally.failures.items()))
        yield CRASHES.each(list(tally.crashes.items()))
        yield HANDED_BACK.of(tally.handed_back)
        yield LOST_LEASES.of(tally.lost_leases)
        yield PREFIXES.of(tally.checkpoints)
        yield PREFIX_BYTES.of(tally.checkpoint_bytes)

    def _answers(self) -> Iterator[Metric]:
        tally = self._services.tally
        yield PROMPT.of(tally.prompt_tokens)
        yield PROMPT_CACHED.of(tally.prompt_cached_tokens)
        yield RESENT.of(tally.resent_requests)
        yield GENERATE.of(tally.generate_s)
        yield REWARD.of(tally.reward_s)
        yield GROUP_REWARDS.of(tally.group_rewards)
        yield GROUP_REWARD.of(tally.group_reward_s)
        yield REPETITIVE.of(tally.repetitive_samples)
        yield DRAFTED.of(tally.drafted_tokens)
        yield RIGHT_DRAFTS.of(tally.right_draft_tokens)
        yield DRAFT_CHECKS.of(tally.draft_checks)
        yield from _share(HIT_RATE, tally.prompt_cached_tokens, tally.prompt_tokens)
        yield from _share(REPETITION, tally.repetitive_samples, tally.committed_samples)
        yield from _share(ACCEPT_RATE, tally.right_draft_tokens, tally.drafted_tokens)
        yield from _share(ACCEPT_LENGTH, tally.draft_answer_tokens, tally.draft_checks)

    def _gpus(self) -> Iterator[Metric]:
        gpus = self._services.gpus()
        yield GPU_USE.each({one.name: one.use for one in gpus if one.use >= 0})
        yield GPU_USED.each({one.name: float(one.used_bytes) for one in gpus})
        yield GPU_SIZE.each({one.name: float(one.size_bytes) for one in gpus})

    def _weights(self) -> Iterator[Metric]:
        tally = self._services.tally
        yield RESTARTS.of(tally.engine_restarts)
        yield UPDATES.of(tally.weight_updates)
        yield PAUSE.of(tally.weight_pause_s)
        yield LOAD.of(tally.weight_load_s)
        yield WAIT.of(tally.weight_wait_s)
        yield COPIES.each(list(tally.weight_copies.items()))
        yield COPY_BYTES.of(tally.weight_copy_bytes)
        yield COPY.of(tally.weight_copy_s)


def _share(series: Series, part: float, whole: float) -> Iterator[Metric]:
    """Nothing where there is no whole."""
    if whole:
        yield series.of(part / whole)
