"""Prompts that a trainer submits itself, on a real buffer; the worker's part is played."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.config import Config
from penstock.consumers.adapters.prompts import Prompts, Request
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.batch.batch import Batch
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, ProtocolError, WaitTimeout
from penstock.history.eval_rows import read_rows
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.records.causes import BatchNotCut, GroupsMissing
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import PATIENCE_S, Player, buffering, make_config, publish, silence, until, until_waits


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Iterator[Config]:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config):
        yield config


def prompts(*texts: str, n: int = 1) -> list[Request]:
    return [Request(prompt=text, n=n) for text in texts]


def answering(worker: Player, count: int, *, reverse: bool = False, **drawn: Any) -> Callable[[], None]:
    """A worker that answers ``count`` jobs at the version that is published when they are there."""

    def work() -> None:
        held: list[Any] = []
        until(lambda: held.extend(worker.lease(count, version=worker.clock)) or len(held) >= count, "jobs to lease")
        for one in reversed(held) if reverse else held:
            worker.answer(one, [worker.clock], **drawn)

    return work


def together(answer: Callable[[], Any], work: Callable[[], None]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        found = answer()
        done.result(PATIENCE_S)
    return found


def live(client: redis.Redis, keys: Keys) -> int:
    """Jobs that are anywhere but on their way out."""
    groups = client.scan_iter(keys.group("requests/*"))
    return sum(1 for key in groups if client.hget(key, "st") not in (None, b"retiring"))


def test_answers_come_in_the_order_of_the_prompts_and_are_retired(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    worker = Player(client, keys)
    with Requests(config) as requests:
        for call, count in enumerate((3, 2, 5), start=1):
            assert publish(requests) == call
            asked = [Request(prompt=f"p{call}{i}", n=2 + i % 2) for i in range(count)]
            work = answering(worker, count, reverse=True)
            found = together(lambda asked=asked: requests.answer(asked, timeout=PATIENCE_S), work)
            assert [len(group) for group in found] == [one.n for one in asked]
            first = int(found[0][0].row.job.rsplit("/", 1)[1])
            assert [group[0].row.job for group in found] == [f"requests/0/{first + i}" for i in range(count)]
            assert [[one.row.k for one in group] for group in found] == [list(range(one.n)) for one in asked]
            assert all((one.versions[one.generated] == call).all() for group in found for one in group)
        until(lambda: play.counter(client, keys, "retired") == 10)
    assert audit(client, keys).ok


def test_weights_may_be_published_twice_without_a_question_between(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Requests(config) as requests:
        assert [publish(requests), publish(requests)] == [1, 2]
        together(lambda: requests.answer(prompts("a"), timeout=PATIENCE_S), answering(Player(client, keys), 1))
        assert [publish(requests), publish(requests)] == [3, 4]
    with Requests(config) as requests:
        assert publish(requests) == 5
    assert (client.hget(keys.sub("requests"), "abandoned") or b"") == b"", "no version is abandoned by that"


def test_a_prompt_that_was_buried_is_an_error_with_its_reason_and_the_next_call_is_clean(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    worker = Player(client, keys)

    def bury() -> None:
        held: list[Any] = []
        until(lambda: held.extend(worker.lease(2, version=worker.clock)) or len(held) == 2)
        worker.answer(held[0], [1])
        call = scripts.fail(
            keys, held[1].job, held[1].token, "w1", reason="refused", detail="too long", max_attempts=0, retry_ms=0
        )
        assert run(client, call) == "dead"

    with Requests(config) as requests:
        publish(requests)
        with pytest.raises(ProtocolError, match=r"1 of 2 prompts were given up .* refused: too long"):
            together(lambda: requests.answer(prompts("a", "b"), timeout=PATIENCE_S), bury)
        assert live(client, keys) == 0
        found = together(lambda: requests.answer(prompts("c"), timeout=PATIENCE_S), answering(worker, 1))
        assert found[0][0].row.job == "requests/0/2"
    assert audit(client, keys).ok


def test_a_time_out_cancels_what_was_asked(config: Config, client: redis.Redis, keys: Keys) -> None:
    with Requests(config) as requests:
        publish(requests)
        with pytest.raises(WaitTimeout, match="answers to 2 prompts") as told:
            requests.answer(prompts("a", "b"), timeout=0.1)
        assert told.value.count == 0
        assert str(told.value.cause) in str(told.value)
        assert live(client, keys) == 0
        assert Player(client, keys).lease(2, version=1) == []


def test_prompts_may_be_asked_before_any_other_part_has_started(
    redis_server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A part that starts afterwards does not take its lanes for lost ones."""
    keys = Keys(f"early{tmp_path.stat().st_ino}")
    config = make_config(redis_server.url, keys.run, tmp_path)
    with Requests(config) as requests:
        publish(requests)
        with pytest.raises(WaitTimeout):
            requests.answer(prompts("a"), timeout=0.1)
        with buffering(config):
            work = answering(Player(client, keys), 1)
            assert len(together(lambda: requests.answer(prompts("b"), timeout=PATIENCE_S), work)) == 1
    assert audit(client, keys).ok


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_I4_what_a_killed_process_had_asked_is_let_go_by_the_next(
    config: Config, client: redis.Redis, keys: Keys, finished: int
) -> None:
    worker = Player(client, keys)
    requests = Requests(config).__enter__()
    publish(requests)
    jobs = requests.prompts.admit(prompts("a", "b"), float("inf"))
    requests.session.subscriber.define(requests.definition(2))
    requests.session.subscriber.ask(1)
    for held in worker.lease(finished, version=1):
        worker.answer(held, [1])
    if finished == 2:
        until(lambda: client.hget(keys.sub("requests"), "cut") == b"1", "the batch to be cut for nobody")
    silence(requests.session, client)
    with Requests(config) as requests:
        until(lambda: live(client, keys) == 0, "all of it to go, before anything new is asked")
        assert publish(requests) == 2
        found = together(lambda: requests.answer(prompts("c", "d"), timeout=PATIENCE_S), answering(worker, 2))
        assert not {group[0].row.job for group in found} & set(jobs)
        until(lambda: live(client, keys) == 0)
    assert audit(client, keys).ok


