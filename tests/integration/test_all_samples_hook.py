"""``hooks.all_samples`` in a real recorder: it is told of each sample with its fate, and holds nobody up."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock import SampleRow
from penstock.config import Config
from penstock.consumers.history.all_samples import AllSamples
from penstock.hooks.slime import number_of
from penstock.protocol import scripts
from penstock.protocol.scripts import Judged, Leadership, run
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.test_recorder import begin, config_of, fates, recording, train, until, until_recorded

HERE = "tests.integration.test_all_samples_hook"
told: list[tuple[str, str]] = []
groups: list[list[Any]] = []
let_go = threading.Event()


def keeps_fates(rows: Sequence[SampleRow]) -> None:
    told.extend((row.id, f"{row.fate} {row.reason}".rstrip()) for row in rows)


def keeps_groups(args: Any, all_samples: list[list[Any]], data_source: Any) -> None:
    """slime's form."""
    assert args.limit == 3
    assert data_source is None
    groups.extend(all_samples)


def exits(rows: Sequence[SampleRow]) -> None:
    told.append(("exits", ""))
    raise SystemExit(3)


def hangs(rows: Sequence[SampleRow]) -> None:
    told.append(("hangs", ""))
    let_go.wait()


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    told.clear()
    groups.clear()
    let_go.clear()
    yield
    let_go.set()


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return config_of(redis_server.url, keys, tmp_path)


def with_hook(config: Config, name: str, **more: Any) -> Config:
    values = config.model_dump(exclude_unset=True)
    return Config.model_validate(values | {"hooks": {"all_samples": f"{HERE}:{name}", **more}})


def finish(client: redis.Redis, keys: Keys) -> Leadership:
    """One group that is trained, one that a filter rejects, one that is dropped, one job that is buried."""
    leader, jobs = begin(client, keys, 3)
    run(client, scripts.judge(keys, leader, "actor", [Judged(jobs[1], "too_easy", False, 2, 1.0)]))
    run(client, scripts.dispose(keys, leader, "actor", Disposal.STALE, [jobs[2]]))
    train(client, keys, leader, jobs[:1])
    play.seal(client, keys, leader, jobs[1:])
    play.admit(client, keys, [play.job(3)])
    (held,) = play.lease(client, keys, version=1)
    call = scripts.fail(keys, held.job, held.token, "w1", reason="refused", detail="", max_attempts=0, retry_ms=1)
    assert run(client, call) == "dead"
    return leader


FATES = {
    "d/0/0/0": "trained", "d/0/0/1": "trained", "d/0/1/0": "filtered too_easy", "d/0/1/1": "filtered too_easy",
    "d/0/2/0": "dropped stale", "d/0/2/1": "dropped stale", "d/0/3/-1": "buried refused",
}  # fmt: skip


def test_it_sees_filtered_dropped_and_buried_samples_too(client: redis.Redis, keys: Keys, config: Config) -> None:
    finish(client, keys)
    with recording(with_hook(config, "keeps_fates")):
        until_recorded(client, keys)
        until(lambda: ("d/0/3/-1", "buried refused") in told, "the buried job")
    assert dict(told) == FATES
    assert len(told) == len(FATES), "each once, where nobody was killed"


def test_a_function_of_slimes_signature_sees_groups_of_samples(client: redis.Redis, keys: Keys, config: Config) -> None:
    finish(client, keys)
    with recording(with_hook(config, "keeps_groups", args={"limit": 3})):
        until_recorded(client, keys)
    seen = {(one.metadata["job"], one.metadata["fate"]) for group in groups for one in group}
    assert seen == {("d/0/0", "trained"), ("d/0/1", "filtered"), ("d/0/2", "dropped")}
    first = min((one for group in groups for one in group), key=lambda one: (one.metadata["job"], one.metadata["k"]))
    assert (first.group_index, first.index) == (number_of("d/0/0"), number_of("d/0/0/0")), "as hooks.sample has it"
    assert (first.tokens, first.response_length, first.reward) == ([1, 2, 3, 5, 5, 5, 5], 4, 0.0)
    assert first.loss_mask == [1] * 4
    assert [len(group) for group in groups] == [2, 2, 2]


@pytest.mark.parametrize(("name", "said"), [("exits", "raised"), ("hangs", "timed out after 0.2 s")])
def test_one_that_fails_is_logged_and_counted_and_rows_are_kept(
    client: redis.Redis, keys: Keys, config: Config, caplog: pytest.LogCaptureFixture, name: str, said: str
) -> None:
    finish(client, keys)
    made = with_hook(config, name, timeout_s=0.2)
    with recording(made) as recorder:
        until_recorded(client, keys)
        until(lambda: "d/0/3/-1" in fates(made), "the row of the buried job")
        failures = recorder._tally.hook_failures
    assert fates(made) == FATES
    assert failures >= 1
    assert f"hooks.all_samples {HERE}:{name}" in caplog.text
    assert said in caplog.text


def test_one_that_hangs_is_not_called_again_while_it_does(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    hook, rows = AllSamples(with_hook(config, "hangs", timeout_s=0.2)), [SampleRow("d/0/0", 0)]
    assert [hook.call(rows, lambda: False) for _ in range(3)] == [False] * 3
    assert told == [("hangs", "")]
    assert "an earlier call is still running, skipping 1 samples" in caplog.text
    let_go.set()
    until(lambda: hook.call(rows, lambda: False), "the call that hung to end")
    assert told == [("hangs", "")] * 2


def test_what_was_told_and_not_recorded_is_told_again(client: redis.Redis, keys: Keys, config: Config) -> None:
    finish(client, keys)
    made = with_hook(config, "keeps_fates")

    class Killed(BaseException): ...

    def dies(*_: Any) -> Any:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(scripts, "recorded", dies)
        with recording(made):
            until(lambda: len(told) >= len(FATES), "the first recorder to tell")
    client.delete(keys.recorder)
    with recording(made):
        until_recorded(client, keys)
    assert dict(told) == FATES
    assert sorted(told).count(("d/0/0/0", "trained")) == 2


def test_without_a_recorder_it_is_refused(config: Config) -> None:
    values = config.model_dump(exclude_unset=True) | {"history": {"enabled": False}}
    with pytest.raises(ValueError, match=r"hooks\.all_samples is called by the recorder"):
        Config.model_validate(values | {"hooks": {"all_samples": f"{HERE}:exits"}})
