"""Export the metrics of the buffer process, and, while it leads, those of the run's queue.

Each scrape reads the queue over a separate connection, so that it never delays the loop that cuts batches.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.config import Config
from penstock.metrics.series import families, gauge, table
from penstock.protocol.gate import read_gates, read_rooms
from penstock.protocol.presence import FRESH_S, WorkerPresence
from penstock.protocol.snapshot import snapshot
from penstock.protocol.tokens import ledgers_of, of_training
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.connect import connect

#: Longest wait for an answer of Redis; a scrape times out after 10 s.
TIMEOUT_S = 2.0

LEADS = gauge("buffer_leads", "1 if this buffer leads, 0 if it is a standby, which has no other series.")
QUEUE = table("""
    jobs gauge queue_jobs{lane,state} Jobs of each lane, queued or leased to a worker.
    oldest gauge queue_oldest_age_seconds{lane} Time that the next job of each lane has been queued; 0 if the lane
        is empty.
    paused gauge queue_paused{lane} 1 for each paused lane.
    delayed gauge queue_delayed_jobs Jobs that wait for their next attempt.
    dead gauge queue_dead_letters Dead letters that were not requeued or cancelled.
    ready_lanes gauge queue_ready_groups{lane} Complete groups of each lane that a batch may still take.
    kept gauge queue_kept_groups Groups that are complete and not retired, including trained ones.
    inflight gauge queue_inflight_groups Train groups that are leased, or started and waiting to be resumed.
    unrecorded gauge queue_groups_to_record Finished groups that must be recorded before they are deleted.
    workers gauge queue_workers{state} Workers by state; silent: without a report for 10 s.
    rate gauge queue_tokens_per_second Tokens generated per second by all workers, smoothed over some seconds.
    versions gauge queue_model_version{model} Newest published version.
    step gauge queue_trainer_step Step of the run's trainer: batches that it has committed.
    waits gauge queue_wait_seconds{who,cause} Time that a part has waited for the cause that `penstock why` shows.
    tokens gauge rollout_tokens{lane,account} Tokens generated for jobs of each lane, by account; held: in live
        groups. The accounts add up to all reported tokens.
    goodput gauge rollout_goodput Share of tokens generated for training that the trainer used.
    places gauge gate_places{subscription} Places at the gate: train groups that may be in progress, by the gate's
        first subscription.
    taken gauge gate_taken_places{subscription} Places at the gate that are taken.
    used_memory gauge redis_used_memory_bytes Memory that the control Redis uses.
    maxmemory gauge redis_max_memory_bytes maxmemory of the control Redis; 0: no limit is set.
    writable gauge redis_takes_writes 0 while the disk of the control Redis is full, so that no part can write.
""")
#: By field of the hash ``counters``.
COUNTERS = table("""
    admitted counter queue_admitted_jobs Jobs admitted.
    committed counter queue_committed_samples Samples committed.
    completed counter queue_completed_groups Groups that became ready.
    crashes counter queue_crashed_jobs Jobs charged with the death of an engine or a worker.
    reclaimed counter queue_reclaimed_leases Leases taken over because they were not renewed.
    released counter queue_released_leases Leases handed back without charging an attempt.
    refused counter queue_refused_commits Commits of samples that were refused because another worker had the lease.
    requeued counter queue_requeued_jobs Dead letters that an operator queued again.
    cancelled counter queue_cancelled_jobs Jobs that were cancelled.
    timed_out counter queue_timed_out_groups Groups dropped because they took too long.
    shortened counter queue_shortened_groups Groups closed without all their samples.
    missing counter queue_missing_samples Samples that these groups lack.
    retired counter queue_retired_groups Groups that every subscription had finished with.
    unread_evaluations counter queue_unread_evaluation_groups Evaluation groups that no consumer read within
        buffer.eval_ttl_s.
    evicted counter queue_evicted_groups Groups that were deleted before any of their batches was durable.
    payload_lost counter queue_lost_payloads Committed samples whose tokens are lost; they are trained with mask 0.
    unrecorded counter queue_unrecorded_groups Groups that were deleted without being recorded, in a run with a
        history.
    duplicated counter queue_duplicated_jobs Jobs that were finished twice; it should stay 0.
    cut counter queue_cut_batches Batches cut, of all subscriptions.
    batches_committed counter queue_committed_batches Batches committed, of all subscriptions.
    published counter queue_published_versions Publications, including repeated ones.
    set_aside counter queue_set_aside_publications Publications that were set aside because engines died on them.
    rewinds counter queue_rewinds Rewinds of trainers to a checkpoint, including each start.
    weight_updates counter queue_weight_updates Publications that workers loaded into a running engine.
    rolled_back counter queue_rollbacks Number of times that Redis lost acknowledged writes.
