"""Whatever happens in whatever order: the audits stay green, and a key that was tampered with turns them red."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from penstock.consumers.trainer import Trainer
from penstock.errors import LeadershipLost, PublishError
from penstock.names import LANES
from penstock.protocol import scripts
from penstock.protocol.audit import audit, scan_groups
from penstock.protocol.scripts import Leadership, RawLease, ensure_lanes, run
from penstock.protocol.tokens import LaneTokens, lanes_of
from penstock.records.causes import PayloadServersAway
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys
from penstock.records.publication import Offer
from penstock.redis.connect import connect
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    admit,
    buffering,
    jobs_of,
    make_config,
    producing,
    publish,
    step,
    until,
    until_waits,
)

# --- I1: a long random play ---------------------------------------------------------------------------------------


class RandomPlay:
    """Producers, workers, a leader, a trainer and an operator who do what they like, by verbs."""

    def __init__(self, client: redis.Redis, keys: Keys, seed: int) -> None:
        self.client, self.keys, self.random = client, keys, random.Random(seed)
        self.revision = play.subscribe(client, keys, bound=3, gb=40)
        play.join(client, keys)
        play.publish(client, keys, 1, 0)
        self.version, self.gen, self.cut, self.cursor = 1, 0, 0, 0
        self.leader = play.lead(client, keys)
        self.old_leaders: list[Leadership] = []
        #: Leases that somebody believes to hold; those of zombies stay.
        self.leases: list[RawLease] = []
        self.trained: Counter[str] = Counter()
        #: Tokens of the leases that have written the reward of a group.
        self.rewarded: dict[str, set[str]] = {}
        self.batches: dict[int, list[str]] = {}
        #: Versions whose folders were told of, and as what.
        self.folders: dict[int, str] = {}

    def act(self) -> None:
        acts: list[Callable[[], object]] = [
            self.admit, self.lease, self.lease, self.commit, self.commit, self.commit, self.commit, self.fail,
            self.commit, self.reward, self.reward, self.reward,
            self.crash, self.release, self.expire, self.due, self.requeue, self.cancel, self.keep, self.cut_batch,
            self.cut_batch, self.commit_batch, self.commit_batch, self.publish, self.publish, self.checkpointed,
            self.whole, self.whole, self.offered,
            self.rewind, self.dispose, self.seal, self.seal, self.sweep, self.depose, self.close, self.abandon,
        ]  # fmt: skip
        with contextlib.suppress(LeadershipLost):
            self.random.choice(acts)()

    def admit(self) -> None:
        at = int(self.client.hget(self.keys.source, "train") or 0)
        jobs = [play.job(i) for i in range(at, at + self.random.randint(1, 12))]
        pairs = [(one, one.to_bytes()) for one in jobs]
        stale = self.random.random() < 0.2
        call = scripts.admit(
            self.keys, pairs, lane="train", source="train", position=at - stale, model=play.MODEL,
            gate=(self.revision, ["actor"]), cohorts=True,
        )  # fmt: skip
        run(self.client, call)

    def lease(self) -> None:
        worker = f"w{self.random.randint(1, 3)}"
        self.leases += play.lease(self.client, self.keys, worker, self.random.randint(1, 6), self.version)

    def held(self) -> RawLease | None:
        """One of the last leases, mostly; now and then one of long ago."""
        lately = self.leases[-12:] if self.random.random() < 0.9 else self.leases
        return self.random.choice(lately) if lately else None

    def commit(self) -> None:
        if (held := self.held()) is not None:
            ks = self.random.choice([[0], [1], [0, 1]])
            with_reward = self.random.random() < 0.3
            play.commit(self.client, self.keys, held, ks, self.version, with_reward=with_reward)

    def reward(self) -> None:
        if (held := self.held()) is None or not self.client.exists(self.keys.meta(held.job)):
            return
        before = self.client.get(self.keys.meta(held.job))
        mark = float(self.random.randint(10, 10**6))
        if play.reward(self.client, self.keys, held, mark) == "ready":
            self.rewarded.setdefault(held.job, set()).add(held.token)
        else:
            assert self.client.get(self.keys.meta(held.job)) == before, "I3"

    def fail(self) -> None:
        if (held := self.held()) is not None:
            tries = self.random.randint(0, 3)
            run(self.client, scripts.fail(self.keys, held.job, held.token, "w", reason="r", detail="",
                                          max_attempts=tries, retry_ms=0))  # fmt: skip

    def crash(self) -> None:
        if (held := self.held()) is not None:
            run(self.client, scripts.crash(self.keys, held.job, held.token, "w", "boom"))

    def release(self) -> None:
        if (held := self.held()) is not None:
            run(self.client, scripts.checkpoint(self.keys, held.job, held.token, 0, b"prefix", 60))
            run(self.client, scripts.release(self.keys, held.job, held.token))

    def expire(self) -> None:
        """A worker is silent for longer than a lease; the reclaimer looks."""
        if (held := self.held()) is not None:
            lane, eid = self.client.hmget(self.keys.group(held.job), "cl", "eid")
            if lane is not None and play.state(self.client, self.keys, held.job) == "leased":
                key = self.keys.jobs(lane.decode())
                self.client.xclaim(key, "workers", "w1", 0, [eid], idle=10**7, justid=True)
                if self.random.random() < 0.8:
                    play.in_contact(self.client, self.keys)
                run(self.client, scripts.reclaim(self.keys, lane.decode(), "me", 900))

    def due(self) -> None:
        run(self.client, scripts.due(self.keys))

    def some(self) -> list[str]:
        jobs = sorted(scan_groups(self.client, self.keys))
        return self.random.sample(jobs, min(len(jobs), 8))

    def requeue(self) -> None:
        for job in self.some():
            run(self.client, scripts.requeue(self.keys, job, play.MODEL))

    def cancel(self) -> None:
        for job in self.some()[:1]:
            run(self.client, scripts.cancel(self.keys, job, ["actor"]))

    def either_leader(self) -> Leadership:
        """Mostly the one that leads; now and then one that was deposed and does not know."""
        if self.old_leaders and self.random.random() < 0.2:
            return self.random.choice(self.old_leaders)
        return self.leader

    def keep(self) -> None:
        ready = [job.decode() for job in self.client.zrange(self.keys.ready, 0, -1)]
        sizes = [(job, int(self.client.hget(self.keys.group(job), "n") or 0)) for job in ready]
        with contextlib.suppress(LeadershipLost):
            run(self.client, scripts.keep(self.keys, self.either_leader(), sizes))

    def cut_batch(self) -> None:
        ready = [job.decode() for job in self.client.zrange(self.keys.ready, 0, -1)]
        if self.random.random() < 0.8:
            self.keep()
            ready = [job for job in ready if not self.client.hexists(self.keys.group(job), "u:actor")]
        chosen = self.random.sample(ready, min(len(ready), self.random.randint(1, 4)))
        n = self.cut + self.random.choice([0, 1, 1, 1, 2])
        version = self.version - self.random.choice([0, 0, 0, 1])
        if not chosen or n < 1:
            return
        cut = play.cut(self.client, self.keys, self.either_leader(), n, chosen, version=version, rev=self.revision)
        if cut.outcome == "cut":
            self.cut, self.batches[n] = n, chosen

    def commit_batch(self) -> None:
        n = self.cursor + self.random.choice([0, 1, 1, 1, 2])
        for rank in self.random.choice([[0], [1], [0, 1], [1, 0]]):
            done = play.commit_batch(self.client, self.keys, n, gen=self.gen, rank=rank, ranks=2)
            if done.outcome == "committed":
                self.cursor = n

    def publish(self) -> None:
        try:
            self.version = play.publish(self.client, self.keys, self.version + 1, self.cursor, gen=self.gen)
        except PublishError:
            return

    def whole(self) -> None:
        """The folder of a version comes late, is told of once more, or by a trainer that was rewound meanwhile."""
        version = max(0, self.version - self.random.choice([-1, 0, 0, 1, 2]))
        late = self.gen > 0 and self.random.random() < 0.3
        path = f"/late/{version}" if late else f"/v{version}"
        said = play.whole(self.client, self.keys, version, path, gen=self.gen - late)
        if late:
            assert said == "owner"
        elif not 0 < version <= self.version:
            assert said == "version", "a folder without an announcement is nobody's"
        else:
            assert said == ("already" if version in self.folders else "whole")
            self.folders[version] = path

    def offered(self) -> None:
        """The newest version is offered, once more, or by a trainer that was rewound: then nothing changes."""
        late = self.gen > 0 and self.random.random() < 0.3
        key = self.keys.offer("policy", self.version, "a" * 32)
        before = self.client.get(key)
        record = Offer(f"http://{'late' if late else 'h'}:1", self.version, "a" * 32)
        said = play.offer(self.client, self.keys, record, gen=self.gen - late)
        assert said == ("owner" if late else "offered")
        assert self.client.get(key) == (before if late else record.to_bytes())

    def checkpointed(self) -> None:
        n = self.random.randint(max(0, self.cursor - 2), self.cursor + 1)
        run(self.client, scripts.checkpointed(self.keys, "actor", owner="owner-1", gen=self.gen, n=n))

    def rewind(self) -> None:
        if self.random.random() < 0.2:
            back = play.rewind(self.client, self.keys, self.random.randint(0, self.cursor), gen=self.gen)
            if back.outcome == "rewound":
                self.gen = back.gen
                self.revision = play.revision(self.client, self.keys)  # abandoned versions are news to all
                self.cursor = int(self.client.hget(self.keys.sub("actor"), "cursor"))

    def dispose(self) -> None:
        ready = [job.decode() for job in self.client.zrange(self.keys.ready, 0, 1)]
        reason = self.random.choice(sorted(Disposal))
        run(self.client, scripts.dispose(self.keys, self.either_leader(), "actor", reason, ready))

    def seal(self) -> None:
        call = scripts.seal(
            self.keys, self.either_leader(), revision=self.revision, subs=["actor"], jobs=self.some(),
            evict=["actor"] if self.random.random() < 0.1 else [],
        )  # fmt: skip
        run(self.client, call)

    def sweep(self) -> None:
        retiring = [job.decode() for job in self.client.smembers(self.keys.retiring)]
        run(self.client, scripts.sweep(self.keys, self.either_leader(), [(job, 2) for job in retiring]))

    def depose(self) -> None:
        if self.random.random() < 0.3:
            self.client.delete(self.keys.leader)
            self.old_leaders.append(self.leader)
            self.leader = play.lead(self.client, self.keys, f"leader-{len(self.old_leaders) + 1}")

    def close(self) -> None:
        if (held := self.held()) is not None:
            run(self.client, scripts.shorten(self.keys, self.either_leader(), held.job))

    def abandon(self) -> None:
        lane, worker = self.random.choice(LANES), f"w{self.random.randint(1, 3)}"
        known = [held.job for held in self.leases if self.random.random() < 0.8]
        run(self.client, scripts.abandon(self.keys, lane, worker, known))


@pytest.mark.parametrize("seed", range(3))
def test_I1_audits_are_green_through_a_long_random_play(client: redis.Redis, keys: Keys, seed: int) -> None:
    game = RandomPlay(client, keys, seed)
    for turn in range(1500):
        game.act()
        assert run(client, scripts.recount(keys)).difference == 0
        fields, held = run(client, scripts.recount_tokens(keys))
        assert lanes_of(fields).get("train", LaneTokens()).held == held.get("train", 0), "I10"
        if turn % 60 == 0:
            check(client, keys, game)
    check(client, keys, game)
    assert play.counter(client, keys, "admitted") > 100
    assert game.cut > 5
    assert game.version > 3
    assert play.counter(client, keys, "swept") > 5
    told = scripts.read_all_whole(client, keys, play.MODEL)
    assert {version: one.path for version, one in told.items()} == game.folders, "T1: one folder for a version"
    assert game.folders
    used = Counter(job for jobs in game.batches.values() for job in jobs)
    used_twice = [job for job, many in used.items() if many > 1]
    assert used_twice == [], "I5: in two batches of one subscription"
    assert game.rewarded
    assert {len(tokens) for tokens in game.rewarded.values()} == {1}, "no group is given its reward by two leases"


def check(client: redis.Redis, keys: Keys, game: RandomPlay) -> None:
    """All recounts, and the counters that gate and drain by."""
    assert audit(client, keys).differences == []
    groups = [client.hgetall(keys.group(job)) for job in scan_groups(client, keys)]
    unfinished = [group for group in groups if group[b"st"] in (b"queued", b"leased", b"delayed")]
    cohorts = {int(nb): int(many) for nb, many in client.hgetall(keys.cohorts).items()}
    assert cohorts == dict(Counter(int(group[b"nb"]) for group in unfinished)), "one_step drains by this"
    sub = client.hgetall(keys.sub("actor"))
    counters = client.hgetall(keys.counters)
    names = (b"seq:train", b"buried:train", b"cancelled:train")
    admitted, buried, cancelled = (int(counters.get(name, 0)) for name in names)
    stock = admitted - buried - cancelled - int(sub.get(b"disposed", 0)) - int(sub.get(b"p", 0))
    through = int(sub.get(b"through", 0))
    really = len(unfinished)
    really += sum(group[b"st"] == b"ready" and b"u:actor" not in group for group in groups)
    really += sum(len(jobs) for n, jobs in game.batches.items() if n > through)
    assert stock == really, "T3: the gate's stock is what is there"


def test_I1_lost_replies_change_nothing_when_verbs_are_said_twice(client: redis.Redis, keys: Keys) -> None:
    """Every verb of a group's life is sent twice, as after a reply that was lost."""

    def twice(call: scripts.Call[object]) -> object:
        first = run(client, call)
        run(client, call)
        return first

    play.subscribe(client, keys, gb=100)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    pairs = [(one, one.to_bytes()) for one in (play.job(0), play.job(1))]
    twice(scripts.admit(keys, pairs, lane="train", source="train", position=0, model=play.MODEL, gate=None))
    held = play.lease(client, keys, most=9, version=1)
    assert len(held) == 2
    for one in held:
        records = [(k, 1, play.meta(k, one.token, 1).to_bytes()) for k in range(2)]
        rewarded = [play.meta(k, one.token, 1, reward=9.0).to_bytes() for k in range(2)]
        twice(scripts.commit(keys, one.job, one.token, records, with_reward=one is held[1]))
        twice(scripts.reward(keys, one.job, one.token, rewarded))
    leader = play.lead(client, keys)
    jobs = [one.job for one in held]
    twice(scripts.keep(keys, leader, [(job, 2) for job in jobs], {jobs[0]: [1]}))
    for _ in range(2):
        play.cut(client, keys, leader, 1, jobs)
    for _ in range(2):
        play.commit_batch(client, keys, 1)
        play.publish(client, keys, 2, 1)
    twice(scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=1))
    twice(scripts.seal(keys, leader, revision=play.revision(client, keys), subs=["actor"], jobs=jobs))
    twice(scripts.sweep(keys, leader, [(job, 2) for job in jobs]))
    counters = {name: play.counter(client, keys, name) for name in ("committed", "cut", "retired", "swept")}
    assert counters == {"committed": 4, "cut": 1, "retired": 2, "swept": 2}
    assert (play.counter(client, keys, "payload_lost"), play.counter(client, keys, "duplicated")) == (1, 0)
    assert run(client, scripts.recount(keys)).difference == 0


