"""Faults do what they say to real processes, and leave them whole."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.chaos.cluster.crew import Crew
from tests.chaos.cluster.processes import descendants, runs
from tests.chaos.cluster.supervisor import Part, Supervisor
from tests.chaos.cluster.workloads import Workload
from tests.chaos.nemesis import clock, network, signals, storage
from tests.chaos.nemesis.act import Act, Facts, Ground, Kind, NotStruck
from tests.chaos.nemesis.kinds import KINDS, chosen
from tests.chaos.nemesis.nemesis import Nemesis
from tests.chaos.nemesis.schedule import Log, Schedule
from tests.chaos.places import RECORDED, ROOT


class StandIn(Crew):
    """A cluster whose parts sleep, and whose trainer commits a batch at every look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = ROOT
        self.workload = Workload("stand-in")
        self._supervisor = Supervisor(folder)
        self.batches = 0
        for name in ("worker-0", "worker-1", "buffer-0", "producer"):
            part = Part(name.partition("-")[0], name, ["sleep", "1000"], {}, log=folder / f"{name}.log")
            self.supervisor.add(part)
        self.wait("all to live", lambda: all(part.is_alive for part in self.parts.values()))

    def in_flight(self) -> int:
        return 3

    def committed(self) -> int:
        self.batches += 1
        return self.batches

    def wait(self, what: str, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, what
            time.sleep(0.01)
        return value


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandIn]:
    cluster = StandIn(tmp_path)
    yield cluster
    cluster.supervisor.end()


@pytest.fixture
def ground(cluster: StandIn) -> Ground:
    return Ground(cluster)  # type: ignore[arg-type]


def state_of(part: Part) -> str:
    """As the kernel has it: S asleep, T stopped."""
    return Path(f"/proc/{part.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_part_that_is_killed_is_started_again(cluster: StandIn, ground: Ground) -> None:
    kind = signals.kinds()["kill:worker"]
    facts = kind.choose(ground, Random(1))
    assert facts is not None
    part = cluster.parts[facts["parts"][0]]
    before = part.pid

    kind.strike(ground, facts)

    cluster.wait("another life", lambda: part.lives == 2 and part.is_alive)
    assert part.exits == [-signal.SIGKILL]
    assert part.pid != before


def test_all_of_them_are_killed_together(cluster: StandIn, ground: Ground) -> None:
    kind = signals.kinds()["kill:workers"]
    facts = kind.choose(ground, Random(1))
    assert facts == {"parts": ["worker-0", "worker-1"]}

    kind.strike(ground, facts)

    cluster.wait("both", lambda: all(cluster.parts[name].lives == 2 for name in facts["parts"]))
    assert signals.kinds()["kill:trainers"].choose(ground, Random(1)) is None


@pytest.mark.parametrize("then_kill", [False, True])
def test_a_part_is_stopped_for_longer_than_its_lease(cluster: StandIn, ground: Ground, then_kill: bool) -> None:
    kind = signals.kinds()["stop:worker"]
    facts = kind.choose(ground, Random(1))
    assert facts is not None
    assert facts["hold_s"] > ground.lease_s("worker")
    part, looked = cluster.parts["worker-0"], []
    thread = _meanwhile(lambda: looked.append(cluster.wait("it to stop", lambda: state_of(part) == "T")))

    kind.strike(ground, {"parts": ["worker-0"], "hold_s": 0.5, "then_kill": then_kill})
    thread.join()

    assert looked == [True]
    cluster.wait("it to go on", lambda: part.lives == 1 + then_kill and part.is_alive and state_of(part) == "S")


def _meanwhile(call: Callable[[], Any]) -> Any:
    import threading

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_process_below_a_pool_is_killed_and_the_pool_is_not(cluster: StandIn, ground: Ground) -> None:
    checks = "while :; do sh -c 'while kill -0 $PPID; do sleep 0.2; done'; done"
    pool = Part("verifier", "verifier-0", ["/bin/sh", "-c", checks], {}, log=cluster.folder / "verifier-0.log")
    cluster.supervisor.add(pool)
    cluster.wait("a check", lambda: [pid for below, pid in descendants(pool.pid) if below == 2])
    (before,) = (pid for below, pid in descendants(pool.pid) if below == 1)

    signals.kinds()["kill:check"].strike(ground, {"part": "verifier-0", "depth": 1})

    cluster.wait("it to be gone", lambda: not runs(before))
    assert pool.lives == 1


def test_what_another_part_starts_is_not_asked_to_leave(cluster: StandIn, ground: Ground) -> None:
    """Nobody starts it again who knows that it should be."""
    for part in cluster.of("worker"):
        part.is_adopted = True
    cluster.wait("the workers to be seen", lambda: all(part.is_alive for part in cluster.of("worker")))

    assert signals.kinds()["kill:worker"].choose(ground, Random(1)) is not None
    assert signals.kinds()["term:worker"].choose(ground, Random(1)) is None
    assert clock.kinds()["clock:worker"].choose(ground, Random(1)) is None


def test_what_is_not_there_is_not_chosen(ground: Ground) -> None:
    possible = {name for name, kind in signals.kinds().items() if kind.choose(ground, Random(0))}

    assert possible == {
        "kill:worker", "stop:worker", "term:worker", "kill:workers", "kill:producer", "stop:producer", "term:producer",
        "kill:all", "kill:everything",
    } | ({"kill:standby", "stop:standby", "term:standby"} & possible)  # fmt: skip
    assert not any(kind.choose(ground, Random(0)) for kind in network.kinds().values()), "there is no proxy"
    assert clock.kinds()["clock:redis"].choose(ground, Random(0)) is None, "there is no faketime"


def test_the_clock_of_a_server_that_hangs_under_the_library_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "START_S", 0.1)
    binaries = {"good": "exit 0", "bad": "exit 1", "hangs": "exec sleep 60"}
    binaries["jemalloc"] = "echo Redis server v=7.0.15 malloc=jemalloc-5.3.0"
    for name, script in binaries.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    assert not clock.starts_under(Path(), tmp_path / "hangs")
    monkeypatch.setattr(clock, "START_S", 60.0)
    assert clock.starts_under(Path(), tmp_path / "good")
    assert not clock.starts_under(Path(), tmp_path / "bad")
    assert not clock.starts_under(Path(), tmp_path / "jemalloc")