""")
#: By prefix of fields of the hash ``counters`` that end in a reason.
BY_REASON = table("""
    buried_as: counter queue_buried_jobs{reason} Jobs that became dead letters, by reason of the last failure.
    failed: counter queue_failed_tries{reason} Failed attempts of jobs, including those that made dead letters.
    passed_lines: counter queue_passed_lines{dataset} Lines of training data that were skipped.
    skipped_easy: counter queue_skipped_easy_prompts{dataset} Prompts that a curriculum skipped as too easy; each
        skip counts.
    skipped_hard: counter queue_skipped_hard_prompts{dataset} Prompts that a curriculum skipped as too hard; each
        skip counts.
""")
#: By field of a subscription; and by prefix of those that end in a reason.
SUBS = table("""
    cut gauge subscription_cut_batches{subscription} Batches cut.
    cursor gauge subscription_committed_batches{subscription} Batches that the subscription's trainer has committed.
    ckpt gauge subscription_checkpointed_batches{subscription} Batches that the trainer's newest checkpoint covers.
    owned gauge subscription_owned{subscription} 1 while a trainer owns the subscription.
    bound gauge subscription_staleness_bound{subscription} Maximum staleness of a token that bears loss, in
        versions.
""")
DISPOSALS = table("""
    drop: counter subscription_dropped_groups{subscription,reason} Groups disposed of, by reason: filter/REASON for
        a filter, otherwise age, rewind, loss or quota.
    staleness: counter subscription_dropped_staleness{subscription,reason} Sum of the staleness of these groups at
        their disposal, in versions, except for groups that a filter rejected. Divided by the number of groups of a
        reason, it is their mean.
""")
TABLES = (QUEUE, BY_REASON, COUNTERS, SUBS, DISPOSALS)
SERIES = (LEADS, *(one for some in TABLES for one in some.values()))


class BufferCollector(Collector):
    """Read the queue for each scrape. Called from threads of the server; blocks for at most ``TIMEOUT_S`` per answer.

    Args:
        leads: returns whether this buffer leads.
    """

    def __init__(self, config: Config, leads: Callable[[], bool]) -> None:
        assert config.redis.url is not None
        self._url = config.redis.url
        self._keys = Keys(config.run)
        self._leads = leads

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Raises redis' errors, QueueUnavailable and ProtocolError."""
        yield LEADS.of(self._leads())
        if self._leads():
            with closing(connect(self._url, timeout_s=TIMEOUT_S, check=False)) as client:
                yield from queue_metrics(client, self._keys)


def queue_metrics(client: Client, keys: Keys) -> Iterator[Metric]:
    """Yield the series of the queue. Blocks for a few round trips; raises redis' errors and ProtocolError."""
    state = snapshot(client, keys)
    counters = state["counters"]
    subs = [sub for sub in state["subs"] if "unreadable" not in sub]
    yield from families(QUEUE, _queue(client, keys, state))
    yield from families(COUNTERS, {field: counters.get(field, 0) for field in COUNTERS})
    for begin, series in BY_REASON.items():
        yield series.each({name[len(begin) :]: n for name, n in counters.items() if name.startswith(begin)})
    for field, series in SUBS.items():
        yield series.each({sub["name"]: float(sub.get(field) or 0) for sub in subs})
    for begin, series in DISPOSALS.items():
        found = [(sub["name"], name, n) for sub in subs for name, n in sub.items() if name.startswith(begin)]
        yield series.each({(who, name.removeprefix(begin)): float(n) for who, name, n in found})


def _queue(client: Client, keys: Keys, state: Mapping[str, Any]) -> dict[str, Any]:
    ledgers, lanes, memory = ledgers_of(state), state["lanes"].items(), client.info("memory")
    accounts = {lane: {**ledger.accounts, "held": ledger.held} for lane, ledger in ledgers.items()}
    rooms = read_rooms(client, keys, read_gates(client, keys)[1])
    return {
        "jobs": {(lane, what): counts[what] for lane, counts in lanes for what in ("queued", "leased")},
        "oldest": {lane: age_s or 0.0 for lane, age_s in state["oldest_s"].items()},
        "paused": dict.fromkeys(state["paused"], 1.0),
        **{name: state[name] for name in ("delayed", "dead", "ready_lanes", "kept", "inflight", "versions", "step")},
        "unrecorded": client.zcard(keys.unrecorded),
        "workers": Counter(map(_state_of, state["workers"])),
        "rate": sum(worker.tokens_per_s for worker in state["workers"]),
        "waits": {(wait["who"], wait["name"]): wait["since_s"] for wait in state["waits"]},
        "tokens": {(lane, name): float(n) for lane, found in accounts.items() for name, n in found.items()},
        "goodput": of_training(ledgers).goodput,
        "places": {name: float(room.places) for name, room in rooms.items()},
        "taken": {name: float(room.taken) for name, room in rooms.items()},
        **{name: memory[name] for name in ("used_memory", "maxmemory")},
        "writable": not any(wait["who"] == "redis" for wait in state["waits"]),
    }


def _state_of(worker: WorkerPresence) -> str:
    return worker.state if worker.age_s <= FRESH_S else "silent"