def test_T1_no_batch_is_cut_between_a_rewind_and_its_publication(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [play.job(0)])
    jobs = play.complete(client, keys, 1, version=1)
    leader = play.lead(client, keys)
    play.keep(client, keys, leader, jobs)
    play.rewind(client, keys, 0)
    assert play.cut(client, keys, leader, 1, jobs, version=1).outcome == "clock"
    play.publish(client, keys, 2, 0, gen=1)
    assert play.cut(client, keys, leader, 1, jobs, version=2).outcome == "cut"


def test_T16_a_folder_is_told_of_by_who_announced_it_and_after_that(client: redis.Redis, keys: Keys) -> None:
    """A trainer that was taken over claims a number that the next one announces: its folder is never taken for it."""
    play.subscribe(client, keys)
    assert play.join(client, keys, owner="old").mine
    play.publish(client, keys, 1, 0, owner="old")
    assert play.whole(client, keys, 2, "/old", owner="old") == "version"
    client.delete(keys.owner("actor"))
    gen = play.join(client, keys, owner="new").gen
    rewound = run(client, scripts.rewind(keys, "actor", owner="new", gen=gen, n=0, model=play.MODEL))
    play.publish(client, keys, 2, 0, owner="new", gen=rewound.gen)
    assert play.whole(client, keys, 2, "/old", owner="old") == "owner"
    assert scripts.read_all_whole(client, keys, play.MODEL) == {}
    assert play.whole(client, keys, 2, "/new", owner="new", gen=rewound.gen) == "whole"
    assert play.whole(client, keys, 2, "/new", owner="new", gen=rewound.gen) == "already"
    assert scripts.read_all_whole(client, keys, play.MODEL)[2].path == "/new"


