"""What a night runs next: kinds that are furthest from their targets, where they can strike."""

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.cluster.workloads import WORKLOADS
from tests.chaos.nemesis.clock import library
from tests.chaos.nemesis.kinds import KINDS
from tests.chaos.night.choice import KINDS_OF_A_RUN, Run, choose, expected
from tests.chaos.night.reach import reach
from tests.chaos.night.targets import REAL_ENGINE, TARGETS, net_share, struck, tried

REACHED = {name: reach(workload) for name, workload in WORKLOADS.items()}
#: All as far as they should be, the network's far below its share.
DONE = Counter(TARGETS) - Counter({name: 100 for name in TARGETS if name.startswith("net:")})


def test_every_kind_strikes_some_workload() -> None:
    missing = {name for name in KINDS if not any(name in kinds for kinds in REACHED.values())}

    assert missing <= ({"clock:redis"} if library() is None else set())


@pytest.mark.parametrize("kind", ["kill:router", "kill:launcher", "kill:check", "payloads:lost", "operator:requeue"])
def test_the_kind_that_was_struck_least_comes_next_where_it_can(kind: str) -> None:
    workload, kinds = choose(1, DONE - Counter({kind: TARGETS[kind]}), {})

    assert kinds[0] == kind
    assert kind in REACHED[workload]


def test_a_real_engine_has_a_target_of_its_own() -> None:
    workload, kinds = choose(1, DONE - Counter({REAL_ENGINE: 90}), {})

    assert WORKLOADS[workload].is_real
    assert kinds[0] == "kill:engine"
    rows = [{"workload": name, "counted": {"kill:engine": 2}} for name in ("engine", "async")]
    assert struck(rows) == {REAL_ENGINE: 2, "kill:engine": 2}


def test_of_workloads_that_serve_alike_the_one_that_was_run_least_comes_next() -> None:
    runs = Counter(dict.fromkeys(WORKLOADS, 3)) - Counter({"turns": 1})

    assert choose(1, DONE - Counter({"kill:leader": TARGETS["kill:leader"]}), runs)[0] == "turns"


def test_the_network_waits_while_it_has_more_than_its_share() -> None:
    counted = Counter({"net:delay": 30, "kill:redis": 70})
    assert net_share(counted) == 0.3

    for seed in range(40):
        assert not any(kind.startswith("net:") for kind in choose(seed, counted, {}, ["async"])[1])


def test_a_night_comes_to_every_kind_in_runs_of_kinds_that_go_together() -> None:
    counted, runs = Counter[str](), Counter[str]()
    for seed in range(60):
        workload, kinds = choose(seed, counted, runs)
        families = {kind.partition(":")[0] for kind in kinds}
        assert 1 <= len(kinds) <= KINDS_OF_A_RUN
        assert not {"net", "sentinel"} <= families
        assert not ("sentinel" in families and ("redis" in families or "kill:redis" in kinds))
        counted += expected(Run(workload, seed, kinds, 12, "7.0.15", Path("redis-server")))
        runs[workload] += 1

    missing = TARGETS.keys() - counted.keys()
    assert missing <= ({"clock:redis"} if library() is None else set())
    assert runs.keys() == {one.name for one in WORKLOADS.values() if not one.is_cuda}


def test_a_night_of_given_kinds_strikes_with_no_other() -> None:
    workload, kinds = choose(1, {}, {}, ["async", "engine_cuda", "verifiers"], ["kill:check"])

    assert (workload, kinds) == ("verifiers", ("kill:check",))


def test_the_same_seed_chooses_the_same() -> None:
    assert choose(7, {}, {}) == choose(7, {}, {})
    assert len({choose(seed, {}, {}) for seed in range(9)}) > 1


def test_a_run_on_its_way_is_expected_to_strike_and_one_in_vain_counts_once() -> None:
    run = Run("router", 1, ("kill:router", "stop:router"), 18, "7.0.15", Path("redis-server"))

    assert expected(run) == {"kill:router": 9, "stop:router": 9}
    row = {"workload": "router", "kinds": list(run.kinds), "counted": {"kill:router": 2}}
    assert tried([row]) == {"kill:router": 2, "stop:router": 1}