def test_a_python_part_has_a_clock_that_jumps_and_sleeps_as_long_as_ever(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = """
import time
begun = time.monotonic()
time.sleep(0.2)
assert 0.1 < time.monotonic() - begun < 20
print(time.time(), time.time_ns())
"""
    environment = {"PYTHONPATH": str(RECORDED), "CHAOS_HISTORY": str(tmp_path)}
    for seconds in (0, 3600, -86400):
        clock.tell(told, seconds)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment, "CHAOS_CLOCK": str(told)},
            capture_output=True,
            text=True,
            check=True,
        )
        read, read_ns = (float(word) for word in done.stdout.split())
        assert abs(read - time.time() - seconds) < 60
        assert abs(read_ns / 1e9 - read) < 60


def test_a_file_is_cut_between_what_is_kept_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "appendonly.aof"
    for share, left in ((0.0, 40), (0.5, 70), (0.999, 99)):
        path.write_bytes(bytes(100))
        assert storage.cut_file(path, 40, share) == 100 - left
        assert path.stat().st_size == left


def test_the_file_that_a_server_writes_to_is_found_in_either_version(tmp_path: Path) -> None:
    assert storage.append_only_file(tmp_path).name == "appendonly.aof"
    (tmp_path / "appendonlydir").mkdir()
    for number in (2, 10, 9):
        (tmp_path / "appendonlydir" / f"appendonly.aof.{number}.incr.aof").touch()
    assert storage.append_only_file(tmp_path).name == "appendonly.aof.10.incr.aof"


def test_a_verb_is_named_on_the_wire_as_penstock_names_it() -> None:
    from penstock.redis.call import script

    assert {network.digest_of(ROOT, verb) for verb in network.VERBS} == {script(verb).sha for verb in network.VERBS}


def test_kinds_are_chosen_by_name_family_and_pattern() -> None:
    assert set(chosen(["kill:worker", "kill:engine"])) == {"kill:worker", "kill:engine"}
    assert set(chosen(["net"])) == set(network.kinds())
    assert set(chosen(["*:redis"])) >= {"kill:redis", "stop:redis", "disk:redis", "clock:redis"}
    assert chosen([]) == KINDS
    with pytest.raises(ValueError, match="'nothing' is no kind of fault"):
        chosen(["nothing"])


def test_a_nemesis_strikes_logs_and_counts(ground: Ground, tmp_path: Path) -> None:
    struck: list[Facts] = []

    def strike(ground: Ground, facts: Facts) -> None:
        log = (tmp_path / "log").read_bytes()
        assert b'"facts":{"name":"' + facts["name"].encode() in log, "it is written before it is done"
        struck.append(facts)
        if len(struck) == 2:
            raise NotStruck("no request came")

    kinds = {"any:thing": Kind(lambda _, rng: {"name": rng.choice("abc")}, strike, moments=())}
    nemesis = Nemesis(ground, Schedule(1, kinds), kinds, Log(tmp_path / "log", {}))
    try:
        found = nemesis.run(3)
    finally:
        nemesis.close()

    assert [one.strike.error for one in found] == ["", "no request came", "", ""]
    assert sum(one.counts for one in found) >= 2
    assert len(struck) == 4
    assert nemesis.stuck_after == 0


def test_no_fault_is_begun_when_its_seconds_are_over(ground: Ground, tmp_path: Path) -> None:
    kinds = {"any:thing": Kind(lambda _, rng: {}, lambda *_: time.sleep(0.2), moments=())}
    nemesis = Nemesis(ground, Schedule(1, kinds), kinds, Log(tmp_path / "log", {}))
    try:
        found = nemesis.run(1000, seconds=0.1)
    finally:
        nemesis.close()

    assert len(found) == 1


def test_a_run_that_does_not_recover_is_said_to_be_stuck(
    cluster: StandIn, ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(ground: Ground, facts: Facts) -> None:
        monkeypatch.setattr(cluster, "committed", lambda: 0)

    kinds = {"any:thing": Kind(lambda _, rng: {}, strike, moments=())}
    ground.cluster = cluster  # type: ignore[assignment]

    class Once:
        def next(self, possible: Any) -> Act:
            return Act(1 + len(nemesis.strikes), "any:thing", facts={})

        def facts(self, act: Act, ground: Ground) -> Act:
            return act

    nemesis = Nemesis(ground, Once(), kinds, Log(tmp_path / "log", {}), recovery_s=0.3)
    nemesis._commits._committed = lambda: cluster.committed()
    try:
        found = nemesis.run(3)
    finally:
        nemesis.close()

    assert nemesis.stuck_after == len(found)
    assert found[-1].recovery_s is None
