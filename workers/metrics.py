"""Export the totals and the current state of a worker as metrics."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.metrics.series import families, table
from penstock.workers.services import Services

#: By total of ``Tally``.
TOTALS = table("""
    generated_tokens counter worker_generated_tokens Generated tokens, including lost ones.
    committed_samples counter worker_committed_samples Samples committed.
    committed_groups counter worker_committed_groups Groups completed by this worker.
    committed_tokens counter worker_committed_tokens Generated tokens of committed samples.
    cached_tokens counter worker_cached_tokens Tokens of committed samples that the engine had in its prefix cache.
    prompt_tokens counter worker_prompt_tokens Prompt tokens of the engine's answers, including resent prefixes.
    prompt_cached_tokens counter worker_prompt_cached_tokens Prompt tokens that the engine had in its prefix cache.
    resent_requests counter worker_resent_requests Answered requests that resumed an aborted answer.
    drafted_tokens counter worker_drafted_tokens Tokens that speculative decoding drafted.
    right_draft_tokens counter worker_right_draft_tokens Drafted tokens that the model accepted.
    draft_checks counter worker_draft_checks Draft verifications by the model.
    generate_s counter worker_generate_seconds Engine time of committed samples' requests, summed over samples.
    reward_s counter worker_reward_seconds Reward time of committed samples, summed over samples.
    group_rewards counter worker_group_rewards Group rewards computed (reward.group).
    group_reward_s counter worker_group_reward_seconds Time of group rewards, including reading the samples, summed
        over groups.
    failures counter worker_failed_jobs{reason} Failed attempts of jobs.
    crashes counter worker_crashed_jobs{to} Jobs charged with an engine crash, by next state.
    handed_back counter worker_handed_back_jobs Jobs handed back without a charge.
    lost_leases counter worker_lost_leases Leases that another worker took over.
    engine_restarts counter worker_engine_restarts Restarts of the engine.
    weight_updates counter worker_weight_updates Publications loaded into the running engine.
    weight_pause_s counter worker_weight_pause_seconds Time without generation during weight updates.
    weight_load_s counter worker_weight_load_seconds Time to load weights into the engine; part of the pause.
    weight_wait_s counter worker_weight_wait_seconds Time to drain or abort running samples before loading weights.
    weight_copies counter worker_weight_copies{how} Versions fetched to this machine (serving, or trainer.transport
        delta), by origin: whole, deltas, here.
    weight_copy_bytes counter worker_weight_copy_bytes Bytes of complete versions and deltas fetched for versions.
    weight_copy_s counter worker_weight_copy_seconds Time to fetch versions; generation continues meanwhile.
    checkpoints counter worker_prefix_checkpoints Prefixes of running samples written to Redis.
    checkpoint_bytes counter worker_prefix_checkpoint_bytes Bytes of prefix checkpoints.
""")
#: By the two totals that are divided.
RATIOS = table("""
    cached_tokens/committed_samples slime rollout/avg_cached_tokens_per_sample Cached tokens per committed sample,
        since this worker started.
    prompt_cached_tokens/prompt_tokens slime rollout/prefix_cache_hit_rate Share of prompt tokens found in the
        prefix cache, since this worker started.
    right_draft_tokens/drafted_tokens slime rollout/spec_accept_rate Share of drafted tokens that the model
        accepted, since this worker started.
    draft_answer_tokens/draft_checks slime rollout/spec_accept_length Tokens generated per draft verification, since
        this worker started.
""")
#: By field of the calls of user code that ended.
CODE = table("""
    calls counter worker_code_calls{call} Finished calls of rewards, hooks and environments (tools).
    failures counter worker_code_failures{call} Calls of rewards, hooks and environments that raised or timed out.
    seconds counter worker_code_seconds{call} Time of calls of rewards, hooks and environments.
""")
STATE = table("""
    episodes gauge worker_agent_episodes{state} Agent episodes: waiting for an agent, and open.
    version gauge worker_weight_version Version of the engine's weights; -1: none.
    running gauge worker_running_samples Samples in a slot.
    slots gauge worker_slots Maximum number of samples generated concurrently.
    requests gauge worker_engine_requests Engine requests without an answer.
    gpu_use gauge worker_gpu_use_ratio{gpu} Share of time a GPU of the engine was busy; absent if the driver does
        not report it.
    gpu_used gauge worker_gpu_memory_used_bytes{gpu} Memory of an engine GPU used by all processes.
    gpu_size gauge worker_gpu_memory_size_bytes{gpu} Memory size of an engine GPU.
""")
SERIES = (*TOTALS.values(), *RATIOS.values(), *CODE.values(), *STATE.values())


class WorkerCollector(Collector):
    """Read the worker's totals on each scrape, in the thread of the metrics server."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        services, gpus, ended = self._services, self._services.gpus(), dict(self._services.open_calls.ended)
        yield from families(TOTALS, {name: getattr(services.tally, name) for name in TOTALS})
        yield from families(RATIOS, {name: self._ratio(*name.split("/")) for name in RATIOS})
        for name, series in CODE.items():
            yield series.each({call: getattr(one, name) for call, one in ended.items()})
        yield from families(
            STATE,
            {
                "episodes": None if services.agents is None else services.agents.counts(),
                "version": services.engine.version,
                "running": services.num_running,
                "slots": services.config.worker.slots,
                "requests": services.engine.num_running,
                "gpu_use": {one.name: one.use for one in gpus if one.use >= 0},
                "gpu_used": {one.name: float(one.used_bytes) for one in gpus},
                "gpu_size": {one.name: float(one.size_bytes) for one in gpus},
            },
        )

    def _ratio(self, part: str, whole: str) -> float | None:
        divisor = getattr(self._services.tally, whole)
        return getattr(self._services.tally, part) / divisor if divisor else None
