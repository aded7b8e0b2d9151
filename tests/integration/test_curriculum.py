"""What prompts came to is counted once for each group, whoever dies, and decides which come again."""

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config, StalenessConfig, TrainerConfig
from penstock.console.cli.main import execute
from penstock.consumers.trainer import Trainer
from penstock.errors import LeadershipLost
from penstock.producer.main import Producer
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.pass_rate import (
    CHUNK,
    MOST_GROUPS,
    Skip,
    read_prompt_rate,
    read_rates,
    share_byte,
    share_of,
)
from penstock.protocol.scripts import Leadership, RawLease, ensure_lanes, run
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    buffering,
    jobs_of,
    make_config,
    make_sample,
    publish,
    running,
    step,
    until,
)

PROMPTS = 12
#: Lines whose prompts are always right, and never.
EASY, HARD = {0, 3, 4, 9}, {1, 7}


def bytes_of(client: redis.Redis, keys: Keys, index: int) -> list[int]:
    """The groups of a prompt, the latest first."""
    rate = read_prompt_rate(client, keys, "d", index)
    return [] if rate is None else [share_byte(round(share * 254), 254) for share in rate.shares]


def admit(client: redis.Redis, keys: Keys, jobs: list[Job], skips: list[Skip | None], **over: Any) -> scripts.Admission:
    at = int(client.hget(keys.source, "train") or 0)
    pairs = [(one, one.to_bytes()) for one in jobs]
    values: dict[str, Any] = {"lane": "train", "source": "train", "position": at, "gate": None, **over}
    return run(client, scripts.admit(keys, pairs, model=play.MODEL, skips=skips, **values))


def ready(client: redis.Redis, keys: Keys, *jobs: Job) -> None:
    """Jobs that are drawn and complete."""
    assert admit(client, keys, list(jobs), []).admitted == len(jobs)
    play.complete(client, keys, len(jobs))


def keep(client: redis.Redis, keys: Keys, lead: Leadership, **shares: int) -> int:
    """Groups of d/EPOCH/LINE, named dEPOCH_LINE."""
    named = {"d/{}/{}".format(*name[1:].split("_")): share for name, share in shares.items()}
    return run(client, scripts.keep(keys, lead, [(job, 2) for job in named], None, named))


def test_I4_a_group_counts_once_however_often_and_by_whomever_it_is_told(client: redis.Redis, keys: Keys) -> None:
    ready(client, keys, play.job(5), play.job(5, epoch=1))
    lead = play.lead(client, keys)
    assert keep(client, keys, lead, d0_5=255) == 1
    assert keep(client, keys, lead, d0_5=255) == 1, "the reply was lost"
    client.delete(keys.leader)
    other = play.lead(client, keys, "leader-2")
    with pytest.raises(LeadershipLost):
        keep(client, keys, lead, d1_5=1)
    assert bytes_of(client, keys, 5) == [255]
    assert keep(client, keys, other, d0_5=1, d1_5=1) == 2
    assert bytes_of(client, keys, 5) == [1, 255], "the latest first"
    assert client.hget(keys.group("d/0/5"), "ps") == b"255"
    play.assert_conserved(client, keys)


def test_a_group_that_is_gone_or_of_no_curriculum_counts_for_nothing(client: redis.Redis, keys: Keys) -> None:
    ready(client, keys, play.job(1))
    lead = play.lead(client, keys)
    assert keep(client, keys, lead, d0_1=0) == 1
    run(client, scripts.cancel(keys, "d/0/1", []))
    assert keep(client, keys, lead, d0_1=255) == 0
    assert list(read_rates(client, keys)) == []


def test_the_latest_groups_of_a_prompt_are_kept_and_its_neighbours_stay_as_they_are(
    client: redis.Redis, keys: Keys
) -> None:
    lead = play.lead(client, keys)
    lines, told = [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 7], {}
    for epoch in range(MOST_GROUPS + 3):
        jobs = [play.job(line, epoch=epoch) for line in lines]
        ready(client, keys, *jobs)
        shares = {job.id: 1 + (37 * epoch + 11 * at) % 255 for at, job in enumerate(jobs)}
        run(client, scripts.keep(keys, lead, [(job, 2) for job in shares], None, shares))
        told[epoch] = list(shares.values())
    for at, line in enumerate(lines):
        assert bytes_of(client, keys, line) == [told[epoch][at] for epoch in sorted(told, reverse=True)][:MOST_GROUPS]
    assert [one.index for one in read_rates(client, keys)] == lines
    assert client.strlen(keys.rates("d", 0)) <= MOST_GROUPS * CHUNK
    assert len(client.keys(keys.rates("d", 0)[:-1].replace("{", "[{]") + "*")) == 3


