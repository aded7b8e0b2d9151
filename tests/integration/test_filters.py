"""Dynamic sampling on a real Redis: what filters drop, hold back and stumble over, and the gate that refills."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import redis

from penstock import payloads
from penstock.buffer.filters import Filters
from penstock.config import Config
from penstock.console.cli.inspect import ledger_lines
from penstock.consumers.metrics.tally import Ledger
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease, run
from penstock.protocol.snapshot import snapshot
from penstock.protocol.subs import set_subscription
from penstock.records.causes import FilterFailing, FilterUnknown, FirstBatchTooSmall, GateClosed, GroupsMissing
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import group_filters, play
from tests.integration.parts import (
    Player,
    admit,
    buffering,
    jobs_of,
    make_config,
    make_sample,
    producing,
    publish,
    step,
    until,
    until_waits,
)

HERE = "tests.integration.group_filters"


class Grader(Player):
    """A worker whose rewards are chosen."""

    def grade(self, held: RawLease, rewards: Sequence[float], version: int = 1) -> None:
        job = Job.from_bytes(held.body)
        samples = [make_sample(job, k, [version], 2) for k in range(len(rewards))]
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward
        assert self.commit(held, samples, version).outcome == "ready"

    def grade_next(self, *rewards: Sequence[float], version: int = 1) -> list[str]:
        """Lease as many jobs as there are rewards, one after the other, waiting for the gate."""
        jobs = []
        for one in rewards:
            held = until(lambda: self.lease(1, version=version), "a job to be admitted")[0]
            self.grade(held, one, version)
            jobs.append(held.job)
        return jobs


def filtered(url: str, keys: Keys, folder: Path, *functions: str, mode: str = "async", **over: object) -> Config:
    trainer = {"filter": {"functions": list(functions) or ["nonzero_std"], **over}}
    return make_config(url, keys.run, folder, staleness={"mode": mode, "bound": int(mode != "sync")}, trainer=trainer)


SAME, MIXED, WRONG = (1.0, 1.0), (0.0, 1.0), (0.0, 0.0)


def test_I1_a_dropped_group_frees_its_place_is_in_the_ledger_and_reaches_the_trainers_metrics(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """Bound 0, batches of 2: without a refill the gate would be closed for ever behind two drops."""
    config = filtered(redis_server.url, keys, tmp_path, mode="sync")
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        first = Grader(client, keys).grade_next(SAME, WRONG, MIXED, SAME)
        trainer.next_nowait()
        dropped = {"filter/zero_std_1.0": 2, "filter/zero_std_0.0": 1}
        found = until_waits(client, keys, "buffer:actor", GroupsMissing, have=1, size=2, dropped=dropped)
        assert found.running == 1, "the gate let one more in for each drop"
        last = Grader(client, keys).grade_next(MIXED)
        batch = step(trainer)
        assert jobs_of(batch) == [first[2], *last]
        assert Ledger().metrics(batch.manifest) == {
            "rollout/dynamic_filter/drop_zero_std_0.0": 1,
            "rollout/dynamic_filter/drop_zero_std_1.0": 2,
            "rollout/reward_before_filters": pytest.approx((1 + 1 + 0 + 0 + 1 + 1 + 0 + 1 + 0 + 1) / 10),
        }
        shown = ledger_lines(snapshot(client, keys)["subs"])
        assert shown == ["subscription actor disposed of 3 groups: filter/zero_std_1.0 2, filter/zero_std_0.0 1"]
        until(lambda: play.counter(client, keys, "dropped") == 3)
    assert client.hget(keys.sub("actor"), "disposed") == b"3"
    assert audit(client, keys).ok


def test_a_filter_that_overwrites_its_group_changes_nothing_of_the_buffers_records(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = filtered(redis_server.url, keys, tmp_path, f"{HERE}:overwrites")
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        first, second, third = Grader(client, keys).grade_next(SAME, MIXED, MIXED)
        batch = step(trainer)
        assert jobs_of(batch) == [second, third], f"{first} is rejected, and its reward is counted"
        metrics = Ledger().metrics(batch.manifest)
        assert metrics["rollout/dynamic_filter/drop_equal"] == 1
        assert metrics["rollout/reward_before_filters"] == pytest.approx((1 + 1 + 0 + 1 + 0 + 1) / 6)
        assert [(row.reward, row.num_loss) for row in batch.rows] == [(reward, 2) for reward in (0.0, 1.0, 0.0, 1.0)]
    assert audit(client, keys).ok


def test_filters_are_a_subscriptions_own_and_a_later_batch_tells_only_what_is_new(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = filtered(redis_server.url, keys, tmp_path, f"{HERE}:not_all_wrong")
    plain = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 5})
    with buffering(config), Trainer(config) as actor, Trainer(plain, name="reader", batch_groups=4) as reader:
        publish(actor)
        admit(client, keys, 5)
        Grader(client, keys).grade_next(MIXED, WRONG, SAME, MIXED, SAME)
        ledger = Ledger()
        first, second = step(actor), step(actor)
        assert [*jobs_of(first), *jobs_of(second)] == ["d/0/0", "d/0/2", "d/0/3", "d/0/4"]
        assert ledger.metrics(first.manifest)["rollout/dynamic_filter/drop_all_wrong"] == 1
        assert ledger.metrics(second.manifest) == {}
        assert "d/0/1" in jobs_of(reader.next(timeout=60)), "the other one has no filter"


def test_I4_a_filters_drops_are_not_lost_or_doubled_with_the_leader(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = filtered(redis_server.url, keys, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 4)
        Grader(client, keys).grade_next(SAME, MIXED)
        until(lambda: client.hget(keys.sub("actor"), "drop:filter/zero_std_1.0") == b"1")
    # Completed while nobody led: the next one judges them at its start, and the old ones again.
    Grader(client, keys).grade_next(SAME, MIXED)
    with buffering(config), Trainer(config) as trainer:
        trainer.load_state_dict({"run": keys.run, "subscription": "actor", "batch": 0})
        publish(trainer)
        assert jobs_of(step(trainer)) == ["d/0/1", "d/0/3"]
    assert client.hget(keys.sub("actor"), "drop:filter/zero_std_1.0") == b"2"
    assert client.hget(keys.sub("actor"), "disposed") == b"2"
    assert audit(client, keys).ok


def test_rejects_that_are_held_back_fill_a_batch_only_when_nothing_else_can_come(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = filtered(redis_server.url, keys, tmp_path, mode="sync", keep_when_few=True)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"over_sampling_groups": 1})})
    grader = Grader(client, keys)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        until(lambda: client.xlen(keys.jobs("train")) == 3, "2 groups, and 1 over")
        rejects = grader.grade_next(SAME, WRONG)
        trainer.next_nowait()
        until_waits(client, keys, "buffer:actor", GroupsMissing, running=1, rejects=2)
        kept = grader.grade_next(MIXED)
        batch = step(trainer)
        assert sorted(jobs_of(batch)) == sorted([rejects[0], *kept]), "one reject was needed, one was not"
        until(lambda: client.hget(keys.sub("actor"), "drop:filter/zero_std_0.0") == b"1")
        good = grader.grade_next(SAME, MIXED, MIXED, version=2)
        assert jobs_of(step(trainer)) == good[1:], "enough others remain"
        until(lambda: client.hget(keys.sub("actor"), "drop:filter/zero_std_1.0") == b"1")
    assert audit(client, keys).ok


def test_over_sampling_admits_more_than_a_batch_and_the_surplus_stays_inside_the_bound(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    trainer_section = {"over_sampling_groups": 3}
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"bound": 1}, trainer=trainer_section)
    with buffering(config), producing(config), Trainer(config) as trainer:
        publish(trainer)
        until(lambda: client.xlen(keys.jobs("train")) == 2 * 2 + 3)
        until_waits(client, keys, "producer", GateClosed, subscription="actor", taken=7, places=7)
        Grader(client, keys).grade_next(*[MIXED] * 7)
        staleness = [step(trainer).manifest.staleness_max for _ in range(2)]
        assert staleness == [0, 1]


@pytest.mark.parametrize(("on_error", "trained"), [("keep", [0, 1]), ("drop", [1, 2])])
def test_a_filter_that_raises_is_counted_and_the_group_is_kept_or_dropped_as_configured(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, on_error: str, trained: list[int]
) -> None:
    config = filtered(redis_server.url, keys, tmp_path, f"{HERE}:raises_on_first", on_error=on_error)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 3)
        Grader(client, keys).grade_next(MIXED, MIXED, MIXED)
        batch = step(trainer)
        assert jobs_of(batch) == [f"d/0/{i}" for i in trained]
        assert Ledger().metrics(batch.manifest)["rollout/dynamic_filter/raised"] == 1
    assert client.hget(keys.sub("actor"), "filter_raised") == b"1"
    assert client.hget(keys.sub("actor"), "drop:filter/raised") == (b"1" if on_error == "drop" else None)
    assert audit(client, keys).ok


def test_I8_a_filter_that_raises_can_stop_the_cut_which_says_so_and_goes_on_once_it_is_gone(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = filtered(redis_server.url, keys, tmp_path, f"{HERE}:raises", on_error="stop")
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2)
        Grader(client, keys).grade_next(MIXED, MIXED)
        trainer.next_nowait()
        until_waits(client, keys, "buffer:actor", FilterFailing, groups=2, error="ZeroDivisionError: no lengths")
        run(client, scripts.subscribe(keys, "actor", {"filters": "nonzero_std"}))
        assert jobs_of(step(trainer)) == ["d/0/0", "d/0/1"], "nothing was lost"


def test_I8_a_filter_that_hangs_does_not_cost_the_buffer_its_lease(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = filtered(redis_server.url, keys, tmp_path, f"{HERE}:hangs_on_first", on_error="drop")
    monkeypatch.setattr("penstock.buffer.filters.TIMEOUT_S", 0.1)
    group_filters.RELEASE.clear()
    try:
        with buffering(config), Trainer(config) as trainer:
            publish(trainer)
            admit(client, keys, 3)
            Grader(client, keys).grade_next(MIXED, MIXED, MIXED)
            assert jobs_of(step(trainer)) == ["d/0/1", "d/0/2"]
    finally:
        group_filters.RELEASE.set()
    assert client.hget(keys.sub("actor"), "filter_raised") == b"1"


def test_a_filter_that_redis_names_and_the_buffers_configuration_does_not_is_never_imported(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        run(client, scripts.subscribe(keys, "actor", {"filters": "os:system"}))
        admit(client, keys, 2)
        Grader(client, keys).grade_next(MIXED, MIXED)
        trainer.next_nowait()
        until_waits(client, keys, "buffer:actor", FilterUnknown, filter="os:system")


def test_I8_the_first_batch_waits_for_as_many_groups_as_are_wanted_and_one_that_never_could_is_refused(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, trainer={"min_groups_before_first_batch": 4})
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        with pytest.raises(ConfigError, match="the gate admits at most 2 groups"):
            set_subscription(client, keys, "actor", {"size": "1"})
        admit(client, keys, 7)
        Grader(client, keys).grade_next(*[MIXED] * 3)
        trainer.next_nowait()
        until_waits(client, keys, "buffer:actor", FirstBatchTooSmall, missing=1, ready=3)
        Grader(client, keys).grade_next(MIXED)
        assert jobs_of(step(trainer)) == ["d/0/0", "d/0/1"]
        assert jobs_of(step(trainer)) == ["d/0/2", "d/0/3"], "only before the first one"
        assert set_subscription(client, keys, "actor", {"size": "1"})["size"] == 1, "its places held up a first batch"
    never = make_config(redis_server.url, keys.run, tmp_path, trainer={"min_groups_before_first_batch": 5})
    with pytest.raises(ConfigError, match="the gate admits at most 4 groups"):
        Trainer(never)


def test_a_filter_that_makes_up_reasons_does_not_fill_the_ledger(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = filtered(redis_server.url, keys, tmp_path, f"{HERE}:makes_up_reasons")
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 70)
        Grader(client, keys).grade_next(*[MIXED] * 70)
        until(lambda: client.hget(keys.sub("actor"), "disposed") == b"70")
    ledger = {k: int(v) for k, v in client.hgetall(keys.sub("actor")).items() if k.startswith(b"drop:")}
    assert (sum(ledger.values()), len(ledger), ledger[b"drop:filter/other"]) == (70, 65, 6)


def test_a_filter_sees_metadata_and_one_that_gives_no_bool_has_raised() -> None:
    name = f"{HERE}:says_what_it_sees"
    filters = Filters([name])
    records = []
    for k in range(2):
        sample = make_sample(play.job(0), k, [1], 2)
        records += payloads.pack([sample], token="t", server="control")[1]
    from penstock import CompletedGroup

    verdict = filters.judge([name], CompletedGroup("d/0/0", "train", 2, tuple(records)))
    assert verdict.error.endswith("TypeError: it returned 'not a bool', not a bool or (bool, reason)")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such", "use nonzero_std or module:function"),
        ("no_such_module:f", "there is no module no_such_module"),
        (f"{HERE}:no_such", "correct the name after the colon"),
        (f"{HERE}:RELEASE", "is not a function"),
    ],
)
def test_a_filter_that_is_not_there_is_a_mistake_of_the_configuration(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Filters([name])