def test_T1_a_version_is_offered_by_the_owner_alone(client: redis.Redis, keys: Keys) -> None:
    """A trainer that was taken over must not say where, and what, its successor's versions are."""
    mine, theirs = (Offer(url, 1, "a" * 32) for url in ("http://old:1", "http://new:1"))
    assert play.offer(client, keys, mine, owner="old") == "owner", "nobody has a subscription yet"
    play.subscribe(client, keys)
    assert play.join(client, keys, owner="old").mine
    assert [play.offer(client, keys, mine, owner="old") for _ in range(2)] == ["offered", "offered"]
    client.delete(keys.owner("actor"))
    gen = play.join(client, keys, owner="new").gen
    assert play.offer(client, keys, theirs, owner="old") == "owner"
    assert client.get(keys.offer("policy", 1, "a" * 32)) == mine.to_bytes(), "until it ends"
    rewound = run(client, scripts.rewind(keys, "actor", owner="new", gen=gen, n=0, model=play.MODEL))
    assert play.offer(client, keys, theirs, owner="new", gen=gen) == "owner", "of an earlier generation"
    assert play.offer(client, keys, theirs, owner="new", gen=rewound.gen) == "offered"
    assert client.get(keys.offer("policy", 1, "a" * 32)) == theirs.to_bytes()


