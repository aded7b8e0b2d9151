"""Metrics of one worker: its totals and its current state."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.metrics.series import Series, counter, gauge, slime
from penstock.workers.services import Services

TOKENS = counter("worker_generated_tokens", "Tokens generated, lost ones included.")
SAMPLES = counter("worker_committed_samples", "Samples committed.")
GROUPS = counter("worker_committed_groups", "Groups that became complete here.")
COMMITTED = counter("worker_committed_tokens", "Generated tokens of committed samples.")
CACHED = counter("worker_cached_tokens", "Tokens of committed samples that the engine had in its prefix cache.")
CACHED_MEAN = slime(
    "rollout/avg_cached_tokens_per_sample", "Cached tokens per committed sample, since this worker started."
)
PROMPT = counter(
    "worker_prompt_tokens", "Prompt tokens of the engine's answers, prefixes that were sent again included."
)
PROMPT_CACHED = counter("worker_prompt_cached_tokens", "Prompt tokens that the engine had in its prefix cache.")
RESENT = counter(
    "worker_resent_requests",
    "Answered requests that were sent again, with the tokens so far, after an aborted answer.",
)
HIT_RATE = slime(
    "rollout/prefix_cache_hit_rate", "Share of prompt tokens found in the prefix cache, since this worker started."
)
DRAFTED = counter("worker_drafted_tokens", "Tokens that speculative decoding drafted.")
RIGHT_DRAFTS = counter("worker_right_draft_tokens", "Drafted tokens that the model accepted.")
DRAFT_CHECKS = counter("worker_draft_checks", "Times that the model checked a draft.")
ACCEPT_RATE = slime("rollout/spec_accept_rate", "Share of drafted tokens that it accepted, since this worker started.")
ACCEPT_LENGTH = slime("rollout/spec_accept_length", "Tokens generated per check of a draft, since this worker started.")
GENERATE = counter("worker_generate_seconds", "Time of committed samples' requests at the engine, summed over samples.")
REWARD = counter("worker_reward_seconds", "Time of their rewards, summed over samples.")
CODE_CALLS = counter("worker_code_calls", "Calls of rewards, hooks and environments (tools) that ended.", "call")
CODE_FAILURES = counter(
    "worker_code_failures", "Calls of rewards, hooks and environments that raised or timed out.", "call"
)
CODE_SECONDS = counter("worker_code_seconds", "Time of calls of rewards, hooks and environments.", "call")
EPISODES = gauge("worker_agent_episodes", "Episodes of agents: waiting for an agent, and open.", "state")
GROUP_REWARDS = counter("worker_group_rewards", "Rewards of whole groups (reward.group).")
GROUP_REWARD = counter(
    "worker_group_reward_seconds", "Time of group rewards, reading the samples included, summed over groups."
)
FAILURES = counter("worker_failed_jobs", "Failed attempts of jobs.", "reason")
CRASHES = counter("worker_crashed_jobs", "Jobs charged with an engine crash, by lane after.", "to")
HANDED_BACK = counter("worker_handed_back_jobs", "Jobs handed back without a charge.")
LOST_LEASES = counter("worker_lost_leases", "Leases that another worker took over.")
RESTARTS = counter("worker_engine_restarts", "Restarts of the engine.")
UPDATES = counter("worker_weight_updates", "Publications loaded into the running engine.")
PAUSE = counter("worker_weight_pause_seconds", "Time without generation during weight updates.")
LOAD = counter("worker_weight_load_seconds", "Time to load weights into the engine; part of the pause.")
WAIT = counter("worker_weight_wait_seconds", "Time to drain or abort running samples before a load.")
COPIES = counter(
    "worker_weight_copies",
    "Versions fetched to this machine (serving, or trainer.transport delta), by origin: whole, deltas, here.",
    "how",
)
COPY_BYTES = counter("worker_weight_copy_bytes", "Bytes of complete versions and deltas fetched for them.")
COPY = counter("worker_weight_copy_seconds", "Time to fetch them; samples are generated meanwhile.")
PREFIXES = counter("worker_prefix_checkpoints", "Prefixes of running samples written to Redis.")
PREFIX_BYTES = counter("worker_prefix_checkpoint_bytes", "Bytes of these prefixes.")
VERSION = gauge("worker_weight_version", "Version of the engine's weights; -1: none.")
RUNNING = gauge("worker_running_samples", "Samples that hold a slot.")
SLOTS = gauge("worker_slots", "Most samples generated at once.")
GPU_USE = gauge(
    "worker_gpu_use_ratio",
    "Share of time a GPU of its engine was busy; absent if the driver does not report it.",
    "gpu",
)
GPU_USED = gauge("worker_gpu_memory_used_bytes", "Used memory of a GPU of its engine, by all processes.", "gpu")
GPU_SIZE = gauge("worker_gpu_memory_size_bytes", "Memory of this GPU.", "gpu")
REQUESTS = gauge("worker_engine_requests", "Requests sent to the engine and not answered.")

SERIES = (
    TOKENS, SAMPLES, GROUPS, COMMITTED, CACHED, CACHED_MEAN, PROMPT, PROMPT_CACHED, RESENT, HIT_RATE, DRAFTED,
    RIGHT_DRAFTS, DRAFT_CHECKS, ACCEPT_RATE, ACCEPT_LENGTH, GENERATE, REWARD, CODE_CALLS,
    CODE_FAILURES, CODE_SECONDS, EPISODES, GROUP_REWARDS,
    GROUP_REWARD, FAILURES, CRASHES, HANDED_BACK, LOST_LEASES, RESTARTS, UPDATES, PAUSE, LOAD, WAIT, COPIES, COPY_BYTES,
    COPY, PREFIXES, PREFIX_BYTES, VERSION, RUNNING, SLOTS, REQUESTS, GPU_USE, GPU_USED, GPU_SIZE,
)  # fmt: skip


class WorkerCollector(Collector):
    """Read the worker's totals on each scrape; nothing is counted twice. Called in the server's thread."""

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
        yield from self._code()

    def _code(self) -> Iterator[Metric]:
        services = self._services
        ended = list(services.open_calls.ended.items())
        yield CODE_CALLS.each({call: one.calls for call, one in ended})
        yield CODE_FAILURES.each({call: one.failures for call, one in ended})
        yield CODE_SECONDS.each({call: one.seconds for call, one in ended})
        if services.agents is not None:
            yield EPISODES.each(services.agents.counts())

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
        yield DRAFTED.of(tally.drafted_tokens)
        yield RIGHT_DRAFTS.of(tally.right_draft_tokens)
        yield DRAFT_CHECKS.of(tally.draft_checks)
        yield from _share(HIT_RATE, tally.prompt_cached_tokens, tally.prompt_tokens)
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
    """Yield a ratio, unless its denominator is 0."""
    if whole:
        yield series.of(part / whole)
