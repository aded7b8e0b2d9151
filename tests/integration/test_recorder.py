"""The recorder: rows of what retires, each once, whoever is killed; and what it says while it waits."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock import payloads
from penstock.config import Config
from penstock.consumers.history.recorder import Recorder
from penstock.consumers.trainer import Trainer
from penstock.errors import DiskFull
from penstock.history.reader import HistoryReader
from penstock.history.row import SampleRow
from penstock.history.writer import HistoryWriter
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import Judged, Leadership, RawLease, run
from penstock.protocol.waits import read_waits
from penstock.records.disposal import Disposal
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.records.worker_causes import RoomOnDisk
from penstock.redis.server import RedisServer
from penstock.system.run_folder import RunFolder
from tests.integration import play
from tests.integration.parts import Player, admit, buffering, make_config, publish, step
from tests.integration.test_buffer_kills import spawn

PATIENCE_S = 300.0


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return config_of(redis_server.url, keys, tmp_path)


def config_of(url: str, keys: Keys, folder: Path, **history: Any) -> Config:
    values = {
        "run": keys.run,
        "directory": folder,
        "redis": {"url": url},
        "model": {"path": str(folder)},
        "data": {"train": [{"name": "d", "path": str(folder / "train.jsonl")}]},
        "history": history,
    }
    return Config.model_validate(values)


def until(condition: Any, what: str) -> None:
    """Wait for it, long."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"not in {PATIENCE_S} s: {what}")


@contextlib.contextmanager
def recording(config: Config) -> Iterator[Recorder]:
    """A recorder in a thread; what kills it fails the test."""
    recorder, died = Recorder(config), list[BaseException]()

    def body() -> None:
        try:
            recorder.run()
        except BaseException as exc:
            died.append(exc)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        recorder.stop()
        thread.join(PATIENCE_S)
        if died:
            raise died[0]


def answer(client: redis.Redis, keys: Keys, held: RawLease, version: int = 1) -> None:
    """Commit all samples of a job with real payloads."""
    job = Job.from_bytes(held.body)
    records = []
    for k in range(job.n):
        sample = Sample(job, k, started_s=100.0, drawn_s=130.0, generate_s=2.0, reward_s=1.0)
        sample.append([1, 2, 3])
        sample.prompt_length = 3
        sample.append([5 + k] * 4, version=version, logprobs=[-0.5] * 4)
        sample.status, sample.finish_reason, sample.reward = "completed", "stop", float(k)
        data, (meta,) = payloads.pack([sample], token=held.token, server="control", worker="w1")
        client.set(keys.payload(sample.id, held.token), data)
        records.append((k, version, meta.to_bytes()))
    assert run(client, scripts.commit(keys, held.job, held.token, records)).outcome == "ready"


def begin(client: redis.Redis, keys: Keys, count: int) -> tuple[Leadership, list[str]]:
    """A run that keeps a history, with ``count`` groups that are ready."""
    run(client, scripts.record(keys, "first", lease_ms=1, backlog=100, patience_ms=60_000))
    until(lambda: not client.exists(keys.recorder), "the lease of the first recorder to end")
    leader = play.lead(client, keys)
    play.subscribe(client, keys, gb=count)
    play.join(client, keys)
    play.admit(client, keys, [play.job(i) for i in range(count)])
    held = play.lease(client, keys, most=count, version=1)
    for one in held:
        answer(client, keys, one)
    jobs = [one.job for one in held]
    play.keep(client, keys, leader, jobs)
    return leader, jobs


def train(client: redis.Redis, keys: Keys, leader: Leadership, jobs: Sequence[str]) -> None:
    """Batch 1 of these groups: cut, committed, durable, sealed."""
    assert play.cut(client, keys, leader, 1, jobs).outcome == "cut"
    play.commit_batch(client, keys, 1)
    run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=1))
    assert play.seal(client, keys, leader, jobs) == list(jobs)


def test_rows_count_more_than_those_that_redis_has_forgotten(
    client: redis.Redis, keys: Keys, config: Config, tmp_path: Path
) -> None:
    folder = RunFolder(config.run_dir).history
    leader, jobs = begin(client, keys, 1)
    forgotten = HistoryWriter(folder, 5, max_bytes=2**30)
    forgotten.write([SampleRow(jobs[0], 0, answer="of a lineage that is gone")])
    forgotten.close()
    train(client, keys, leader, jobs)
    with recording(config):
        until_recorded(client, keys)
    with contextlib.closing(HistoryReader(folder)) as reader:
        assert [row.answer for row in reader.each() if row.k == 0] != ["of a lineage that is gone"]
        assert reader.count() == 2


