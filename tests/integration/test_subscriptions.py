"""Several trainers on one run, by the real buffer: copies, pools, sizes, late joiners, retention, changes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from penstock.config import Config
from penstock.config.subscription import Definition, Trait, fields_with
from penstock.console.cli.inspect import register
from penstock.console.cli.main import app
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, OwnershipLost, ProtocolError, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import run
from penstock.protocol.subs import drop_subscription, list_subscriptions, set_subscription
from penstock.records.causes import BatchUncommitted, GateClosed, GroupsMissing, TrainerAbsent
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys
from penstock.records.worker_causes import RecordUnreadable
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    Player,
    admit,
    buffering,
    jobs_of,
    kill,
    make_config,
    producing,
    publish,
    step,
    until,
    until_waits,
)

ASYNC = {"mode": "async", "bound": 50}


def beside(config: Config, name: str, size: int = 2, **subscription: Any) -> Trainer:
    """A trainer that reads beside the one that publishes."""
    given = {"driving": False, "size": size, **subscription}
    return Trainer(config, name=name, subscription=given)


def take(trainer: Trainer) -> list[str]:
    """Jobs of the next batch, committed."""
    batch = trainer.next(timeout=60)
    trainer.commit(batch)
    return jobs_of(batch)


def durable(trainer: Trainer) -> None:
    trainer.state_dict()
    trainer.checkpointed()


def sub_of(client: redis.Redis, keys: Keys, name: str) -> dict[str, Any]:
    return next(row for row in list_subscriptions(client, keys) if row["name"] == name)


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    return make_config(redis_server.url, keys.run, tmp_path, staleness=ASYNC)


# --- I5: copies and pools -----------------------------------------------------------------------------------------


def test_I5_members_of_a_pool_divide_the_groups_and_a_copy_sees_them_all(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    with (
        buffering(config),
        Trainer(config) as actor,
        beside(config, "left", share="pool") as left,
        beside(config, "right", share="pool") as right,
    ):
        publish(actor)
        admit(client, keys, 8)
        Player(client, keys).work(8, 1)
        seen = [job for _ in range(4) for job in jobs_of(step(actor))]
        shared = [job for trainer in (left, right, right, left) for job in take(trainer)]
        assert sorted(seen) == sorted(shared) == [f"d/0/{i}" for i in range(8)]
        durable(actor)
        durable(left)
        until(lambda: play.counter(client, keys, "swept") == 4)
        durable(right)
        until(lambda: play.counter(client, keys, "swept") == 8)
    assert audit(client, keys).ok


def test_members_of_a_pool_that_wait_are_served_in_turn(client: redis.Redis, keys: Keys, config: Config) -> None:
    with (
        buffering(config),
        Trainer(config) as actor,
        beside(config, "left", share="pool") as left,
        beside(config, "right", share="pool") as right,
    ):
        publish(actor)
        members, served = {"left": left, "right": right}, []

        def has_a_batch() -> str:
            rows = [sub_of(client, keys, name) for name in members]
            return next((str(row["name"]) for row in rows if row["cut"] > row["cursor"]), "")

        for _ in range(6):
            for member in members.values():
                assert member.next_nowait() is None  # it asks, and waits
            for name in members:
                until_waits(client, keys, f"buffer:{name}", GroupsMissing)
            admit(client, keys, 2)
            Player(client, keys).work(2, 1)
            name = str(until(has_a_batch))
            take(members[name])
            served.append(name)
    assert sorted(served[:2]) == ["left", "right"]
    assert served == served[:2] * 3


def test_I5_what_a_dead_member_had_in_hand_goes_to_the_others_once_its_seat_is_free(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config) as actor, beside(config, "left", share="pool") as left:
        publish(actor)
        admit(client, keys, 8)
        Player(client, keys).work(8, 1)
        dead = beside(config, "right", share="pool").__enter__()
        kept = take(dead)
        in_hand = jobs_of(dead.next(timeout=60))
        kill(dead, client)
        lefts = [*take(left), *take(left)]
        assert not set(lefts) & {*kept, *in_hand}, "while its seat is taken its groups are its own"
        set_subscription(client, keys, "right", {"keep_s": "0.1"})
        assert sorted(take(left)) == sorted(in_hand)
        with pytest.raises(OwnershipLost):  # it wakes up, and is told so
            dead.session.subscriber.commit(2, "digest")
        with pytest.raises(WaitTimeout):
            left.next(timeout=0.5)
    assert sub_of(client, keys, "right")["parked"]
    assert Counter(client.hget(keys.group(f"d/0/{i}"), "u:share:pool") for i in range(8)) == {b"1": 8}


def test_I5_a_dead_member_that_comes_back_in_time_gets_the_same_batch_again(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config) as actor, beside(config, "left", share="pool") as left:
        publish(actor)
        admit(client, keys, 6)
        Player(client, keys).work(6, 1)
        with beside(config, "right", share="pool") as dead:
            take(dead)
            batch = dead.next(timeout=60)
            kill(dead, client)
        with beside(config, "right", share="pool") as back:
            assert back.next(timeout=60).digest == batch.digest
            assert not set(take(left)) & set(jobs_of(batch))


def test_the_gate_counts_a_pool_as_one_and_what_a_dropped_member_trained_stays_consumed(
    client: redis.Redis, keys: Keys
) -> None:
    for name, driving in (("a", 1), ("b", 0)):
        play.subscribe(client, keys, name, share="pool", driving=driving, gb=2, bound=1, size=2, model=play.MODEL)
        play.join(client, keys, name, name)
    members = ["a", "b"]

    def room() -> int:
        gate = (play.revision(client, keys), [members])
        return play.admit(client, keys, [play.job(100 + i) for i in range(30)], gate=gate).admitted

    assert room() == 2 * (2 + 2)
    jobs = play.complete(client, keys, 8)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, jobs)
    assert play.cut(client, keys, leader, 1, jobs[:2], sub="b").outcome == "cut"
    assert room() == 0
    digest = play.Manifest.digest(play.manifest(1, "b"))
    call = scripts.commit_batch(keys, "b", owner="b", gen=0, n=1, digest=digest, rank=0, ranks=1)
    assert run(client, call).outcome == "committed"
    assert room() == 2, "who publishes nothing has consumed what it committed"
    assert play.cut(client, keys, leader, 2, jobs[2:4], sub="b").outcome == "cut"
    drop_subscription(client, keys, "b")
    members = ["a"]
    assert room() == 0, "2 consumed by b, 8 admitted, 2 * 2 for a alone"
    assert not client.hexists(keys.group(jobs[2]), "u:share:pool"), "given back"
    assert client.hget(keys.group(jobs[0]), "u:share:pool") == b"1"
    with pytest.raises(ConfigError, match="share one pool, so their bound must be the same"):
        play.subscribe(client, keys, "c", share="pool", bound=3, model=play.MODEL)
    with pytest.raises(ConfigError, match="The share of subscription 'a' cannot change"):
        play.subscribe(client, keys, "a", share="other")
    drop_subscription(client, keys, "a")
    with pytest.raises(ConfigError, match=r"The pool of 'c' in run .* was dropped with its last member"):
        play.subscribe(client, keys, "c", share="pool")


@pytest.mark.parametrize("field", sorted(map(Definition.key_of, fields_with(Trait.AGREED))))
def test_members_of_a_pool_agree_on_every_field_that_is_declared_so(
    client: redis.Redis, keys: Keys, field: str
) -> None:
    definition = Definition(share="pool", size=2).fields()
    run(client, scripts.subscribe(keys, "left", definition))
    with pytest.raises(ConfigError, match=f"'right' and 'left' share one pool, so their {field} must be the same"):
        run(client, scripts.subscribe(keys, "right", {**definition, field: "7"}))
    run(client, scripts.subscribe(keys, "right", {**definition, "size": "7", "multiple": "7"}))


def test_I5_a_group_enters_as_many_batches_as_its_reuse_limit_says(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config, subscription={"reuse": 3}) as trainer:
        publish(trainer)
        admit(client, keys, 4)
        Player(client, keys).work(4, 1)
        seen = Counter(job for _ in range(6) for job in jobs_of(step(trainer)))
        assert seen == {f"d/0/{i}": 3 for i in range(4)}
        with pytest.raises(WaitTimeout):
            trainer.next(timeout=0.3)
        durable(trainer)
        until(lambda: play.counter(client, keys, "swept") == 4)


# --- sizes --------------------------------------------------------------------------------------------------------


def test_T3_a_batch_of_tokens_at_bound_0_is_filled_although_the_gate_guessed_too_few_groups(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "async", "bound": 0})
    sizes = {"unit": "tokens", "size": 60}
    worker = Player(client, keys)
    with buffering(config), producing(config), Trainer(config, subscription=sizes) as trainer:
        publish(trainer)
        assert trainer.next_nowait() is None
        batches = []
        for _ in range(2):

            def work() -> bool:
                for held in worker.lease(16, version=trainer.version):
                    worker.answer(held, [trainer.version])  # 2 samples of 5 tokens each
                return client.xlen(keys.batches("actor")) > len(batches)

            until(work, "a batch of 60 tokens")
            batches.append(step(trainer))
            trainer.next_nowait()
        assert [sum(row.length for row in batch.all_rows) for batch in batches] == [60, 60]
        assert {batch.manifest.staleness_max for batch in batches} == {0}
        assert sub_of(client, keys, "actor")["drops"] == {}, "no more was let in than was trained"


def test_I8_a_first_batch_of_samples_gets_the_groups_that_it_waits_for(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, trainer={"min_groups_before_first_batch": 8})
    worker = Player(client, keys)
    with buffering(config), producing(config), Trainer(config, subscription={"unit": "samples", "size": 4}) as trainer:
        publish(trainer)
        assert trainer.next_nowait() is None

        def work() -> bool:
            for held in worker.lease(16, version=1):
                worker.answer(held, [1])
            return client.xlen(keys.batches("actor")) > 0

        until(work, "the first batch")
        assert play.counter(client, keys, "completed") == 8, "places at the gate were guessed as 2"
        assert len(step(trainer).all_rows) == 4
    assert audit(client, keys).ok


def test_T10_samples_come_in_whole_multiples_and_the_rest_carries_over(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    sizes = {"unit": "samples", "size": 8, "multiple": 3}
    with buffering(config), Trainer(config, subscription=sizes) as trainer:
        publish(trainer)
        admit(client, keys, 7, n=2)
        Player(client, keys).work(7, 1)
        assert [step(trainer).manifest.num_samples for _ in range(2)] == [6, 6]


def test_manifests_tell_versions_and_lags(client: redis.Redis, keys: Keys, config: Config) -> None:
    worker = Player(client, keys)
    with buffering(config), Trainer(config, batch_groups=1) as trainer:
        publish(trainer)
        admit(client, keys, 3)
        held = worker.lease(3, version=1)
        for one in held[:2]:
            worker.answer(one, [1])
        step(trainer)
        step(trainer)
        worker.answer(held[2], [1, 3])
        manifest = step(trainer).manifest
        assert (manifest.version_min, manifest.version_max, manifest.train_version) == (1, 3, 3)
        lags = (manifest.staleness_max, manifest.staleness_mean, manifest.staleness_newest, manifest.staleness_steps)
        assert lags == (2, 1.0, 0.0, 2)


def test_T14_the_split_that_was_asked_for_travels_with_the_manifest(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config, subscription={"split": "strided"}) as trainer:
        publish(trainer)
        admit(client, keys, 2)
        Player(client, keys).work(2, 1)
        assert step(trainer).manifest.split == "strided"


# --- late joiners, quotas, retention ------------------------------------------------------------------------------


def test_a_late_joiner_starts_where_it_says_and_groups_before_that_do_not_wait_for_it(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config) as actor:
        publish(actor)
        admit(client, keys, 6)
        Player(client, keys).work(4, 1)
        starts = {"oldest": 6, "newest": 2, "completed:3": 3}
        joined = {start: beside(config, start.replace(":", "-"), size=1, start=start) for start in starts}
        for trainer in joined.values():
            trainer.__enter__()
        Player(client, keys).work(2, 1)
        for start, trainer in joined.items():
            assert [take(trainer)[0] for _ in range(starts[start])] == [f"d/0/{i}" for i in range(6)][-starts[start] :]
            assert trainer.next_nowait() is None
            durable(trainer)
        for _ in range(3):
            step(actor)
        durable(actor)
        until(lambda: play.counter(client, keys, "swept") == 6)
        for trainer in joined.values():
            trainer.close()
    assert sub_of(client, keys, "newest")["drops"] == {"before": 4}


def test_a_quota_takes_its_share_and_the_same_one_again(client: redis.Redis, keys: Keys, config: Config) -> None:
    with buffering(config), Trainer(config) as actor, beside(config, "rm", size=1, quota=0.5):
        publish(actor)
        admit(client, keys, 64)
        Player(client, keys).work(64, 1)
        given_up = until(lambda: sub_of(client, keys, "rm")["drops"].get("quota"))
        until(lambda: sub_of(client, keys, "rm")["held_groups"] + sub_of(client, keys, "rm")["drops"]["quota"] == 64)
        held = sub_of(client, keys, "rm")["held_groups"]
        assert 16 < held < 48, given_up
    with buffering(config):
        until(lambda: sub_of(client, keys, "rm")["held_groups"] == held)


@pytest.mark.parametrize("limit", [{"keep_groups": 4}, {"keep_s": 0.2}], ids=str)
def test_an_absent_subscription_holds_no_more_than_its_retention(
    client: redis.Redis, keys: Keys, config: Config, limit: dict[str, float]
) -> None:
    with buffering(config), Trainer(config) as actor:
        publish(actor)
        with beside(config, "rm", **limit):
            pass
        admit(client, keys, 8)
        Player(client, keys).work(8, 1)
        for _ in range(4):
            step(actor)
        durable(actor)
        kept = 4 if "keep_groups" in limit else 0
        until(lambda: play.counter(client, keys, "swept") == 8 - kept)
        assert sub_of(client, keys, "rm")["drops"] == {"retention": 8 - kept}


def test_I8_an_absent_subscription_without_retention_is_named_until_it_is_dropped(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config) as actor:
        publish(actor)
        with beside(config, "rm"):
            pass
        admit(client, keys, 2)
        Player(client, keys).work(2, 1)
        step(actor)
        durable(actor)
        assert until_waits(client, keys, "subscription:rm", TrainerAbsent) == TrainerAbsent("rm", 2, 0)
        assert play.counter(client, keys, "retired") == 0
        drop_subscription(client, keys, "rm")
        until(lambda: play.counter(client, keys, "swept") == 2)


def test_nothing_is_left_of_a_subscription_that_was_dropped_whoever_comes_late(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys, "rm", driving=0)
    play.admit(client, keys, [play.job(i) for i in range(2)])
    jobs = play.complete(client, keys, 2)
    leader = play.lead(client, keys)
    drop_subscription(client, keys, "rm")

    # Its trainer starts again, and what the leader had planned before arrives.
    with pytest.raises(ConfigError, match=r"'rm' of run .* was dropped: take another name"):
        play.join(client, keys, sub="rm")
    assert run(client, scripts.dispose(keys, leader, "rm", Disposal.STALE, jobs[:1])) == 0
    judged = scripts.Judged(jobs[1], "bad", raised=True, num_samples=2, reward=0.0)
    assert run(client, scripts.judge(keys, leader, "rm", [judged])) == 0

    assert not client.exists(keys.sub("rm"), keys.owner("rm"))
    assert not [name for job in jobs for name in client.hkeys(keys.group(job)) if b"rm" in name]


def test_a_driving_subscription_that_is_gone_for_too_long_no_longer_holds_the_gate(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    """Its batch is cut and never published, so its stock would keep the gate closed for ever."""
    small = {"staleness": {"mode": "async", "bound": 0}}
    config = Config.model_validate({**config.model_dump(), **small})
    worker = Player(client, keys)
    with buffering(config), producing(config), Trainer(config) as actor:
        publish(actor)
        other = Trainer(config, name="other").__enter__()
        until(lambda: client.xlen(keys.jobs("train")) == 2)
        worker.work(2, 1)
        assert other.next(timeout=60).n == 1
        kill(other, client)
        step(actor)
        until_waits(client, keys, "producer", GateClosed, subscription="other")
        set_subscription(client, keys, "other", {"keep_s": "0.1"})
        until(lambda: client.xlen(keys.jobs("train")) == 2, "the gate to open for the one that lives")
        worker.work(2, 2)
        step(actor)
    assert sub_of(client, keys, "other")["parked"]
    with Trainer(config, name="other") as back:
        assert not sub_of(client, keys, "other")["parked"]
        assert back.session.subscriber.read(1, 10.0).manifest.train_version == 1, "what was cut for it is still its own"


# --- changes at run time, bad input -------------------------------------------------------------------------------


def call(redis_server: RedisServer, keys: Keys, *arguments: str) -> Any:
    if not any(group.name == "subs" for group in app.registered_groups):
        register(app)
    result = CliRunner().invoke(app, ["subs", *arguments, "--run", keys.run, "--redis", redis_server.url, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_batch_size_is_changed_while_a_run_goes_on_and_stays_when_the_trainer_comes_back(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config):
        with Trainer(config) as trainer:
            publish(trainer)
            admit(client, keys, 12)
            Player(client, keys).work(12, 1)
            assert len(jobs_of(step(trainer))) == 2
            assert call(redis_server, keys, "set", "actor", "size=3")["size"] == 3
            assert len(jobs_of(step(trainer))) == 3
            durable(trainer)
            state = trainer.state_dict()
        with Trainer(config) as trainer:
            trainer.load_state_dict(state)
            publish(trainer)
            assert len(jobs_of(step(trainer))) == 3
            (row,) = call(redis_server, keys, "ls")
            assert (row["size"], row["set"], row["cursor"]) == ("3", ["gb", "size"], 3)
            call(redis_server, keys, "set", "actor", "size=")
        with Trainer(config) as trainer:
            assert len(jobs_of(step(trainer))) == 2
        assert call(redis_server, keys, "drop", "actor") == {"dropped": "actor"}


def test_a_subscription_made_by_hand_is_taken_by_its_trainer(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config) as actor:
        publish(actor)
        made = call(redis_server, keys, "set", "rm", "size=2", "sampler=newest_version")
        assert (made["driving"], made["sampler"]) == (False, "newest_version")
        admit(client, keys, 4)
        Player(client, keys).work(2, 1)
        publish_again = step(actor)
        Player(client, keys).work(2, 2)
        with beside(config, "rm", sampler="newest_version") as rm:
            assert take(rm) == ["d/0/2", "d/0/3"]
        assert jobs_of(publish_again) == ["d/0/0", "d/0/1"]


def test_bad_definitions_are_refused_and_nothing_is_changed(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, config: Config
) -> None:
    with Trainer(config) as actor:
        before = client.hgetall(keys.sub("actor"))
        bad = {
            "can never be cut while at most 2 are held": {"size": "4", "keep_groups": "2"},
            "can never be cut: at most 65536 fit": {"size": "65537"},
            "use each group once": {"share": "pool", "reuse": "2"},
            "sized": {"sized": "4"},
            "is invalid: use oldest": {"start": "yesterday"},
            "no jobs are admitted to": {"lanes": "tarin"},
        }
        for words, fields in bad.items():
            with pytest.raises(ConfigError, match=words):
                set_subscription(client, keys, "new", {"size": "2", **fields})
        with pytest.raises(ConfigError, match="lanes of subscription 'actor' cannot change"):
            set_subscription(client, keys, "actor", {"lanes": "eval"})
        with pytest.raises(ConfigError, match="no subscription 'nobody' to drop"):
            drop_subscription(client, keys, "nobody")
        with pytest.raises(ConfigError, match="is owned by a live trainer"):
            Trainer(config).__enter__()
        after = client.hgetall(keys.sub("actor"))
        assert {k: v for k, v in after.items() if k != b"seen"} == {k: v for k, v in before.items() if k != b"seen"}
        with pytest.raises(ProtocolError, match="it was not cut"):
            actor.session.subscriber.commit(7, "digest")
    assert client.hkeys(keys.subs) == [b"sub:actor", b"rev"]


#: Changes that mode and sampler of a live subscription do not allow, by what is said of them.
REFUSED: dict[str, dict[str, str]] = {
    "sync": {
        "bound=9": "mode sync requires bound 0 for a driving subscription, but bound is 9",
        "sampler=fifo": "has sampler cohort, and is now asked for with fifo",
    },
    "one_step": {
        "bound=2": "mode one_step requires bound 1 for a driving subscription, but bound is 2",
        "sampler=oldest_version": "mode one_step trains complete cohorts, but sampler is oldest_version",
    },
    "async": {
        "sampler=cohort": "has sampler oldest_version, and is now asked for with cohort",
        "unit=tokens": "A batch in tokens needs its size",
    },
}


@pytest.mark.parametrize("mode", REFUSED)
def test_T5_what_a_mode_decides_cannot_be_set_on_a_live_subscription(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, mode: str
) -> None:
    staleness = {"mode": mode, "bound": 0 if mode == "sync" else 1}
    config = make_config(redis_server.url, keys.run, tmp_path, staleness=staleness)
    with Trainer(config):
        pass
    before = client.hgetall(keys.sub("actor"))
    for change, said in REFUSED[mode].items():
        with pytest.raises(ConfigError, match=said):
            call(redis_server, keys, "set", "actor", change)
    assert client.hgetall(keys.sub("actor")) == before
    other = "cohort" if mode == "async" else "fifo"
    asked = {"subscription": {"sampler": other}}
    anew = make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, trainer=asked)
    with pytest.raises(ConfigError, match="sampler"), Trainer(anew):
        pass
    assert call(redis_server, keys, "set", "actor", "size=3", "multiple=1")["mode"] == mode


def test_what_whole_cohorts_have_no_use_for_cannot_be_set_with_them(
    redis_server: RedisServer, client: redis.Redis, keys: Keys
) -> None:
    drives = ("driving=1", f"model={play.MODEL}", "sampler=cohort", "size=4")
    with pytest.raises(ConfigError, match=r"leave trainer\.over_sampling_groups out"):
        call(redis_server, keys, "set", "actor", *drives, "over=5")
    with pytest.raises(ConfigError, match=r"leave trainer\.filter\.keep_when_few out"):
        call(redis_server, keys, "set", "actor", *drives, "keep_when_few=1")
    assert not client.exists(keys.sub("actor"))


def test_a_bound_that_its_mode_does_not_have_can_be_let_go_of(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    config = make_config(redis_server.url, keys.run, tmp_path, staleness={"mode": "sync", "bound": 0})
    with Trainer(config):
        pass
    run(client, scripts.subscribe(keys, "actor", {"bound": 9}, operator=True))
    with pytest.raises(ConfigError, match="mode sync requires bound 0"):
        call(redis_server, keys, "set", "actor", "size=3")
    call(redis_server, keys, "set", "actor", "bound=")
    with Trainer(config):
        pass
    assert client.hget(keys.sub("actor"), "bound") == b"0"


def test_I8_a_subscription_that_cannot_be_read_is_named_and_others_go_on_until_it_is_corrected(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config) as actor, beside(config, "rm") as rm:
        publish(actor)
        admit(client, keys, 4)
        Player(client, keys).work(4, 1)
        client.hset(keys.sub("rm"), "size", "many")
        client.hincrby(keys.subs, "rev", 1)
        assert rm.next_nowait() is None
        until_waits(client, keys, "buffer:rm", RecordUnreadable, error="size: it should be an integer, not 'many'")
        assert [len(jobs_of(step(actor))) for _ in range(2)] == [2, 2]
        durable(actor)
        by_name = {row["name"]: row for row in call(redis_server, keys, "ls")}
        assert by_name["actor"]["cursor"] == 2
        assert "Subscription 'rm' cannot be read from Redis" in by_name["rm"]["unreadable"]
        assert play.counter(client, keys, "retired") == 0, "it may want them"
        call(redis_server, keys, "set", "rm", "size=1")
        assert [len(take(rm)) for _ in range(4)] == [1, 1, 1, 1]
        durable(rm)
        until(lambda: play.counter(client, keys, "swept") == 4)


def test_I8_a_batch_that_can_never_be_cut_says_why(client: redis.Redis, keys: Keys, config: Config) -> None:
    sizes = {"unit": "tokens", "size": 10**6, "keep_groups": 4}
    with buffering(config), Trainer(config, subscription=sizes) as trainer:
        publish(trainer)
        admit(client, keys, 6)
        Player(client, keys).work(6, 1)
        assert trainer.next_nowait() is None
        until_waits(client, keys, "buffer:actor", GroupsMissing, is_full=True)


def test_I8_batches_beyond_the_prefetch_are_not_cut_before_those_in_hand_are_committed(
    client: redis.Redis, keys: Keys, config: Config
) -> None:
    with buffering(config), Trainer(config, subscription={"prefetch": 0}) as trainer:
        publish(trainer)
        admit(client, keys, 4)
        Player(client, keys).work(4, 1)
        first = trainer.next(timeout=60)
        assert trainer.next_nowait() is None
        until_waits(client, keys, "buffer:actor", BatchUncommitted, batch=1, ahead=1)
        trainer.commit(first)
        publish(trainer)
        assert trainer.next(timeout=60).train_version == 2