def test_I4_a_batch_cut_while_a_killed_process_is_tidied_up_is_let_go_too(
    config: Config, client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Player(client, keys)
    requests = Requests(config).__enter__()
    publish(requests)
    requests.prompts.admit(prompts("a", "b"), float("inf"))
    requests.session.subscriber.define(requests.definition(2))
    requests.session.subscriber.ask(1)
    worker.answer(worker.lease(1, version=1)[0], [1])
    silence(requests.session, client)
    unread = Prompts.unread

    def cut_behind_its_back(self: Prompts) -> Iterator[Batch]:
        """The next process has the size of one group when it begins, so the buffer cuts what was asked before."""
        found = list(unread(self))
        until(lambda: client.hget(keys.sub("requests"), "cut") == b"1", "the batch to be cut for nobody")
        return iter(found)

    monkeypatch.setattr(Prompts, "unread", cut_behind_its_back)
    with Requests(config) as requests:
        until(lambda: live(client, keys) == 0, "all of it to go, before anything new is asked")
    assert audit(client, keys).ok


def test_T12_tokens_older_than_the_question_are_refused(config: Config, client: redis.Redis, keys: Keys) -> None:
    worker = Player(client, keys)

    def lie() -> None:
        held: list[Any] = []
        until(lambda: held.extend(worker.lease(1, version=2)) or held)
        worker.answer(held[0], [1])

    with Requests(config) as requests:
        publish(requests)
        publish(requests)
        with pytest.raises(ProtocolError, match="version 1, but was asked of version 2"):
            together(lambda: requests.answer(prompts("a"), timeout=PATIENCE_S), lie)


def test_a_lane_that_another_trainer_reads_is_refused(config: Config) -> None:
    with (
        Trainer(config),
        pytest.raises(ConfigError, match=r"Lane train of run .* belongs to subscription 'actor'"),
        Requests(config),
    ):
        pass


def test_two_lanes_do_not_see_each_others_answers(config: Config, client: redis.Redis, keys: Keys) -> None:
    worker = Player(client, keys)
    with Requests(config) as train, Requests(config, name="validation", lane="eval") as validation:
        publish(train)
        with pytest.raises(ConfigError, match="Publish with the requests of lane train"):
            publish(validation)
        found = together(lambda: validation.answer(prompts("a"), timeout=PATIENCE_S), answering(worker, 1))
        assert found[0][0].row.job == "validation/0/0"
        found = together(lambda: train.answer(prompts("a"), timeout=PATIENCE_S), answering(worker, 1))
        assert found[0][0].row.job == "requests/0/0"


def test_I8_a_call_that_waits_says_so(config: Config, client: redis.Redis, keys: Keys) -> None:
    with Requests(config) as requests:
        publish(requests)
        thread = threading.Thread(target=lambda: requests.answer(prompts("a"), timeout=PATIENCE_S), daemon=True)
        thread.start()
        until_waits(client, keys, "trainer:requests", BatchNotCut, batch=1)
        until_waits(client, keys, "buffer:requests", GroupsMissing)
        answering(Player(client, keys), 1)()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert requests.answer([]) == []


def test_what_asks_for_itself_has_no_batches_to_be_asked_for() -> None:
    """It is no trainer: what is cut for it are answers, which only ``answer`` hands out."""
    assert not issubclass(Requests, Trainer)
    assert not {"next", "next_nowait", "commit", "__iter__"} & set(dir(Requests))


@pytest.mark.parametrize(
    ("drawn", "words"),
    [
        ({"temperature": 0.5}, "sampled at temperature 0.5, but what was asked for is 1"),
        ({"temperature": 0.5, "logprob_kind": "original"}, "logprobs were computed before temperature"),
    ],
)
def test_T6_answers_of_another_temperature_than_asked_for_are_refused_and_leave_nothing(
    config: Config, client: redis.Redis, keys: Keys, drawn: dict[str, Any], words: str
) -> None:
    """The worker's configuration is another file than the trainer's."""
    worker = Player(client, keys)
    with Requests(config) as requests:
        publish(requests)
        with pytest.raises(ConfigError, match=words):
            together(lambda: requests.answer(prompts("a"), timeout=PATIENCE_S), answering(worker, 1, **drawn))
        assert not live(client, keys)
        again = [Request(prompt="b", sampling={"temperature": 0.5})]
        right = answering(worker, 1, temperature=0.5)
        [[row]] = together(lambda: requests.answer(again, timeout=PATIENCE_S), right)
        assert (row.row.temperature, row.row.logprob_kind) == (0.5, "scaled")
    assert audit(client, keys).ok


def test_T6_an_evaluation_may_read_logprobs_of_any_kind(config: Config, client: redis.Redis, keys: Keys) -> None:
    worker = Player(client, keys)
    with Requests(config) as requests, Requests(config, name="checks", lane="eval") as checks:
        publish(requests)
        work = answering(worker, 1, temperature=0.5, logprob_kind="original")
        [[row]] = together(lambda: checks.answer(prompts("a"), timeout=PATIENCE_S), work)
        assert row.row.logprob_kind == "original"


def test_T18_an_evaluation_of_a_trainers_own_prompts_has_its_row_in_eval_jsonl_once(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with Requests(config) as train, Requests(config, name="held", lane="eval") as held:
        publish(train)
        work = answering(Player(client, keys), 2)
        found = together(lambda: held.answer(prompts("a", "b", n=2), timeout=PATIENCE_S), work)
        for _ in range(2):  # a restarted trainer evaluates the version again
            held.record_evaluation("math/easy", found)
    (row,) = read_rows(config.run_dir / "eval.jsonl")
    assert (row["dataset"], row["version"], row["num"], row["prompts"], row["asked"]) == ("math/easy", 1, 4, 2, 2)
    assert (row["accuracy"], row["asked_share"], row["pass@2"]) == (0.5, 1.0, 1.0)


def test_an_evaluation_that_cannot_be_written_stops_no_trainer(
    config: Config, client: redis.Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    (config.run_dir / "eval.jsonl").mkdir(parents=True)
    with Requests(config, name="held", lane="eval") as held:
        found = together(lambda: held.answer(prompts("a"), timeout=PATIENCE_S), answering(Player(client, keys), 1))
        held.record_evaluation("held", found)
    assert "failed to write the evaluation of version 0 on held to" in caplog.text