def until_recorded(client: redis.Redis, keys: Keys) -> None:
    until(lambda: not client.exists(keys.unrecorded), "all that waits to be recorded")


def fates(config: Config) -> dict[str, str]:
    """Sample -> its fate and reason, of a history that has each once."""
    with contextlib.closing(HistoryReader(config.run_dir / "history")) as reader:
        found = [(row.id, f"{row.fate} {row.reason}".rstrip()) for row in reader.each()]
        assert reader.problems == []
    assert len(found) == len(dict(found))
    return dict(found)


def test_each_sample_has_a_row_with_its_fate(client: redis.Redis, keys: Keys, config: Config) -> None:
    leader, jobs = begin(client, keys, 5)
    judged = Judged(jobs[2], "too_easy", False, 2, 1.0)
    run(client, scripts.judge(keys, leader, "actor", [judged]))
    run(client, scripts.dispose(keys, leader, "actor", Disposal.STALE, [jobs[3]]))
    run(client, scripts.cancel(keys, jobs[4], ["actor"]))
    lost = keys.payload(f"{jobs[1]}/0", "*").replace("{", "[{]")
    client.delete(*client.scan_iter(match=lost))
    train(client, keys, leader, jobs[:2])
    play.seal(client, keys, leader, jobs[2:4])
    play.admit(client, keys, [play.job(5), play.job(6)])
    (held,) = play.lease(client, keys, version=1)
    call = scripts.fail(keys, held.job, held.token, "w1", reason="refused", detail="", max_attempts=0, retry_ms=1)
    assert run(client, call) == "dead"
    run(client, scripts.cancel(keys, "d/0/6", ["actor"]))
    with recording(config):
        until_recorded(client, keys)
        until(lambda: "d/0/5/-1" in fates(config), "the row of the buried job")

    assert fates(config) == {
        "d/0/0/0": "trained", "d/0/0/1": "trained", "d/0/1/0": "trained payload_lost", "d/0/1/1": "trained",
        "d/0/2/0": "filtered too_easy", "d/0/2/1": "filtered too_easy",
        "d/0/3/0": "dropped stale", "d/0/3/1": "dropped stale", "d/0/4/0": "cancelled", "d/0/4/1": "cancelled",
        "d/0/5/-1": "buried refused", "d/0/6/-1": "cancelled",
    }  # fmt: skip
    assert run(client, scripts.sweep(keys, leader, [(job, 2) for job in jobs])) == 5
    assert not client.exists(keys.recorder), "it gave its right back"


def test_what_a_recorder_keeps_is_by_choice(client: redis.Redis, keys: Keys, config: Config) -> None:
    leader, jobs = begin(client, keys, 4)
    train(client, keys, leader, jobs)
    history = config.history.model_copy(update={"keep_every": 2})
    with recording(config.model_copy(update={"history": history})):
        until_recorded(client, keys)

    with contextlib.closing(HistoryReader(config.run_dir / "history")) as reader:
        rows = [reader.row(f"{job}/0") for job in jobs]
        uses = reader.uses(f"{jobs[0]}/0")
    kept = [row.tokens.tolist() for row in rows if row is not None and row.tokens is not None]
    assert kept == [[1, 2, 3, 5, 5, 5, 5]] * 2, "of every second group"
    assert [(use.subscription, use.batch, use.version, use.staleness, use.loss_tokens) for use in uses] == [
        ("actor", 1, 1, 0, 4)
    ]
    row = rows[0]
    assert row is not None
    assert (row.started_s, row.drawn_s, row.rewarded_s, row.generate_s) == (100.0, 130.0, 131.0, 2.0)
    assert (row.label, row.worker) == ("x", "w1")
    assert 0 < row.admitted_s <= row.leased_s <= row.ready_s <= row.cut_s <= row.trained_s


