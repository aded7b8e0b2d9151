"""The real producer: nothing skipped, nothing doubled, never past the gate, and a word for every wait."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import ValidationError

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.producer.main import Producer
from penstock.producer.offers import Evaluations
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import ensure_lanes, run
from penstock.records.causes import GateClosed, NoDrivingTrainer, NoPublication
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.worker_causes import RedisFull
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import PATIENCE_S, make_config, producing, running, until, until_waits


def write_prompts(path: Path, count: int, word: str = "p") -> str:
    path.write_text("".join(json.dumps({"prompt": f"{word}{i}", "label": str(i)}) + "\n" for i in range(count)))
    return str(path)


def with_data(
    url: str, keys: Keys, folder: Path, *, train: int = 10, held_out: int = 0, every: int = 0, **of: Any
) -> Config:
    data: dict[str, Any] = {
        "train": [{"name": "d", "path": write_prompts(folder / "d.jsonl", train), **of}],
        "eval_every": every,
    }
    if held_out:
        data["eval"] = [{"name": "e", "path": write_prompts(folder / "e.jsonl", held_out, "e")}]
    return make_config(url, keys.run, folder, data=data)


def drive(client: redis.Redis, keys: Keys, *, groups: int, version: int = 1) -> None:
    """A published version, and a subscription whose gate lets ``groups`` in."""
    play.subscribe(client, keys, bound=0, gb=groups)
    client.hset(keys.clock, scripts.version_field(play.MODEL), version)
    client.lpush(keys.of("gate"), "1")


def admitted(client: redis.Redis, keys: Keys, lane: str = "train") -> list[str]:
    """Jobs in the order of their admission."""
    return [Job.from_bytes(fields[b"body"]).id for _, fields in client.xrange(keys.jobs(lane))]


def counter(client: redis.Redis, keys: Keys, name: str) -> int:
    return play.counter(client, keys, name)


def test_I8_the_producer_says_what_it_waits_for(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    with producing(make_config(redis_server.url, keys.run, tmp_path)):
        until_waits(client, keys, "producer", NoPublication, model="policy")
        client.hset(keys.clock, scripts.version_field(play.MODEL), 1)
        until_waits(client, keys, "producer", NoDrivingTrainer)
        play.subscribe(client, keys, bound=1, gb=3)
        until_waits(client, keys, "producer", GateClosed, subscription="actor")
        assert client.xlen(keys.jobs("train")) == 6


def test_jobs_are_admitted_in_the_order_of_the_seed_over_several_epochs(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    drive(client, keys, groups=25)
    config = with_data(redis_server.url, keys, tmp_path, on_bad_line="skip")
    with (tmp_path / "d.jsonl").open("a") as file:
        file.write("not a prompt\n")
    with running(producer := Producer(config)):
        until(lambda: client.xlen(keys.jobs("train")) == 25)
    places = [producer.source.place(position)[1:] for position in range(33)]
    jobs = [place for place in places if place[1] != 10][:25]
    assert admitted(client, keys) == [f"d/{epoch}/{line}" for epoch, line in jobs]
    assert counter(client, keys, "admitted") == 25
    assert counter(client, keys, "passed_lines:d") == places.index(jobs[-1]) - 24
    body = Job.from_bytes(client.xrange(keys.jobs("train"))[0][1][b"body"])
    assert (body.n, body.prompt) == (2, f"p{body.index}")
    assert audit(client, keys).ok


def test_I4_a_producer_killed_in_the_middle_skips_and_doubles_nothing(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = with_data(redis_server.url, keys, tmp_path, train=100)
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json())
    code = "import json,sys; from penstock.config import Config; from penstock.producer.main import main; "
    command = [sys.executable, "-c", code + "main(Config.model_validate(json.load(open(sys.argv[1]))))", str(path)]
    drive(client, keys, groups=150)
    victim = subprocess.Popen(command, start_new_session=True)
    try:
        until(lambda: client.xlen(keys.jobs("train")) == 150)
        play.subscribe(client, keys, bound=0, gb=280)  # more to do in the instant of the kill
        victim.send_signal(signal.SIGKILL)
        assert victim.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()
    play.subscribe(client, keys, bound=0, gb=350)
    with running(Producer(config)):
        until(lambda: client.xlen(keys.jobs("train")) == 350)
    jobs = admitted(client, keys)
    assert [len({job for job in jobs if job.startswith(f"d/{e}/")}) for e in range(4)] == [100, 100, 100, 50]
    assert len(set(jobs)) == 350
    assert audit(client, keys).ok


def test_two_producers_at_once_admit_every_job_once_and_one_evaluation(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = with_data(redis_server.url, keys, tmp_path, train=50, held_out=300)
    drive(client, keys, groups=120)
    with running(first := Producer(config)), running(second := Producer(config)):
        until(lambda: client.xlen(keys.jobs("train")) == 120 and client.xlen(keys.jobs("eval")) == 300)
        assert first is not second
    source = first.source
    wanted = [f"d/{epoch}/{prompt.index}" for _, epoch, prompt in map(source.at, range(120))]
    assert admitted(client, keys) == wanted, "nothing doubled, nothing skipped"
    assert admitted(client, keys, "eval") == [f"e/1/{i}" for i in range(300)], "one version, in order"
    assert audit(client, keys).ok


def test_other_prompts_than_those_the_run_began_with_are_refused(
    redis_server: RedisServer, keys: Keys, tmp_path: Path
) -> None:
    config = with_data(redis_server.url, keys, tmp_path, held_out=3)
    with producing(config):
        pass
    with producing(config):
        pass
    write_prompts(tmp_path / "e.jsonl", 4, "e")
    with pytest.raises(ConfigError, match="was started with other prompts"), producing(config):
        pass
    write_prompts(tmp_path / "e.jsonl", 3, "e")
    write_prompts(tmp_path / "d.jsonl", 11)
    with pytest.raises(ConfigError, match="restore the files, or start a run with another name"), producing(config):
        pass


def test_T18_overlapping_train_and_held_out_prompts_and_equal_names_are_refused(
    redis_server: RedisServer, keys: Keys, tmp_path: Path
) -> None:
    path = write_prompts(tmp_path / "d.jsonl", 5)
    data: dict[str, Any] = {"train": [{"name": "d", "path": path}], "eval": [{"name": "e", "path": f"{path}@[4:]"}]}
    with pytest.raises(ConfigError, match="also trained on"):
        Producer(make_config(redis_server.url, keys.run, tmp_path, data=data))
    data["train"][0]["path"] = f"{path}@[:4]"
    Producer(make_config(redis_server.url, keys.run, tmp_path, data=data))
    data["eval"][0]["name"] = "d"
    with pytest.raises(ValidationError, match="two datasets are named 'd'"):
        make_config(redis_server.url, keys.run, tmp_path, data=data)


def test_T18_evaluations_come_first_every_so_many_versions_and_at_the_end(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = with_data(redis_server.url, keys, tmp_path, held_out=3, every=2)

    def evaluated(version: int) -> bool:
        return int(client.hget(keys.source, "evaluated") or 0) == version

    with running(Producer(config)):
        drive(client, keys, groups=4)
        until(lambda: evaluated(1))
        drive(client, keys, groups=5, version=2)
        until(lambda: client.xlen(keys.jobs("train")) == 5, "the version was seen")
        assert evaluated(1), "not every version"
        drive(client, keys, groups=6, version=3)
        until(lambda: evaluated(3))
        drive(client, keys, groups=7, version=4)
        client.hset(keys.clock, "final", 4)
        until(lambda: evaluated(4))
        drive(client, keys, groups=8, version=4)
        until(lambda: client.xlen(keys.jobs("train")) == 8)
    assert admitted(client, keys, "eval") == [f"e/{version}/{i}" for version in (1, 3, 4) for i in range(3)]
    assert counter(client, keys, "seq:train") == 8, "they do not count at the gate"


def test_T18_a_pinned_evaluation_is_over_before_another_begins(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """Of the versions between, an engine that is held at the first would draw none."""
    config = with_data(redis_server.url, keys, tmp_path, held_out=2, every=1)
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval_pinned": True})})
    with running(Producer(config)):
        drive(client, keys, groups=1)
        until(lambda: client.xlen(keys.jobs("eval")) == 2)
        for version in (2, 3):
            drive(client, keys, groups=1 + version, version=version)
            until(lambda version=version: client.xlen(keys.jobs("train")) == 1 + version, "the version was seen")
        assert admitted(client, keys, "eval") == ["e/1/0", "e/1/1"]
        for one in play.lease(client, keys, most=2, version=1):
            assert play.commit(client, keys, one, [0], 1).outcome == "ready"
        until(lambda: int(client.hget(keys.source, "evaluated")) == 3)
    assert admitted(client, keys, "eval")[-2:] == ["e/3/0", "e/3/1"]


def test_T18_an_evaluation_that_was_begun_is_finished_by_the_next_producer(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = with_data(redis_server.url, keys, tmp_path, held_out=5)
    with producing(config):
        pass
    evals = [play.job(i, dataset="e", epoch=1, n=1) for i in range(2)]
    client.hset(keys.source, "evaluating", 1)
    play.admit(client, keys, evals, lane="eval", source="eval@1")  # two of five, then it was killed
    drive(client, keys, groups=4, version=3)
    with running(Producer(config)):
        until(lambda: client.hget(keys.source, "evaluated") == b"1")
    assert admitted(client, keys, "eval") == [f"e/1/{i}" for i in range(5)]


def test_T18_producers_that_saw_different_versions_evaluate_the_one_that_was_begun(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_data(redis_server.url, keys, tmp_path, held_out=3)
    wanted = Evaluations.next_version

    def and_another_begins(evaluations: Evaluations, version: int, last: int) -> int | None:
        if not last:
            client.hset(keys.source, "evaluating", 1)
        return wanted(evaluations, version, last)

    monkeypatch.setattr(Evaluations, "next_version", and_another_begins)
    drive(client, keys, groups=1, version=2)
    with running(Producer(config)):
        until(lambda: client.hget(keys.source, "evaluated"))
        until_waits(client, keys, "producer", GateClosed)
    assert admitted(client, keys, "eval") == [f"e/1/{i}" for i in range(3)]


def test_I8_a_producer_stops_admitting_near_maxmemory_and_says_so(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start())
    keys = Keys("full")
    ensure_lanes(client, keys)
    try:
        with producing(make_config(server.url, keys.run, tmp_path)):
            drive(client, keys, groups=4)
            until(lambda: client.xlen(keys.jobs("train")) == 4)
            client.setrange("ballast", 2**24, "x")  # beside it what the buffers of connections take is nothing
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", int(used / 0.9))
            until_waits(client, keys, "producer", RedisFull)
            drive(client, keys, groups=8)
            client.lpush(keys.gate, "1")  # taken after the look that the first one woke it for
            until(lambda: not client.exists(keys.gate))
            assert client.xlen(keys.jobs("train")) == 4
            client.config_set("maxmemory", 1)
            until_waits(client, keys, "producer", RedisFull)
            assert client.xlen(keys.jobs("train")) == 4
            client.config_set("maxmemory", 0)
            until(lambda: client.xlen(keys.jobs("train")) == 8)
    finally:
        client.close()
        server.stop()


def test_chat_messages_are_rendered_by_the_models_template(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = tmp_path / "chat"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(model)
    (tmp_path / "d.jsonl").write_text('{"prompt": [{"role": "user", "content": "hi"}], "label": "x"}\n')
    data = {"train": [{"name": "d", "path": str(tmp_path / "d.jsonl"), "apply_chat_template": True}]}
    config = make_config(redis_server.url, keys.run, tmp_path, data=data, model={"path": str(model)})
    drive(client, keys, groups=1)
    with running(Producer(config)):
        until(lambda: client.xlen(keys.jobs("train")) == 1)
    body = Job.from_bytes(client.xrange(keys.jobs("train"))[0][1][b"body"])
    assert body.prompt == "[user]hi[assistant]"
    with pytest.raises(ConfigError, match="holds no tokenizer that can be read"):
        Producer(make_config(redis_server.url, keys.run, tmp_path, data=data))


def test_the_gate_opens_by_itself_when_a_place_is_free(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    drive(client, keys, groups=2)
    with running(Producer(with_data(redis_server.url, keys, tmp_path))):
        until_waits(client, keys, "producer", GateClosed)
        held = play.lease(client, keys, version=1)[0]
        fail = scripts.fail(keys, held.job, held.token, "w", reason="r", detail="", max_attempts=0, retry_ms=1)
        assert run(client, fail) == "dead"
        until(lambda: counter(client, keys, "seq:train") == 3)
    assert client.llen(keys.of("gate")) <= 1024
