"""What a pool of verifiers serves: sums that outlive the verifiers that made them."""

from penstock.workers.rewards.pool.metrics import PoolCollector


def served(tally: PoolCollector) -> dict[tuple[str, ...], float]:
    return {(one.name, *one.labels.values()): one.value for family in tally.collect() for one in family.samples}


def test_checks_of_a_verifier_that_died_still_count() -> None:
    tally = PoolCollector()
    tally.starts, tally.queued = 2, 5
    other = {"state": "idle", "checks": 10, "killed": 0}
    tally.running = {"v-0.a": {"state": "idle", "checks": 4, "killed": 1}, "v-1.b": other}
    tally.end("v-0.a")
    tally.running = {"v-1.b": other, "v-0.c": {"state": "starting", "checks": 0, "killed": 0}}
    assert served(tally) == {
        ("penstock_verifiers_processes", "idle"): 1,
        ("penstock_verifiers_processes", "starting"): 1,
        ("penstock_verifiers_checks_total",): 15,
        ("penstock_verifiers_killed_checks_total",): 1,
        ("penstock_verifiers_starts_total",): 2,
        ("penstock_verifiers_queued_checks",): 5,
    }


def test_one_that_died_before_it_was_looked_at_counts_nothing() -> None:
    tally = PoolCollector()
    tally.end("v-0.a")
    assert served(tally)["penstock_verifiers_checks_total",] == 0