def test_T16_folders_are_forgotten_with_their_publications(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys)
    play.join(client, keys)
    for version in range(1, 300):
        client.hset(keys.clock, scripts.version_field(play.MODEL), version)
        assert play.whole(client, keys, version) == "whole"
    assert sorted(scripts.read_all_whole(client, keys, play.MODEL)) == list(range(44, 300))


def test_a_group_of_a_lane_without_a_subscription_is_not_sealed(client: redis.Redis, keys: Keys) -> None:
    play.subscribe(client, keys, lanes="eval")
    play.admit(client, keys, [play.job(0)])
    jobs = play.complete(client, keys, 1)
    assert play.seal(client, keys, play.lead(client, keys), jobs) == []
    assert play.state(client, keys, jobs[0]) == "ready"


def test_skip_moves_once_and_only_for_the_leader(client: redis.Redis, keys: Keys) -> None:
    revision = play.subscribe(client, keys, sampler="cohort", size=2)
    leader = play.lead(client, keys)

    def skip(place: int, by: Leadership = leader, rev: int = revision) -> scripts.Skipped:
        return run(client, scripts.skip(keys, by, "actor", revision=rev, place=place, places=4))

    with pytest.raises(LeadershipLost):
        skip(1, Leadership(0, "other"))
    assert skip(1, rev=revision + 1).outcome == "subs"
    assert skip(3).outcome == "moved"
    assert skip(1) == scripts.Skipped("skipped", 4)
    assert skip(1) == scripts.Skipped("moved", 4)
    assert skip(5) == scripts.Skipped("skipped", 8)