def test_the_verb_skips_what_python_would_on_random_rates_and_bounds(client: redis.Redis, keys: Keys) -> None:
    rng, seen = random.Random("skips"), Counter[str]()
    play.subscribe(client, keys, bound=0, gb=10_000, sampler="oldest_version")
    for epoch in range(120):
        known = [[rng.choice([1, 2, 64, 128, 254, 255]) for _ in range(rng.randint(0, MOST_GROUPS))] for _ in range(8)]
        data = b"".join(bytes(one) + bytes(MOST_GROUPS - len(one)) for one in known)
        client.set(keys.rates("d", 0), data[: rng.randint(len(data) - MOST_GROUPS, len(data))].rstrip(b"\0"))
        bounds = [None, 0.0, 1 / 254, 0.25, 0.4980314960629921, 253 / 254, 1.0]
        skips = [
            Skip(rng.randint(1, MOST_GROUPS), easy=rng.choice(bounds), hard=rng.choice([None, 0.0, 0.1, 0.25]))
            for _ in range(8)
        ]
        jobs = [play.job(line, epoch=epoch) for line in range(8)]
        shares = [list(getattr(read_prompt_rate(client, keys, "d", line), "shares", [])) for line in range(8)]
        reasons = [skip.reason(one) for skip, one in zip(skips, shares, strict=True)]
        answer = admit(client, keys, jobs, list(skips), gate=(play.revision(client, keys), ["actor"]))
        assert answer.admitted == 8
        assert answer.skipped == {at for at, reason in enumerate(reasons) if reason}
        for job, reason in zip(jobs, reasons, strict=True):
            assert client.exists(keys.group(job.id)) == (not reason)
        seen.update(reasons)
    for reason in ("easy", "hard"):
        assert play.counter(client, keys, f"skipped_{reason}:d") == seen[reason] > 30
    assert play.counter(client, keys, "admitted") == seen[""] > 100
    play.assert_conserved(client, keys)


def test_T3_a_prompt_that_is_skipped_takes_no_place_at_the_gate_and_moves_the_position(
    client: redis.Redis, keys: Keys
) -> None:
    client.set(keys.rates("d", 0), (b"\xff" + bytes(7)) * 6)
    play.subscribe(client, keys, bound=0, gb=2)
    jobs = [play.job(line) for line in range(10)]
    always = Skip(1, easy=1.0)
    answer = admit(client, keys, jobs, [always] * 10, gate=(play.revision(client, keys), ["actor"]))
    assert (answer.admitted, answer.position, answer.skipped) == (8, 8, frozenset(range(6)))
    assert [fields[b"id"] for _, fields in client.xrange(keys.jobs("train"))] == [b"d/0/6", b"d/0/7"]
    client.hset(keys.source, "end", 9)
    play.subscribe(client, keys, bound=0, gb=50)
    again = admit(client, keys, jobs[8:], [always] * 2, gate=(play.revision(client, keys), ["actor"]))
    assert (again.admitted, again.position) == (1, 9), "no further than the end of the data"


def test_two_producers_that_offer_the_same_skip_a_prompt_once(client: redis.Redis, keys: Keys) -> None:
    client.set(keys.rates("d", 0), b"\xff")
    jobs, skips = [play.job(0), play.job(1)], [Skip(1, easy=1.0)] * 2
    assert admit(client, keys, jobs, list(skips), position=0).skipped == {0}
    assert admit(client, keys, jobs, list(skips), position=0).outcome == "moved"
    client.delete(keys.rates("d", 0))  # what the prompt has come to since changes nothing: its position is behind
    assert admit(client, keys, jobs, list(skips), position=0).outcome == "moved"
    assert (play.counter(client, keys, "skipped_easy:d"), play.counter(client, keys, "admitted")) == (1, 1)


