"""A rank that outlived its job commits nothing for the next one (T14), whether the jobs are told apart or not."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.consumers.subscription.ownership import OWNER_LEASE_S
from penstock.consumers.subscription.rank import job_of
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration.parts import PATIENCE_S, Player, admit, buffering, make_config, until

Rank = Callable[[int, str], "subprocess.Popen[str]"]


@pytest.fixture
def made(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 8})


@pytest.fixture
def rank(made: Config, tmp_path: Path) -> Iterator[Rank]:
    """Starts ``rank(number, job)`` as a process; whatever was started is killed at the end."""
    path = tmp_path / "ranks.json"
    path.write_text(made.model_dump_json())
    started: list[subprocess.Popen[str]] = []

    def start(number: int, job: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.integration.rank_driver", str(path), str(number), job]
        started.append(subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def said(one: "subprocess.Popen[str]") -> str:
    """What a rank says next. Blocks."""
    assert one.stdout is not None
    return one.stdout.readline().strip()


def go_on(one: "subprocess.Popen[str]") -> None:
    assert one.stdin is not None
    one.stdin.write("\n")
    one.stdin.flush()


@pytest.mark.parametrize(("jobs", "in_hand"), [(("", ""), True), (("a", "b"), False)])
def test_T14_a_rank_that_outlived_its_job_is_refused_by_the_next(
    client: redis.Redis, keys: Keys, made: Config, rank: Rank, jobs: tuple[str, str], in_hand: bool
) -> None:
    """It holds a batch, or has none yet; rank 0 was killed, and another job has the subscription by now."""
    with buffering(made):
        zero = rank(0, jobs[0])
        assert said(zero) == "joined"
        one = rank(1, jobs[0])
        assert said(one) == "joined"
        if in_hand:
            admit(client, keys, 4)
            until(lambda: Player(client, keys).clock == 1, "the first publication")
            Player(client, keys).work(4, 1)
            assert [said(zero), said(one)] == ["got 1", "got 1"]
        zero.kill()
        zero.wait()
        successor = rank(0, jobs[1])
        assert said(successor) == "joined"
        if not in_hand:
            admit(client, keys, 4)
            until(lambda: Player(client, keys).clock == 2, "the successor's publication")
            Player(client, keys).work(4, 2)
        assert said(successor) == "got 1"
        if in_hand:
            go_on(one)
        assert said(one).startswith("refused Subscription 'actor' was taken over or rewound by another trainer")
        go_on(successor)
        assert said(successor) == "done 1"
        assert client.hmget(keys.sub("actor"), "cursor", "bits") == [b"0", b":10"], "rank 1 of this job has not"
        # The rank 1 of the successor's own job is let in, and moves the cursor.
        right = rank(1, jobs[1])
        assert [said(right), said(right)] == ["joined", "got 1"]
        go_on(right)
        assert said(right) == "done 1"
        until(lambda: client.hget(keys.sub("actor"), "cursor") == b"1")


def test_T14_a_rank_does_not_follow_an_owner_that_is_dead(
    client: redis.Redis, keys: Keys, made: Config, rank: Rank
) -> None:
    """A rank of the next job that is quicker than its rank 0 waits for it, although the old lease still runs."""
    with buffering(made):
        zero = rank(0, "")
        assert said(zero) == "joined"
        until(lambda: Player(client, keys).clock == 1, "its publication")
        zero.kill()
        zero.wait()
        client.pexpire(keys.owner("actor"), int(900 * OWNER_LEASE_S))
        early = rank(1, "")
        successor = rank(0, "")
        assert [said(successor), said(early)] == ["joined", "joined"]
        admit(client, keys, 4)
        until(lambda: Player(client, keys).clock == 2, "the successor's publication", PATIENCE_S)
        Player(client, keys).work(4, 2)
        for one in (successor, early):
            assert said(one) == "got 1"
            go_on(one)
            assert said(one) == "done 1"


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "1"}, ""),
        ({"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2", "MASTER_ADDR": "h"}, "r/2/h/"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "7//0"),
    ],
    ids=str,
)
def test_the_job_of_a_rank_is_that_of_its_launcher(environment: dict[str, str], job: str) -> None:
    assert job_of(environment) == job