# --- I1: tampering is seen ----------------------------------------------------------------------------------------

TAMPER: dict[str, Callable[[redis.Redis, Keys], object]] = {
    "entry gone from its lane": lambda client, keys: client.xdel(keys.jobs("train"), eid(client, keys, "queued")),
    "entry too many in a lane": lambda client, keys: client.xadd(keys.jobs("train"), {"id": "x", "nb": 0, "body": ""}),
    "not in line": lambda client, keys: client.delete(keys.of("queued:train")),
    "in the line of another version": lambda client, keys: client.zincrby(
        keys.of("queued:train"), 1, client.zrange(keys.of("queued:train"), 0, 0)[0]
    ),
    "delivered twice": lambda client, keys: client.hset(keys.group(job(client, keys, "leased")), "st", "queued"),
    "lease without a delivery": lambda client, keys: client.xack(
        keys.jobs("train"), "workers", eid(client, keys, "leased")
    ),
    "lease without a token": lambda client, keys: client.hdel(keys.group(job(client, keys, "leased")), "tok"),
    "not in flight": lambda client, keys: client.zrem(keys.inflight, job(client, keys, "leased")),
    "in flight and done": lambda client, keys: client.zadd(keys.inflight, {job(client, keys, "ready"): 1}),
    "not among the ready": lambda client, keys: client.zrem(keys.ready, job(client, keys, "ready")),
    "among the ready": lambda client, keys: client.zadd(keys.ready, {job(client, keys, "queued"): 9}),
    "not among the delayed": lambda client, keys: client.zrem(keys.delayed, job(client, keys, "delayed")),
    "no dead letter": lambda client, keys: client.xdel(keys.dead, eid(client, keys, "dead")),
    "not among the retiring": lambda client, keys: client.srem(keys.retiring, job(client, keys, "retiring")),
    "not among the unfinished": lambda client, keys: client.zrem(keys.unfinished("train"), job(client, keys, "queued")),
    "still among the unfinished": lambda client, keys: client.zadd(
        keys.unfinished("train"), {job(client, keys, "ready"): 1}
    ),
    "fewer commits than counted": lambda client, keys: client.hdel(keys.group(job(client, keys, "ready")), "s:0"),
    "more samples than there are": lambda client, keys: client.hset(keys.group(job(client, keys, "ready")), "n", 3),
    "metadata gone": lambda client, keys: client.delete(keys.meta(job(client, keys, "ready"))),
    "sample committed twice": lambda client, keys: client.append(
        keys.meta(job(client, keys, "ready")), client.get(keys.meta(job(client, keys, "ready")))
    ),
    "group gone": lambda client, keys: client.delete(keys.group(job(client, keys, "queued"))),
    "done bit gone": lambda client, keys: client.setbit(keys.done("d", 0), 6, 0),
    "done bit too many": lambda client, keys: client.setbit(keys.done("d", 0), 77, 1),
    "finished twice": lambda client, keys: client.hincrby(keys.counters, "duplicated", 1),
    "complete, and nothing to come": lambda client, keys: client.hset(
        keys.group(job(client, keys, "leased")), mapping={"n": 2, "c": 2, "s:0": "t", "s:1": "t"}
    ),
    "ready before its reward": lambda client, keys: client.hset(keys.group(job(client, keys, "ready")), "rw", 1),
    "payload lost": lambda client, keys: client.hincrby(keys.counters, "payload_lost", 1),
    "admitted too many": lambda client, keys: client.hincrby(keys.counters, "admitted", 1),
    "retired too many": lambda client, keys: client.hincrby(keys.counters, "retired", 1),
}