@pytest.mark.parametrize("point", ["before recorded", "after recorded"])
def test_I4_a_recorder_killed_at_any_step_is_succeeded(
    client: redis.Redis, keys: Keys, config: Config, tmp_path: Path, point: str
) -> None:
    leader, jobs = begin(client, keys, 3)
    train(client, keys, leader, jobs)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(config.model_dump_json())))
    command = [sys.executable, "-m", "tests.integration.buffer_driver", str(path), *point.split()]
    killed = subprocess.run([*command, "penstock.consumers.history.main"], timeout=PATIENCE_S, check=False)
    assert killed.returncode == -9
    written = fates(config)
    assert len(written) == 6, "it was killed after it had written"
    assert client.zcard(keys.unrecorded) == (3 if point.startswith("before") else 0)

    client.delete(keys.recorder)  # the lease of the dead runs out
    with recording(config):
        until_recorded(client, keys)
    assert fates(config) == written
    assert play.counter(client, keys, "unrecorded") == 0
    assert run(client, scripts.sweep(keys, leader, [(job, 2) for job in jobs])) == 3


def test_I8_a_full_disk_is_waited_for_by_name(
    client: redis.Redis, keys: Keys, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, jobs = begin(client, keys, 2)
    train(client, keys, leader, jobs)
    full, write = threading.Event(), HistoryWriter.write
    full.set()

    def refuse(self: HistoryWriter, *rows: Any) -> None:
        if full.is_set():
            raise DiskFull("/history cannot grow: no room is left.")
        write(self, *rows)

    monkeypatch.setattr(HistoryWriter, "write", refuse)
    with recording(config):
        until(
            lambda: any(
                one.who == "recorder" and isinstance(one.cause, RoomOnDisk) for one in read_waits(client, keys)
            ),
            "the recorder to say what it waits for",
        )
        assert client.zcard(keys.unrecorded) == 2
        full.clear()
        until_recorded(client, keys)
    assert len(fates(config)) == 4


def test_I4_a_leader_killed_after_a_seal_leaves_nothing_unrecorded_or_unswept(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    staleness = {"mode": "async", "bound": 8}
    config = make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, buffer={"lease_s": 0.5})
    worker = Player(client, keys)
    with recording(config), Trainer(config) as trainer:
        until(lambda: client.exists(keys.recorder), "the recorder to be there")
        leader = spawn(config, tmp_path, "after", "seal")
        try:
            publish(trainer)
            admit(client, keys, 4)
            jobs = worker.work(4, 1)
            for _ in range(2):
                step(trainer)
            trainer.state_dict()
            trainer.checkpointed()
            assert leader.wait(PATIENCE_S) == -9
        finally:
            leader.kill()
            leader.wait()
        with buffering(config):
            groups = [keys.group(job) for job in jobs]
            until(lambda: not client.exists(*groups, keys.unrecorded, keys.retiring), "all groups to be swept")
    assert fates(config) == {f"{job}/{k}": "trained" for job in jobs for k in range(2)}
    assert play.counter(client, keys, "unrecorded") == 0
    assert audit(client, keys).ok


class Rests:
    """Asks for an hour's rest after each turn, as where others want every core."""

    def rest_s(self) -> float:
        return 3600.0


@pytest.mark.parametrize("presses", ["a full Redis", "a backlog that fills"])
def test_who_needs_the_room_ends_its_rest(
    client: redis.Redis, keys: Keys, config: Config, monkeypatch: pytest.MonkeyPatch, presses: str
) -> None:
    monkeypatch.setattr("penstock.consumers.history.recorder.Pace", Rests)
    leader, jobs = begin(client, keys, 8)
    resting = threading.Event()
    rest = Recorder._rest

    def rests(recorder: Recorder, seconds: float) -> None:
        if seconds > 0:
            resting.set()
        rest(recorder, seconds)

    monkeypatch.setattr(Recorder, "_rest", rests)
    backlog = 10 if presses == "a backlog that fills" else 1000
    made = config.model_copy(update={"history": config.history.model_copy(update={"backlog": backlog})})
    with recording(made):
        assert resting.wait(PATIENCE_S)
        if presses == "a full Redis":
            train(client, keys, leader, jobs)
            client.config_set("maxmemory", 1)
        else:
            train(client, keys, leader, jobs)
        try:
            until_recorded(client, keys)
        finally:
            client.config_set("maxmemory", 0)
