"""What keeps the parts of a run up: what died is started again, unless it is held down, retired or through."""

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster.adopted import child_of, logged_by
from tests.chaos.cluster.supervisor import Part, Supervisor

PATIENCE_S = 60.0
WAITS = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path)
    yield supervisor
    supervisor.end()


def part(tmp_path: Path, name: str, command: list[str] = WAITS, **fields: object) -> Part:
    made = Part("worker", name, command, {}, log=tmp_path / f"{name}.log")
    for key, value in fields.items():
        setattr(made, key, value)
    return made


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_part_that_was_killed_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    one = part(tmp_path, "a")
    supervisor.add(one)
    until(lambda: one.is_alive)

    killed = supervisor.send(one, signal.SIGKILL)

    until(lambda: one.lives == 2 and one.is_alive)
    assert one.pid != killed
    assert one.exits == [-signal.SIGKILL]
    assert supervisor.unexpected() == []


def test_a_part_that_was_stopped_can_be_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    one = part(tmp_path, "a")
    supervisor.add(one)
    until(lambda: one.is_alive)

    supervisor.send(one, signal.SIGSTOP)
    assert one.is_stopped
    supervisor.send(one, signal.SIGKILL)

    until(lambda: one.lives == 2 and one.is_alive)
    assert not one.is_stopped


def test_a_part_that_is_held_stays_dead_until_it_is_let_up(supervisor: Supervisor, tmp_path: Path) -> None:
    held, other = part(tmp_path, "held"), part(tmp_path, "other")
    supervisor.add(held, other)
    until(lambda: held.is_alive and other.is_alive)

    supervisor.hold(held)
    supervisor.send(held, signal.SIGKILL)
    supervisor.send(other, signal.SIGKILL)
    until(lambda: other.lives == 2)
    assert (held.lives, held.is_alive) == (1, False)

    supervisor.let_up(held)
    until(lambda: held.lives == 2)


def test_a_part_that_is_retired_does_not_come_back(supervisor: Supervisor, tmp_path: Path) -> None:
    gone, other = part(tmp_path, "gone"), part(tmp_path, "other")
    supervisor.add(gone, other)
    until(lambda: gone.is_alive and other.is_alive)

    supervisor.retire(gone, signal.SIGKILL)
    supervisor.send(other, signal.SIGKILL)

    until(lambda: other.lives == 2)
    assert (gone.lives, gone.is_alive) == (1, False)


def test_ranks_live_and_die_together(supervisor: Supervisor, tmp_path: Path) -> None:
    ranks = [part(tmp_path, f"r{number}", group="ranks") for number in range(3)]
    supervisor.add(*ranks)
    until(lambda: all(rank.is_alive for rank in ranks))
    before = [rank.pid for rank in ranks]

    supervisor.send(ranks[1], signal.SIGKILL)

    until(lambda: all(rank.lives == 2 and rank.is_alive for rank in ranks))
    assert not set(before) & {rank.pid for rank in ranks}


def test_a_part_that_may_finish_is_through_when_it_does(supervisor: Supervisor, tmp_path: Path) -> None:
    through = part(tmp_path, "a", [sys.executable, "-S", "-c", ""], may_finish=True)
    fails = part(tmp_path, "b", [sys.executable, "-S", "-c", "raise SystemExit(2)"], may_finish=True)
    supervisor.add(through, fails)

    until(lambda: fails.lives == 3)

    assert (through.lives, through.is_retired) == (1, True)
    assert ("b", 2) in supervisor.unexpected()


def test_a_supervisor_that_died_says_so(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.check()
    supervisor.add(part(tmp_path / "gone", "a"))  # its log cannot be written

    def has_died() -> bool:
        try:
            supervisor.check()
        except RuntimeError:
            return True
        return False

    until(has_died)
    supervisor.end()


def test_a_part_that_another_one_starts_is_found_whenever_it_is_another_process(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    parent = part(tmp_path, "parent", ["/bin/sh", "-c", "while :; do sleep 1000; done"])
    child = part(tmp_path, "child", is_adopted=True, seek=child_of(parent, "sleep 1000"))
    supervisor.add(parent, child)
    until(lambda: child.is_alive)

    killed = supervisor.send(child, signal.SIGKILL)
    until(lambda: child.lives == 2 and child.is_alive)
    supervisor.send(parent, signal.SIGKILL)
    supervisor.send(child, signal.SIGKILL)
    until(lambda: parent.lives == 2 and child.lives == 3 and child.is_alive)

    assert child.pid not in (0, killed)
    assert child.exits == []
    supervisor.retire(parent, signal.SIGKILL)
    supervisor.retire(child, signal.SIGKILL)


def test_a_part_is_found_by_what_another_one_logged_last(supervisor: Supervisor, tmp_path: Path) -> None:
    worker = part(tmp_path, "worker")
    supervisor.add(worker)
    until(lambda: worker.is_alive)
    find = logged_by(worker, re.compile(r"router, pid (\d+)"))
    assert find() == 0

    with worker.log.open("a") as log:
        log.write("router, pid 17\nrouter, pid 18\n")

    assert find() == 18