def job(client: redis.Redis, keys: Keys, state: str) -> str:
    return next(name for name in sorted(scan_groups(client, keys)) if play.state(client, keys, name) == state)


def eid(client: redis.Redis, keys: Keys, state: str) -> bytes:
    return bytes(client.hget(keys.group(job(client, keys, state)), "eid"))


def one_of_each(client: redis.Redis, keys: Keys) -> None:
    """A job in every state, and one that is gone."""
    play.subscribe(client, keys)
    admit(client, keys, 8, cohorts=True)
    ready, delayed, dead, retiring, leased, other, gone = play.lease(client, keys, most=7)
    for held in (ready, other, retiring, gone):
        play.commit(client, keys, held, [0, 1])
    for held, tries in ((delayed, 3), (dead, 0)):
        run(client, scripts.fail(keys, held.job, held.token, "w", reason="r", detail="", max_attempts=tries,
                                 retry_ms=10**6))  # fmt: skip
    leader = play.lead(client, keys)
    assert gone.job == "d/0/6"
    for held, swept in ((retiring, False), (gone, True)):
        run(client, scripts.dispose(keys, leader, "actor", Disposal.FILTERED, [held.job]))
        assert play.seal(client, keys, leader, [held.job]) == [held.job]
        if swept:
            run(client, scripts.sweep(keys, leader, [(held.job, 2)]))
    assert play.state(client, keys, leased.job) == "leased"