# --- the real parts -----------------------------------------------------------------------------------------------


def curriculum(url: str, keys: Keys, folder: Path, *, is_on: bool = True, **over: Any) -> Config:
    """Twelve prompts in their order; none that is skipped comes all the same, but by a draw of one in a million."""
    path = folder / "d.jsonl"
    path.write_text("".join(f'{{"prompt": "p{i}", "label": "x"}}\n' for i in range(PROMPTS)))
    values = {"skip_above": 1.0, "skip_below": 0.0, "revisit": 1e-6, **over}
    data = {"train": [{"name": "d", "path": str(path), "shuffle": False, "curriculum": values if is_on else None}]}
    return make_config(url, keys.run, folder, data=data, buffer={"lease_s": 0.5})


def begin(client: redis.Redis, keys: Keys, places: int) -> None:
    play.subscribe(client, keys, bound=0, gb=places)
    client.hset(keys.clock, scripts.version_field(play.MODEL), 1)
    client.lpush(keys.gate, "1")


def answer(player: Player, held: RawLease) -> None:
    """Right, wrong, or one of each, by the prompt."""
    job = Job.from_bytes(held.body)
    samples = [make_sample(job, k, [1], 2) for k in range(job.n)]
    for sample in samples:
        sample.reward = float(job.index in EASY or (sample.k == 1 and job.index not in HARD))
    assert player.commit(held, samples, 1).outcome == "ready"


def work(client: redis.Redis, keys: Keys, count: int) -> list[str]:
    """Answer ``count`` jobs when they are there; their ids."""
    player, done = Player(client, keys), list[str]()
    while len(done) < count:
        most = count - len(done)
        found = until(lambda most=most: player.lease(most, version=1), "jobs")
        for held in found:
            answer(player, held)
        done += [held.job for held in found]
    return done


def lines_of(jobs: list[str], epoch: int) -> list[int]:
    return [int(job.split("/")[2]) for job in jobs if job.split("/")[1] == str(epoch)]


def spawn(config: Config, folder: Path, part: str, *point: str) -> "subprocess.Popen[bytes]":
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    words = [*point, part] if point else ["after", "nothing", part]
    command = [sys.executable, "-m", "tests.integration.buffer_driver", str(path), *words]
    return subprocess.Popen(command, start_new_session=True)


def died(victim: "subprocess.Popen[bytes]") -> None:
    try:
        assert victim.wait(PATIENCE_S) == -signal.SIGKILL, "killed at the point"
    finally:
        victim.kill()
        victim.wait()


MIDDLE = [line for line in range(PROMPTS) if line not in EASY | HARD]


def assert_second_epoch(client: redis.Redis, keys: Keys, jobs: list[str]) -> None:
    assert sorted(lines_of(jobs, 0)) == list(range(PROMPTS)), "the first epoch has them all, each once"
    assert lines_of(jobs, 1) == MIDDLE
    assert lines_of(jobs, 2) == MIDDLE[:2]
    assert (play.counter(client, keys, "skipped_easy:d"), play.counter(client, keys, "skipped_hard:d")) == (
        len(EASY) + len([line for line in EASY if line < MIDDLE[1]]),
        len(HARD) + len([line for line in HARD if line < MIDDLE[1]]),
    )
    for one in read_rates(client, keys):
        count = sum(int(job.split("/")[2]) == one.index for job in jobs)
        assert one.shares == (
            share_of(255) if one.index in EASY else share_of(share_byte(one.index not in HARD, 2)),
        ) * (count)
    assert audit(client, keys).ok


def counted(client: redis.Redis, keys: Keys) -> int:
    return sum(len(one.shares) for one in read_rates(client, keys))


@pytest.mark.parametrize("point", [(), ("before", "keep"), ("after", "keep")], ids=" ".join)
def test_I4_a_buffer_killed_while_it_counts_counts_each_group_once_and_easy_prompts_do_not_come_again(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, point: tuple[str, ...]
) -> None:
    config = curriculum(redis_server.url, keys, tmp_path)
    begin(client, keys, PROMPTS)
    with running(Producer(config)):
        jobs = work(client, keys, PROMPTS)
        victim = spawn(config, tmp_path, "penstock.buffer.main", *point)
        if point:
            died(victim)
        else:
            until(lambda: counted(client, keys) == PROMPTS)
            victim.kill()
            victim.wait()
        with buffering(config):
            until(lambda: counted(client, keys) == PROMPTS)
            begin(client, keys, PROMPTS + len(MIDDLE) + 2)
            jobs += work(client, keys, len(MIDDLE) + 2)
            until(lambda: counted(client, keys) == len(jobs))
    assert_second_epoch(client, keys, jobs)


