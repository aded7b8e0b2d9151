"""kill -9 and SIGSTOP/SIGCONT of every part in turn, during a real run: nothing is lost, nothing trained twice."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.launched.run_under_test import RunUnderTest

pytestmark = [pytest.mark.chaos, pytest.mark.engine, pytest.mark.timeout(900)]

STEPS = 48
BOUND = 4
#: Steps between two faults, so that each falls into a run that is under way.
APART = 3


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunUnderTest]:
    run = RunUnderTest(
        tmp_path,
        f"--trainer.steps={STEPS}",
        "--trainer.checkpoint_every=2",
        "--trainer.batch_groups=16",
        f"--staleness.bound={BOUND}",
        "--worker.count=1",
        "--worker.lease_s=4",
        "--worker.heartbeat_s=1",
        "--buffer.lease_s=3",
        "--engine.health_interval_s=1",
        "--engine.health_timeout_s=2",
        "--engine.load_timeout_s=10",
        "--data.eval_every=0",
    )
    yield run
    run.close()


def test_I1_to_I6_kill_and_freeze_every_part_during_a_run(run: RunUnderTest) -> None:
    run.watch_batches()
    faults: list[tuple[str, Callable[[], None]]] = [
        ("kill producer", lambda: _kill(run, "producer")),
        ("kill buffer", lambda: _kill(run, "buffer")),
        ("kill trainer", lambda: _kill(run, "trainer")),
        ("kill redis", lambda: _kill(run, "redis")),
        ("kill engine", lambda: _kill(run, "engine")),
        ("kill worker", lambda: _kill(run, "worker")),
        ("freeze producer", lambda: _freeze_for_steps(run, "producer", 1)),
        ("freeze buffer", lambda: run.freeze("buffer", lambda: _gone(run, run.keys.leader), "leadership to end")),
        (
            "freeze trainer",
            lambda: run.freeze("trainer", lambda: _gone(run, run.keys.owner("actor")), "its lease to end"),
        ),
        ("freeze worker", lambda: _freeze_worker(run)),
        ("freeze engine", lambda: _freeze_engine(run)),
        ("freeze redis", lambda: _freeze_redis(run)),
    ]
    for number, (name, fault) in enumerate(faults, 1):
        run.until(f"step {number * APART}, before: {name}", lambda number=number: run.step() >= number * APART)
        print(f"step {run.step()}: {name}", flush=True)
        fault()

    summary = run.finish()

    assert summary["audit"] == "ok"
    assert (summary["lost"], summary["duplicated"]) == (0, 0)
    assert summary["steps"] == STEPS
    assert summary["staleness_max"] <= BOUND
    assert sorted(run.jobs) == list(range(1, max(run.jobs) + 1))
    assert max(run.jobs) >= STEPS
    assert {len(digests) for digests in run.digests.values()} == {1}, "a batch was cut twice"
    uses = Counter(job for jobs in run.jobs.values() for job in jobs)
    assert [job for job, count in uses.items() if count > 1] == [], "a group entered two batches"


def _kill(run: RunUnderTest, part: str) -> None:
    gone = run.kill(part)
    run.until(f"{part} to be started again", lambda: run.pid_of(part) != gone)


def _gone(run: RunUnderTest, key: str) -> bool:
    return run.ask(lambda client: client.exists(key)) == 0


def _freeze_for_steps(run: RunUnderTest, part: str, steps: int) -> None:
    before = run.step()
    run.freeze(part, lambda: run.step() >= before + steps, f"{steps} steps without {part}")


def _freeze_worker(run: RunUnderTest) -> None:
    before = run.counter("reclaimed")
    pid = run.working_pid("worker")
    while True:
        run.until("the worker to hold a job", lambda: run.num_leased())
        os.kill(pid, signal.SIGSTOP)
        if run.num_leased():
            break
        # It gave its last lease back in that very moment.
        os.kill(pid, signal.SIGCONT)
    run.freeze("worker", lambda: run.counter("reclaimed") > before, "its leases to be taken over")


def _freeze_engine(run: RunUnderTest) -> None:
    before = run.pid_of("engine")
    run.freeze("engine", lambda: run.worker().engine_pid not in (before, 0), "the engine to be replaced")


def _freeze_redis(run: RunUnderTest) -> None:
    # Longer than the leader's lease, shorter than a client's patience.
    resume_at = time.monotonic() + 4.0
    run.freeze("redis", lambda: time.monotonic() > resume_at, "a pause of Redis")