@pytest.mark.parametrize("what", TAMPER)
def test_I1_audit_is_red_when_one_thing_is_tampered_with(client: redis.Redis, keys: Keys, what: str) -> None:
    one_of_each(client, keys)
    assert audit(client, keys).ok
    TAMPER[what](client, keys)
    report = audit(client, keys)
    assert not report.ok, what
    assert report.differences


def test_I1_the_audit_tells_the_first_differences_and_counts_the_rest(client: redis.Redis, keys: Keys) -> None:
    admit(client, keys, 40)
    client.xtrim(keys.jobs("train"), maxlen=0)
    report = audit(client, keys)
    assert (len(report.differences), report.num_differences) == (20, 41)


# --- Redis dies ---------------------------------------------------------------------------------------------------


def test_I4_all_go_on_by_themselves_when_redis_is_killed_and_comes_back(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start())
    keys = Keys("killed")
    ensure_lanes(client, keys)
    staleness = {"mode": "async", "bound": 4}
    config = make_config(server.url, keys.run, tmp_path, staleness=staleness, worker={"lease_s": 1, "heartbeat_s": 0.2})
    trained: list[str] = []
    try:
        with (
            producing(config),
            buffering(config),
            Trainer(config, prefetch=1) as trainer,
            ThreadPoolExecutor(1) as pool,
        ):
            publish(trainer)
            for _ in range(3):
                worker = Player(client, keys)
                until(lambda: client.xlen(keys.jobs("train")) >= 4)
                worker.work(3, worker.clock)
                (held,) = worker.lease(1, version=worker.clock)
                epoch, run_id = client.hget(keys.leader, "epoch"), client.info("server")["run_id"]
                waiting = pool.submit(step, trainer)
                trained += jobs_of(waiting.result(PATIENCE_S))
                waiting = pool.submit(trainer.next, 2 * PATIENCE_S)  # the second half of it is still drawn
                server.kill()
                server.start()
                assert client.info("server")["run_id"] != run_id
                assert play.state(client, keys, held.job) == "leased", "what was acknowledged is there"
                assert worker.answer(held, [worker.clock]).outcome == "ready", "nobody stole it"
                batch = waiting.result(2 * PATIENCE_S)
                trained += jobs_of(batch)
                trainer.commit(batch)
                publish(trainer, batch.n)
                until(lambda: client.hget(keys.leader, "epoch"))
                assert int(client.hget(keys.leader, "epoch")) >= int(epoch or 0)
            trainer.state_dict()
            trainer.checkpointed()
            until(lambda: play.counter(client, keys, "swept") == 12)
        assert len(trained) == len(set(trained)) == 12
        assert audit(client, keys).ok
    finally:
        client.close()
        server.stop()