@pytest.mark.parametrize("point", [("before", "admit"), ("after", "admit")], ids=" ".join)
def test_I4_a_producer_killed_around_an_admission_skips_each_prompt_once_and_loses_none(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, point: tuple[str, ...]
) -> None:
    config = curriculum(redis_server.url, keys, tmp_path)
    begin(client, keys, PROMPTS)
    with buffering(config):
        with running(Producer(config)):
            jobs = work(client, keys, PROMPTS)
        until(lambda: counted(client, keys) == PROMPTS)
        begin(client, keys, PROMPTS + len(MIDDLE) + 2)
        died(spawn(config, tmp_path, "penstock.producer.main", *point))
        with running(Producer(config)):
            jobs += work(client, keys, len(MIDDLE) + 2)
        until(lambda: counted(client, keys) == len(jobs))
    assert_second_epoch(client, keys, jobs)


def test_I4_what_prompts_came_to_outlives_a_kill_of_redis(keys: Keys, tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        client = connect(server.url)
        ensure_lanes(client, keys)
        config = curriculum(server.url, keys, tmp_path)
        begin(client, keys, PROMPTS)
        with buffering(config), running(Producer(config)):
            jobs = work(client, keys, PROMPTS)
            until(lambda: counted(client, keys) == PROMPTS)
        server.kill()
        server.restart()
        with buffering(config), running(Producer(config)):
            begin(client, keys, PROMPTS + len(MIDDLE) + 2)
            jobs += work(client, keys, len(MIDDLE) + 2)
            until(lambda: counted(client, keys) == len(jobs))
        assert_second_epoch(client, keys, jobs)
        client.close()
    finally:
        server.stop()


def test_prompts_that_are_skipped_come_back_by_a_draw_that_is_another_one_in_each_epoch(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """All prompts are easy: about half of them come in each epoch, as seed, prompt and epoch say."""
    config = curriculum(redis_server.url, keys, tmp_path, revisit=0.5)
    client.set(keys.rates("d", 0), (b"\xff" + bytes(7)) * PROMPTS)
    begin(client, keys, 100)
    with running(Producer(config)):
        until(lambda: play.counter(client, keys, "admitted") == 100)
    jobs = [fields[b"id"].decode() for _, fields in client.xrange(keys.jobs("train"))]
    epochs = [lines_of(jobs, epoch) for epoch in range(12)]
    assert len({tuple(one) for one in epochs}) > 3
    assert len({line for one in epochs for line in one}) == PROMPTS, "none is gone for good"
    other = Keys(keys.run + "-again")
    ensure_lanes(client, other)
    client.set(other.rates("d", 0), (b"\xff" + bytes(7)) * PROMPTS)
    begin(client, other, 100)
    with running(Producer(config.model_copy(update={"run": other.run}))):
        until(lambda: play.counter(client, other, "admitted") == 100)
    assert [fields[b"id"].decode() for _, fields in client.xrange(other.jobs("train"))] == jobs


def shares_right(line: int, version: int) -> list[float]:
    """Rewards of two answers: the policy learns a line with each version, and half knows the next three."""
    return [float(line < version), float(line < version + 3)]


@pytest.mark.parametrize("skips", [True, False], ids=["curriculum", "none"])
def test_a_run_asks_the_prompts_that_its_policy_has_not_learned_yet(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, skips: bool
) -> None:
    """Nine steps of four prompts: three epochs of all twelve, or what is not easy by then."""
    config = curriculum(redis_server.url, keys, tmp_path, is_on=skips, skip_below=None)
    settings = {"staleness": StalenessConfig(mode="async", bound=0), "trainer": TrainerConfig(batch_groups=4)}
    config = config.model_copy(update=settings)
    drawn: list[list[int]] = []
    with Trainer(config) as trainer, buffering(config), running(Producer(config)):
        trainer.load_state_dict({"run": config.run, "subscription": "actor", "batch": 0})
        assert publish(trainer) == 1
        player = Player(client, keys)
        for _ in range(9):
            for _ in range(4):
                (held,) = until(lambda: player.lease(1, version=player.clock), "a job")
                job = Job.from_bytes(held.body)
                samples = [make_sample(job, k, [player.clock], 2) for k in range(2)]
                for sample, reward in zip(samples, shares_right(job.index, player.clock), strict=True):
                    sample.reward = reward
                assert player.commit(held, samples, player.clock).outcome == "ready"
            batch = step(trainer)
            drawn.append(sorted(int(job.split("/")[2]) for job in jobs_of(batch)))

    # The same by hand: lines in their order, over and over, without those whose latest group was all right.
    known: dict[int, bool] = {}
    wanted: list[list[int]] = []
    position = 0
    for step_version in range(1, 10):
        taken: list[int] = []
        while len(taken) < 4:
            line, position = position % PROMPTS, position + 1
            if not (skips and known.get(line)):
                taken.append(line)
        known |= {line: sum(shares_right(line, step_version)) == 2 for line in taken}
        wanted.append(sorted(taken))
    assert drawn == wanted
    # Groups that teach nothing, since all of their answers are right: 9 of 36, where it would be 15.
    learned = sum(line < step_version for step_version, lines in enumerate(drawn, 1) for line in lines)
    assert learned == (9 if skips else 15)
    assert audit(client, keys).ok


def test_what_is_right_is_said_by_the_dataset(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = curriculum(redis_server.url, keys, tmp_path, right_from=0.5)
    begin(client, keys, 1)
    player = Player(client, keys)
    with buffering(config), running(Producer(config)):
        (held,) = until(lambda: player.lease(1, version=1))
        samples = [make_sample(Job.from_bytes(held.body), k, [1], 2) for k in range(2)]
        samples[0].reward, samples[1].reward = 0.5, 0.49
        player.commit(held, samples, 1)
        until(lambda: bytes_of(client, keys, 0) == [128])


def test_data_ls_and_show_tell_what_prompts_came_to(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    client.set(keys.rates("d", 1), bytes([255, 255, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 128, 1]))
    client.hset(keys.counters, mapping={"skipped_easy:d": 7, "skipped_hard:e": 2})
    client.set(keys.of("rates:d/x"), "what no verb wrote")
    told = said(redis_server, keys, capsys, "data", "ls", "--json")
    assert json.loads(told) == [
        {
            "dataset": "d",
            "prompts": 3,
            "mean": 0.416667,
            "always": 1,
            "between": 1,
            "never": 1,
            "skipped_easy": 7,
            "skipped_hard": 0,
        },
        {
            "dataset": "e",
            "prompts": 0,
            "mean": None,
            "always": 0,
            "between": 0,
            "never": 0,
            "skipped_easy": 0,
            "skipped_hard": 2,
        },
    ]
    assert "datasets with a curriculum" in said(redis_server, keys, capsys, "data", "ls")
    words = said(redis_server, keys, capsys, "data", "show", f"d/{CHUNK + 2}")
    assert words == f"dataset: d\nline: {CHUNK + 2}\nstate: sometimes right\nmean: 0.250\nshares: 0.5, 0\n"
    assert json.loads(said(redis_server, keys, capsys, "data", "show", f"d/{CHUNK}", "--json"))["shares"] == [1.0, 1.0]
    status = said(redis_server, keys, capsys, "status")
    assert "prompts skipped by a curriculum as too easy, of all epochs: d 7 (`penstock data ls`)" in status
    assert "prompts skipped by a curriculum as too hard, of all epochs: e 2 (`penstock data ls`)" in status
    for prompt, why in (
        (f"d/{CHUNK + 9}", "Nothing was counted of prompt"),
        ("d", "invalid prompt 'd'"),
        ("d/x", "invalid prompt 'd/x'"),
    ):
        assert execute(["data", "show", prompt, "--run", keys.run, "--redis", redis_server.url]) == 2
        assert why in capsys.readouterr().err


def said(server: RedisServer, keys: Keys, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert execute([*words, "--run", keys.run, "--redis", server.url]) == 0
    return capsys.readouterr().out
