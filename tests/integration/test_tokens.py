"""I10: every token that a fenced verb was told of stands in exactly one account, or is held by a live group."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from penstock.names import LANES
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import Leadership, RawLease, run
from penstock.protocol.tokens import LaneTokens
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.records.sample import Drawn
from penstock.redis.call import Call, Script
from tests.integration import play


@pytest.fixture
def leader(client: redis.Redis, keys: Keys) -> Leadership:
    """Of a run with one subscription, `actor`, whose trainer has published version 1."""
    play.subscribe(client, keys, gb=100)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    return play.lead(client, keys)


def ledger(client: redis.Redis, keys: Keys) -> LaneTokens:
    """The ledger, with which the groups agree."""
    report = audit(client, keys)
    assert [line for line in report.differences if line.startswith(("tokens", "group"))] == []
    return play.drawn_to_train(client, keys)


def accounts(client: redis.Redis, keys: Keys) -> dict[str, int]:
    """Those that hold something; heard and held beside them."""
    found = ledger(client, keys)
    shown = {"heard": found.heard, "held": found.held, **found.accounts}
    return {name: tokens for name, tokens in shown.items() if tokens}


def begin(client: redis.Redis, keys: Keys, n: int = 2) -> RawLease:
    at = int(client.hget(keys.source, "train") or 0)
    play.admit(client, keys, [play.job(at, n)])
    (held,) = play.lease(client, keys, version=1)
    return held


def commit(client: redis.Redis, keys: Keys, held: RawLease, told: dict[int, Drawn]) -> scripts.Committed:
    records = []
    for k, drawn in told.items():
        meta = replace(play.meta(k, held.token, 1), num_generated=drawn.live, length=drawn.live + 1)
        records.append((k, 1, meta.to_bytes()))
    return run(client, scripts.commit(keys, held.job, held.token, records, told))


def keep(client: redis.Redis, keys: Keys, held: RawLease, k: int, drawn: Drawn) -> bool:
    return run(client, scripts.checkpoint(keys, held.job, held.token, k, b"prefix", 60, drawn))


def complete(client: redis.Redis, keys: Keys, leader: Leadership, *drawn: int) -> str:
    """A group that may be cut, with so many drawn tokens in its samples."""
    held = begin(client, keys, len(drawn))
    assert commit(client, keys, held, {k: Drawn(live) for k, live in enumerate(drawn)}).outcome == "ready"
    play.keep(client, keys, leader, [held.job], len(drawn))
    return held.job


def cut(client: redis.Redis, keys: Keys, leader: Leadership, n: int, jobs: dict[str, str], sub: str = "actor") -> str:
    """Cut a batch of these jobs, of which so many tokens bear loss (K:TOKENS)."""
    data = play.manifest(n, sub)
    call = scripts.cut(
        keys, leader, sub, revision=play.revision(client, keys), n=n, manifest=data, digest=Manifest.digest(data),
        consumes=len(jobs), model="", version=0, oldest_allowed=-1, jobs=list(jobs), bearing=list(jobs.values()),
    )  # fmt: skip
    return run(client, call).outcome


def train(client: redis.Redis, keys: Keys, n: int) -> None:
    """The trainer commits batch n, and writes a checkpoint."""
    assert play.commit_batch(client, keys, n).outcome == "committed"
    assert run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=n)) == 1


# --- what a worker tells -------------------------------------------------------------------------------------------


def test_I10_what_is_told_is_held_until_its_group_is_done_with(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    held = begin(client, keys)
    keep(client, keys, held, 0, Drawn(5))
    assert accounts(client, keys) == {"heard": 5, "held": 5}
    commit(client, keys, held, {0: Drawn(9, behind_stop=1)})
    assert accounts(client, keys) == {"heard": 10, "held": 9, "behind_stop": 1}
    commit(client, keys, held, {1: Drawn(4)})
    assert accounts(client, keys) == {"heard": 14, "held": 13, "behind_stop": 1}


def test_I10_what_is_told_again_changes_nothing(client: redis.Redis, keys: Keys, leader: Leadership) -> None:
    held = begin(client, keys)
    for _ in range(3):
        keep(client, keys, held, 0, Drawn(5, rewound=2))
        grown = scripts.extend(
            keys, held.job, held.token, 0, b"more", before=6, ttl_s=60, most=99, usage=Drawn(7, rewound=2)
        )
        run(client, grown)
        assert accounts(client, keys)["heard"] == 9
        keep(client, keys, held, 0, Drawn(7, rewound=2))
    for _ in range(2):
        commit(client, keys, held, {0: Drawn(8, rewound=2)})
    keep(client, keys, held, 0, Drawn(7, rewound=2))
    release = scripts.release(keys, held.job, held.token, {0: Drawn(8, rewound=2), 1: Drawn(6)})
    assert [run(client, release) for _ in range(2)] == [True, False]
    assert accounts(client, keys) == {"heard": 16, "held": 8, "rewound": 2, "redrawn": 6}


def test_I10_a_prefix_is_heard_once_however_often_it_is_continued(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    held = begin(client, keys)
    for live in (5, 8, 9):
        keep(client, keys, held, 0, Drawn(live, behind_stop=1))
        run(client, scripts.release(keys, held.job, held.token, {0: Drawn(live, behind_stop=1)}))
        (held,) = play.lease(client, keys, version=1)
    assert accounts(client, keys) == {"heard": 12, "held": 9, "behind_stop": 3}
    commit(client, keys, held, {0: Drawn(0, lost_turn=9), 1: Drawn(2)})
    assert accounts(client, keys) == {"heard": 14, "held": 2, "behind_stop": 3, "lost_turn": 9}


@pytest.mark.parametrize("end", ["release", "crash", "fail", "reclaim", "abandon"])
def test_I10_what_no_prefix_holds_is_lost_with_its_lease(
    client: redis.Redis, keys: Keys, leader: Leadership, end: str
) -> None:
    held = begin(client, keys)
    keep(client, keys, held, 0, Drawn(5))
    commit(client, keys, held, {1: Drawn(3)})
    told = {0: Drawn(7), 1: Drawn(99)}
    if end == "release":
        assert run(client, scripts.release(keys, held.job, held.token, told))
    elif end == "crash":
        run(client, scripts.crash(keys, held.job, held.token, "w1", "boom", usage=told))
    elif end == "fail":
        call = scripts.fail(
            keys, held.job, held.token, "w1", reason="r", detail="", max_attempts=9, retry_ms=9, usage=told
        )
        assert run(client, call) == "delayed"
    elif end == "reclaim":
        eid = client.hget(keys.group(held.job), "eid")
        client.xclaim(keys.jobs("train"), "workers", "w1", 0, [eid], idle=10**7, justid=True)
        play.in_contact(client, keys)
        assert len(run(client, scripts.reclaim(keys, "train", "me", 900))) == 1
    else:
        assert run(client, scripts.abandon(keys, "train", "w1", [])) == [held.job]
    told_of_two = end in ("release", "crash", "fail")
    lost = {"redrawn": 2} if told_of_two else {}
    assert accounts(client, keys) == {"heard": 8 + 2 * told_of_two, "held": 8, **lost}


@pytest.mark.parametrize("then", [Drawn(0, rewound=10), Drawn(12, lost_turn=10), Drawn(8, behind_stop=2)])
def test_I10_a_prefix_that_was_thrown_away_goes_with_what_it_held(
    client: redis.Redis, keys: Keys, leader: Leadership, then: Drawn
) -> None:
    held = begin(client, keys)
    keep(client, keys, held, 0, Drawn(10))
    run(client, scripts.release(keys, held.job, held.token, {0: Drawn(10)}))
    (again,) = play.lease(client, keys, version=1)
    assert run(client, scripts.release(keys, again.job, again.token, {0: then}))
    thrown = {"rewound": then.rewound, "lost_turn": then.lost_turn, "behind_stop": then.behind_stop}
    booked = {name: tokens for name, tokens in (thrown | {"redrawn": then.live}).items() if tokens}
    assert accounts(client, keys) == {"heard": then.live + then.thrown, **booked}
    assert not client.exists(keys.partial(f"{held.job}/0")), "or the next lease throws it away once more"


def test_I10_a_prefix_that_cannot_be_read_is_an_account(client: redis.Redis, keys: Keys, leader: Leadership) -> None:
    held = begin(client, keys)
    keep(client, keys, held, 0, Drawn(5))
    run(client, scripts.release(keys, held.job, held.token))
    (again,) = play.lease(client, keys, version=1)
    assert not run(client, scripts.unread(keys, held.job, held.token, [0])), "I3"
    for _ in range(2):
        assert run(client, scripts.unread(keys, again.job, again.token, [0, 1]))
    assert not client.exists(keys.partial(f"{again.job}/0"))
    commit(client, keys, again, {0: Drawn(3)})
    assert accounts(client, keys) == {"heard": 8, "held": 3, "unreadable_prefix": 5}


def test_I10_requests_that_nobody_heard_of_are_counted_beside(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    def unheard() -> int:
        return play.drawn_to_train(client, keys).unheard

    held = begin(client, keys, 3)
    told = {0: Drawn(5, unheard=1), 1: Drawn(2)}
    assert run(client, scripts.crash(keys, held.job, held.token, "w1", "boom", usage=told)) == "resume"
    assert unheard() == 1, "told by its worker"
    (again,) = play.lease(client, keys, version=1)
    commit(client, keys, again, {2: Drawn(4)})
    eid = client.hget(keys.group(again.job), "eid")
    client.xclaim(keys.jobs("resume"), "workers", "w1", 0, [eid], idle=10**7, justid=True)
    play.in_contact(client, keys)
    assert len(run(client, scripts.reclaim(keys, "resume", "me", 900))) == 1
    assert unheard() == 3, "a worker that is gone may have been at both that are not committed"
    play.lease(client, keys, version=1)
    run(client, scripts.cancel(keys, again.job, ["actor"]))
    assert unheard() == 5, "nor is it asked from whom its job is taken"
    assert accounts(client, keys) == {"heard": 11, "redrawn": 7, "cancelled": 4}


def test_I10_nobody_is_heard_who_lost_the_lease(client: redis.Redis, keys: Keys, leader: Leadership) -> None:
    late = begin(client, keys)
    run(client, scripts.release(keys, late.job, late.token))
    (held,) = play.lease(client, keys, version=1)
    keep(client, keys, late, 0, Drawn(5))
    assert commit(client, keys, late, {0: Drawn(5)}).outcome == "lost"
    run(client, scripts.crash(keys, late.job, late.token, "w1", "", usage={0: Drawn(9)}))
    assert accounts(client, keys) == {}
    assert commit(client, keys, held, {0: Drawn(4)}).outcome == "ok"
    assert accounts(client, keys) == {"heard": 4, "held": 4}


# --- what becomes of it --------------------------------------------------------------------------------------------


def test_I10_a_batch_is_trained_when_its_groups_are_sealed(client: redis.Redis, keys: Keys, leader: Leadership) -> None:
    job, other = complete(client, keys, leader, 10, 20, 30), complete(client, keys, leader, 7, 7)
    run(client, scripts.keep(keys, leader, [(job, 3)], {job: [2]}))
    assert cut(client, keys, leader, 1, {job: "0:10,1:15", other: ""}) == "cut"
    assert play.commit_batch(client, keys, 1).outcome == "committed"
    assert play.seal(client, keys, leader, [job, other]) == [], "no checkpoint is past it"
    assert accounts(client, keys) == {"heard": 74, "held": 74}
    assert run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=1)) == 1
    assert play.seal(client, keys, leader, [job, other]) == [job, other]
    assert accounts(client, keys) == {"heard": 74, "trained": 25, "masked": 19, "payload_lost": 30}
    run(client, scripts.sweep(keys, leader, [(job, 3), (other, 2)]))
    assert ledger(client, keys).goodput == 25 / 74


def test_I8_I10_a_report_of_a_lost_payload_names_the_commit_that_had_it(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    job = complete(client, keys, leader, 3, 4)
    committed = client.hget(keys.group(job), "s:0")
    assert run(client, scripts.lost(keys, [(job, 0, "of a commit that Redis forgot")])) == []
    assert cut(client, keys, leader, 1, {job: "0:3,1:4"}) == "cut"
    train(client, keys, 1)
    assert committed is not None
    assert run(client, scripts.lost(keys, [(job, 0, committed.decode()), (job, 1, "another")])) == [f"{job}/0"]
    assert run(client, scripts.lost(keys, [(job, 0, committed.decode())])) == []
    run(client, scripts.seal(keys, leader, revision=play.revision(client, keys), subs=["actor"], jobs=[job]))
    assert accounts(client, keys) == {"heard": 7, "trained": 4, "payload_lost": 3}


def test_I10_a_rewind_moves_nothing_because_nothing_is_booked_before(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    job = complete(client, keys, leader, 6)
    cut(client, keys, leader, 1, {job: "0:6"})
    assert play.commit_batch(client, keys, 1).outcome == "committed"
    assert play.rewind(client, keys, 0).outcome == "rewound"
    assert accounts(client, keys) == {"heard": 6, "held": 6}


def test_I10_of_several_uses_the_one_that_trained_most_counts(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    play.subscribe(client, keys, "critic", gb=100)
    run(client, scripts.join(keys, "critic", "owner-2", 60_000))
    job = complete(client, keys, leader, 10, 10)
    cut(client, keys, leader, 1, {job: "0:4,1:9"})
    cut(client, keys, leader, 1, {job: "0:8,1:2"}, sub="critic")
    train(client, keys, 1)
    run(client, scripts.unsubscribe(keys, "critic"))
    assert play.seal(client, keys, leader, [job]) == [job]
    assert accounts(client, keys) == {"heard": 20, "trained": 13, "masked": 7}, "what no checkpoint has does not count"


@pytest.mark.parametrize(("ckpt", "trained", "masked"), [(0, 0, 0), (1, 13, 7), (2, 13, 7), (3, 17, 3)])
def test_I10_of_a_dropped_subscription_each_batch_counts_that_was_durable(
    client: redis.Redis, keys: Keys, leader: Leadership, ckpt: int, trained: int, masked: int
) -> None:
    run(client, scripts.subscribe(keys, "actor", {"reuse": 3}))
    job = complete(client, keys, leader, 10, 10)
    for n, bearing in enumerate(("0:4,1:9", "0:3,1:9", "0:8,1:2"), 1):
        assert cut(client, keys, leader, n, {job: bearing}) == "cut"
        assert play.commit_batch(client, keys, n).outcome == "committed"
    assert run(client, scripts.checkpointed(keys, "actor", owner="owner-1", gen=0, n=ckpt)) == 1
    play.subscribe(client, keys, "critic", lanes="train")
    run(client, scripts.dispose(keys, leader, "critic", Disposal.STALE, [job]))
    run(client, scripts.unsubscribe(keys, "actor"))
    assert play.seal(client, keys, leader, [job], subs=["critic"]) == [job]
    fate = {"trained": trained, "masked": masked, "evicted": 20 - trained - masked}
    assert accounts(client, keys) == {"heard": 20} | {name: tokens for name, tokens in fate.items() if tokens}
    assert play.counter(client, keys, "evicted") == (ckpt == 0), "groups are counted as their tokens are"


def test_I10_what_an_earlier_batch_trained_is_not_evicted_with_the_last(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    run(client, scripts.subscribe(keys, "actor", {"reuse": 2}))
    job = complete(client, keys, leader, 10, 10)
    cut(client, keys, leader, 1, {job: "0:4"})
    train(client, keys, 1)
    cut(client, keys, leader, 2, {job: "0:10,1:10"})
    assert play.commit_batch(client, keys, 2).outcome == "committed"
    call = scripts.seal(keys, leader, revision=play.revision(client, keys), subs=["actor"], jobs=[job], evict=["actor"])
    assert run(client, call) == [job]
    assert accounts(client, keys) == {"heard": 20, "trained": 4, "masked": 16}
    assert (client.hget(keys.group(job), "r"), play.counter(client, keys, "evicted")) == (b"retired", 0)


@pytest.mark.parametrize("reason", list(Disposal))
def test_I10_what_is_given_up_says_why(client: redis.Redis, keys: Keys, leader: Leadership, reason: Disposal) -> None:
    job = complete(client, keys, leader, 3, 4)
    if reason is Disposal.FILTERED:
        run(client, scripts.judge(keys, leader, "actor", [scripts.Judged(job, "zero_std", False, 2, 0.0)]))
    else:
        run(client, scripts.dispose(keys, leader, "actor", reason, [job]))
    assert play.seal(client, keys, leader, [job]) == [job]
    account = {Disposal.FILTERED: "filtered:zero_std", Disposal.PAYLOAD_LOST: "payload_lost"}
    assert accounts(client, keys) == {"heard": 7, account.get(reason, f"dropped:{reason}"): 7}


def test_I10_what_is_buried_comes_back_when_it_is_dug_up(client: redis.Redis, keys: Keys, leader: Leadership) -> None:
    held = begin(client, keys, 3)
    keep(client, keys, held, 0, Drawn(5))
    commit(client, keys, held, {1: Drawn(3)})
    call = scripts.fail(
        keys, held.job, held.token, "w1", reason="r", detail="", max_attempts=0, retry_ms=1, usage={0: Drawn(6)}
    )
    assert run(client, call) == "dead"
    assert accounts(client, keys) == {"heard": 9, "buried": 9}
    assert run(client, scripts.requeue(keys, held.job, play.MODEL))
    assert accounts(client, keys) == {"heard": 9, "held": 8, "buried": 1}
    (again,) = play.lease(client, keys, version=1)
    commit(client, keys, again, {0: Drawn(6), 2: Drawn(1)})
    run(client, scripts.cancel(keys, held.job, ["actor"]))
    assert accounts(client, keys) == {"heard": 11, "buried": 1, "cancelled": 10}


@pytest.mark.parametrize("end", ["cancel", "drop", "shorten", "purge"])
def test_I10_what_is_taken_from_a_worker_is_booked(
    client: redis.Redis, keys: Keys, leader: Leadership, end: str
) -> None:
    held = begin(client, keys, 3)
    keep(client, keys, held, 0, Drawn(5, behind_stop=1))
    commit(client, keys, held, {1: Drawn(3)})
    if end == "cancel":
        run(client, scripts.cancel(keys, held.job, ["actor"]))
    elif end == "drop":
        run(client, scripts.drop(keys, leader, held.job))
    elif end == "shorten":
        assert run(client, scripts.shorten(keys, leader, held.job)) == 1
    else:
        run(client, scripts.fail(keys, held.job, held.token, "w", reason="r", detail="", max_attempts=0, retry_ms=1))
        run(client, scripts.cancel(keys, held.job, ["actor"], only="dead"))
    booked = {
        "cancel": {"cancelled": 8},
        "drop": {"dropped:timed_out": 8},
        "shorten": {"short_group": 5, "held": 3},
        "purge": {"buried": 8},
    }
    assert accounts(client, keys) == {"heard": 9, "behind_stop": 1, **booked[end]}


def test_I10_an_answer_that_is_given_was_not_drawn(client: redis.Redis, keys: Keys, leader: Leadership) -> None:
    held = begin(client, keys)
    given = replace(play.meta(0, held.token, 1), status="given")
    records = [(0, 1, given.to_bytes()), (1, 1, play.meta(1, held.token, 1).to_bytes())]
    run(client, scripts.commit(keys, held.job, held.token, records))
    assert accounts(client, keys) == {"heard": 2, "held": 2}


# --- a long play of workers, told of by an account of its own ------------------------------------------------------


class RecordedEngine:
    """Workers that draw, keep, hand back, crash, lie late and say things twice; what was heard is counted beside."""

    def __init__(self, client: redis.Redis, keys: Keys, leader: Leadership, seed: int) -> None:
        self.client, self.keys, self.leader, self.random = client, keys, leader, random.Random(seed)
        self.leases: list[RawLease] = []
        #: Of each lease and k: what it has drawn; of each job and k: what its prefix holds.
        self.drawn: dict[tuple[str, int], Drawn] = {}
        self.prefix: Counter[tuple[str, int]] = Counter()
        #: Of each lease and k: what was thrown away by starting over before its prefix was kept.
        self.before: Counter[tuple[str, int]] = Counter()
        #: Tokens that a lease told of, by lease and k, those of the prefix that it found apart.
        self.heard: dict[tuple[str, int], int] = {}
        self.found: dict[tuple[str, int], int] = {}
        self.happened: Counter[str] = Counter()

    def act(self) -> None:
        acts: list[Callable[[], object]] = [
            self.lease, self.commit, self.commit, self.keep, self.keep, self.end, self.reclaim, self.bury, self.dig,
            self.close, self.seal,
        ]  # fmt: skip
        self.random.choice(acts)()

    def lease(self) -> None:
        at = int(self.client.hget(self.keys.source, "train") or 0)
        play.admit(self.client, self.keys, [play.job(at, 3)])
        run(self.client, scripts.due(self.keys))
        for held in play.lease(self.client, self.keys, most=2, version=1):
            self.leases.append(held)
            for k in range(3):
                base = self.prefix[held.job, k]
                self.found[held.token, k] = base
                if base and self.random.random() < 0.2:
                    run(self.client, scripts.unread(self.keys, held.job, held.token, [k]))
                    self.prefix[held.job, k] = base = self.found[held.token, k] = 0
                self.drawn[held.token, k] = Drawn(base)

    def pick(self) -> tuple[RawLease, int, Drawn] | None:
        """A lease, mostly one of the last, and what it has drawn of a sample by now."""
        if not self.leases:
            return None
        held = self.random.choice(self.leases[-6:] if self.random.random() < 0.9 else self.leases)
        k = self.random.randrange(3)
        one = self.drawn[held.token, k]
        lost = self.random.choice(["", "", "behind_stop", "rewound", "lost_turn"])
        if lost and one.live:
            setattr(one, lost, getattr(one, lost) + one.live)
            one.live = 0
        one.live += self.random.randrange(6)
        return held, k, one

    def hear(self, held: RawLease, k: int) -> None:
        one = self.drawn[held.token, k]
        self.heard[held.token, k] = one.live + one.thrown - self.found[held.token, k]

    def keep(self) -> None:
        if (picked := self.pick()) is None:
            return
        held, k, one = picked
        call = scripts.checkpoint(self.keys, held.job, held.token, k, b"prefix", 60, one)
        for _ in range(self.random.randint(1, 2)):
            kept = run(self.client, call)
        if kept and not self.client.hexists(self.keys.group(held.job), f"s:{k}"):
            self.hear(held, k)
            self.prefix[held.job, k] = one.live
            self.before[held.token, k] = one.rewound + one.lost_turn

    def commit(self) -> None:
        if (picked := self.pick()) is None:
            return
        held, k, one = picked
        for _ in range(self.random.randint(1, 2)):
            done = commit(self.client, self.keys, held, {k: one})
            if done.new:
                self.hear(held, k)
                self.prefix[held.job, k] = 0
                self.happened["committed"] += 1

    def end(self) -> None:
        if (picked := self.pick()) is None:
            return
        held, _, _ = picked
        told = {k: self.drawn[held.token, k] for k in range(3)}
        call: Call[object] = self.random.choice([
            scripts.release(self.keys, held.job, held.token, told),
            scripts.crash(self.keys, held.job, held.token, "w", "boom", usage=told),
            scripts.fail(self.keys, held.job, held.token, "w", reason="r", detail="", retry_ms=0,
                         max_attempts=self.random.randint(0, 3), usage=told),
        ])  # fmt: skip
        committed = [k for k in range(3) if self.client.hexists(self.keys.group(held.job), f"s:{k}")]
        if run(self.client, call) not in (False, "lost"):
            for k in set(range(3)) - set(committed):
                self.hear(held, k)
                one, prefix = self.drawn[held.token, k], self.prefix[held.job, k]
                if one.live < prefix or one.rewound + one.lost_turn > self.before[held.token, k]:
                    self.prefix[held.job, k] = 0
            self.happened["ended"] += 1

    def reclaim(self) -> None:
        for lane in LANES:
            for entry in self.client.xpending_range(self.keys.jobs(lane), "workers", "-", "+", 1):
                eid = entry["message_id"]
                self.client.xclaim(self.keys.jobs(lane), "workers", "w1", 0, [eid], idle=10**7, justid=True)
                play.in_contact(self.client, self.keys)
                run(self.client, scripts.reclaim(self.keys, lane, "me", 900))
                self.happened["reclaimed"] += 1
                return

    def bury(self) -> None:
        if self.leases:
            held = self.random.choice(self.leases)
            run(self.client, scripts.cancel(self.keys, held.job, ["actor"], only=self.random.choice(["", "dead"])))

    def dig(self) -> None:
        for held in self.random.sample(self.leases, min(5, len(self.leases))):
            self.happened["dug up"] += run(self.client, scripts.requeue(self.keys, held.job, play.MODEL))

    def close(self) -> None:
        if self.leases:
            held = self.random.choice(self.leases)
            ends = (scripts.shorten(self.keys, self.leader, held.job), scripts.drop(self.keys, self.leader, held.job))
            run(self.client, self.random.choice(ends))

    def seal(self) -> None:
        ready = [job.decode() for job in self.client.zrange(self.keys.ready, 0, 0)]
        if ready:
            run(self.client, scripts.dispose(self.keys, self.leader, "actor", Disposal.STALE, ready))
            play.seal(self.client, self.keys, self.leader, ready)
            self.happened["sealed"] += 1


@pytest.mark.parametrize("seed", range(2))
def test_I10_holds_at_every_instant_of_a_long_random_play(
    client: redis.Redis, keys: Keys, leader: Leadership, seed: int
) -> None:
    game = RecordedEngine(client, keys, leader, seed)
    for turn in range(400):
        game.act()
        fields, held = run(client, scripts.recount_tokens(keys))
        told = fields.get("train:heard", 0)
        assert min(fields.values(), default=0) >= 0, "no account is below zero"
        assert told - sum(fields.values()) + told == held.get("train", 0), "heard = accounts + held"
        assert told == sum(game.heard.values()), "each token told of is heard once"
        if turn % 100 == 0:
            ledger(client, keys)
    assert min(game.happened[what] for what in ("committed", "ended", "reclaimed", "dug up", "sealed")) > 0


# --- an audit that can fail ----------------------------------------------------------------------------------------


def broken(call: Call[object], old: str, new: str) -> Call[object]:
    """The call of a verb with a defect in it."""
    assert call.script.text.count(old) == 1
    text = call.script.text.replace(old, new)
    return replace(call, script=Script(call.script.name, text, hashlib.sha1(text.encode()).hexdigest()))


def test_I10_a_drop_that_is_not_booked_turns_the_audit_red(client: redis.Redis, keys: Keys, leader: Leadership) -> None:
    job = complete(client, keys, leader, 3, 4)
    run(client, scripts.dispose(keys, leader, "actor", Disposal.STALE, [job]))
    call = scripts.seal(keys, leader, revision=play.revision(client, keys), subs=["actor"], jobs=[job])
    run(client, broken(call, "  spend(prefix, key, account, parts, held)\n", ""))
    assert audit(client, keys).differences == [
        "tokens: of 7 reported in lane train, 0 are in accounts, 0 in groups: 7 are missing"
    ]


def test_I10_a_retry_that_is_booked_twice_turns_the_audit_red(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    held = begin(client, keys)
    call = scripts.commit(keys, held.job, held.token, [(0, 1, play.meta(0, held.token, 1).to_bytes())])
    defect = broken(call, "again = again + 1\n    elseif", "again = again + 1\n      heard = heard + 2\n    elseif")
    defect = broken(defect, "  book(prefix, g[5], 'heard', heard)\n", "")
    defect = broken(defect, "if taken > 0 then", "book(prefix, g[5], 'heard', heard)\nif taken > 0 then")
    assert [run(client, defect).new for _ in range(2)] == [1, 0]  # type: ignore[attr-defined]
    assert audit(client, keys).differences == [
        "tokens: of 4 reported in lane train, 0 are in accounts, 2 in groups: 2 are missing"
    ]


def test_I10_a_sample_whose_tokens_are_not_booked_turns_the_audit_red(
    client: redis.Redis, keys: Keys, leader: Leadership
) -> None:
    held = begin(client, keys)
    record = play.meta(0, held.token, 1).to_bytes()
    run(client, scripts.commit(keys, held.job, held.token, [(0, 1, record)], {0: Drawn(1)}))
    assert audit(client, keys).differences == [f"group {held.job}: its samples have 2 tokens, its account 1"]