def test_I4_leases_survive_a_redis_that_was_away_for_longer_than_a_lease(tmp_path: Path) -> None:
    """Section 5 item 7: nobody could renew, so the first look after the restart must not take everything."""
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start())
    keys = Keys("away")
    ensure_lanes(client, keys)
    play.subscribe(client, keys)
    config = make_config(server.url, keys.run, tmp_path, worker={"lease_s": 3, "heartbeat_s": 1})
    try:
        with buffering(config):
            admit(client, keys, 2)
            alive, silent = play.lease(client, keys, most=2)
            entry = [client.hget(keys.group(held.job), "eid") for held in (alive, silent)]
            server.kill()
            server.start()
            # As after a long absence: both have been idle for hours.
            client.xclaim(keys.jobs("train"), "workers", "w1", 0, entry, idle=10**7, justid=True)

            def renewed() -> bool:
                assert run(client, scripts.renew(keys, "w1", [(alive.job, alive.token)])) == []
                return play.state(client, keys, silent.job) == "queued"

            until(renewed, "the silent one's lease to be taken")
            assert client.info("server")["uptime_in_seconds"] >= 3, "whole seconds: a lease has gone by"
            assert play.state(client, keys, alive.job) == "leased"
            assert client.hget(keys.group(silent.job), "cl") == b"resume"
    finally:
        client.close()
        server.stop()


def test_parts_stop_when_told_though_redis_is_gone(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start())
    config = make_config(server.url, "gone", tmp_path)
    keys = Keys("gone")
    try:
        trainer = Trainer(config).__enter__()
        with producing(config), buffering(config):
            until(lambda: client.hget(keys.leader, "epoch") and client.hget(keys.source, "fingerprint"))
            server.kill()
        trainer.close()
    finally:
        client.close()
        server.stop()


def test_a_payload_server_that_is_away_stops_nothing_for_good(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    """The buffer says what it waits for, and goes on when the server is back."""
    from penstock import payloads
    from penstock.records.job import Job
    from tests.integration.parts import make_sample

    server = RedisServer(tmp_path / "payloads")
    store = connect(server.start())
    redis_section = {"payload_servers": {"p1": server.url}}
    config = make_config(redis_server.url, keys.run, tmp_path, redis=redis_section, trainer={"batch_groups": 1})
    try:
        with buffering(config), Trainer(config) as trainer:
            publish(trainer)
            admit(client, keys, 1)
            (held,) = play.lease(client, keys, version=1)
            records = []
            for k in range(2):
                sample = make_sample(Job.from_bytes(held.body), k, [1], 2)
                data, (meta,) = payloads.pack([sample], token=held.token, server="p1")
                store.set(keys.payload(sample.id, held.token), data, ex=600)
                records.append((k, 1, meta.to_bytes()))
            server.kill()
            run(client, scripts.commit(keys, held.job, held.token, records))
            until_waits(client, keys, "buffer:payloads", PayloadServersAway, servers=("p1",), groups=1)
            server.start()
            batch = step(trainer)
            assert [row.server for row in batch.rows] == ["p1", "p1"]
            assert batch.padded()["tokens"].shape[0] == 2
    finally:
        store.close()
        server.stop()
