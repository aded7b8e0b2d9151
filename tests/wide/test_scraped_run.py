"""A run of real processes with a fake engine, scraped by a real Prometheus: what dashboard and alerts ask is there."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.supervisor import Part
from tests.chaos.cluster.workloads import WORKLOADS, Workload
from tests.unit.console.test_monitoring import dashboard_queries
from tests.wide.prometheus import Prometheus, scraping, wait

SEEN = Workload(
    "seen",
    {**WORKLOADS["lanes"].config, "metrics": {"port": 0}, "history": {"enabled": True}},
    trainers=WORKLOADS["lanes"].trainers,
    workers=1,
    buffers=1,
    scorers=1,
    is_launched=True,
)
#: What a run has none of where nothing goes wrong, nothing is set or nobody reports: the query is valid all the same.
EMPTY = (
    "penstock_queue_failed_tries_total",
    "penstock_queue_buried_jobs_total",
    "penstock_subscription_dropped_groups_total",
    "penstock_trainer_reported",
    "penstock_redis_max_memory_bytes",
    "rollout_dynamic_filter_drop",
    "rollout_drop",
    "rollout_zero_std_count",
    "penstock_queue_wait_seconds",
    # Of the reference trainer, which reads evaluations itself.
    "eval",
    "eval_truncated_ratio",
    "eval_pass_at",
    # Where there are GPUs, and an engine that speculates.
    "penstock_worker_gpu_use_ratio",
    "penstock_worker_gpu_memory_used_bytes",
    "rollout_spec_accept_rate",
    # Where rewards are checked by a pool.
    "penstock_verifiers_checks_total",
    "penstock_verifiers_queued_checks",
)


@dataclass
class Scraped:
    cluster: Cluster
    prometheus: Prometheus


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    with Cluster(folder / "run", SEEN) as cluster:
        targets = cluster.folder / "runs" / cluster.keys.run / "targets.json"
        with scraping(folder, targets) as prometheus:
            wait(lambda: prometheus.value("penstock_trainer_batches_total") >= 5, lambda: "no batches")
            wait(lambda: prometheus.value("penstock_trainer_published_versions_total") >= 3, lambda: "no versions")
            wait(lambda: prometheus.value("penstock_scorer_sequences_total") > 0, lambda: "no scores")
            yield Scraped(cluster, prometheus)


def test_every_part_is_found_and_scraped(scraped: Scraped) -> None:
    def parts() -> set[tuple[str, str]]:
        found = scraped.prometheus.query("up == 1")
        return {(one["metric"]["part"], one["metric"]["run"]) for one in found}

    every = {"launcher", "producer", "buffer", "worker", "trainer", "scorer", "recorder"}
    wait(lambda: parts() == {(part, scraped.cluster.keys.run) for part in every}, parts)


def test_every_query_of_the_dashboard_is_answered(scraped: Scraped) -> None:
    def unanswered() -> list[str]:
        run = scraped.cluster.keys.run
        asked = [query.replace("$__rate_interval", "1m").replace("$run", run) for query in dashboard_queries()]
        empty = [query for query in asked if not scraped.prometheus.query(query)]
        return [query for query in empty if not any(f"{name}{{" in query for name in EMPTY)]

    # A rate has no value before the second scrape.
    wait(lambda: not unanswered(), unanswered)


def test_every_rule_is_evaluated_without_an_error(scraped: Scraped) -> None:
    def rules() -> list[dict[str, str]]:
        return [rule for group in scraped.prometheus.ask("rules")["groups"] for rule in group["rules"]]

    wait(lambda: all(rule["health"] == "ok" for rule in rules()), rules)

    assert len(rules()) > 5


def test_a_worker_that_is_killed_is_told_of_until_another_one_has_its_jobs(scraped: Scraped) -> None:
    (worker,) = scraped.cluster.of("worker")
    assert "PenstockWorkerLost" not in scraped.prometheus.firing()

    wait(lambda: _killed_with_a_lease(scraped.cluster, worker), lambda: "no lease of the worker")

    wait(lambda: {"PenstockWorkerLost", "QuickWorkerLost"} <= scraped.prometheus.firing(), scraped.prometheus.firing)
    wait(lambda: "QuickWorkerLost" not in scraped.prometheus.firing(), scraped.prometheus.firing)


def test_a_run_that_trains_nothing_is_told_of_until_it_trains(scraped: Scraped) -> None:
    trainers = scraped.cluster.of("trainer")
    wait(lambda: "QuickNoProgress" not in scraped.prometheus.firing(), scraped.prometheus.firing)

    for trainer in trainers:
        scraped.cluster.stop(trainer)
    try:
        wait(lambda: "QuickNoProgress" in scraped.prometheus.firing(), scraped.prometheus.firing)
    finally:
        for trainer in trainers:
            scraped.cluster.cont(trainer)

    wait(lambda: "QuickNoProgress" not in scraped.prometheus.firing(), scraped.prometheus.firing)


def _killed_with_a_lease(cluster: Cluster, worker: Part) -> bool:
    cluster.stop(worker)
    if cluster.in_flight():
        cluster.kill(worker)
        return True
    cluster.cont(worker)
    return False
