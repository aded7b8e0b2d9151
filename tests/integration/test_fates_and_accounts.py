"""The rows of the history and the ledger of tokens say the same of a group, in whatever order its ends come (I10)."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import redis

from penstock.consumers.history.retired import read_retired
from penstock.consumers.history.rows import fate_of, uses_of_sample
from penstock.history.row import Fate
from penstock.protocol import scripts
from penstock.protocol.scripts import Judged, Leadership, run
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.records.sample import Drawn
from penstock.redis.call import Call
from tests.integration import play

#: Two samples of these many drawn tokens.
DRAWN = {0: 2, 1: 3}
SUBS = ("actor", "critic")


class Play:
    """A run with a history, and a group that two subscriptions want: `actor` would train it, `critic` mask it."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self.keys = client, keys
        for sub in SUBS:
            play.subscribe(client, keys, sub, gb=100, driving=int(sub == "actor"))
            play.join(client, keys, sub=sub)
        play.publish(client, keys, 1, 0)
        run(client, scripts.record(keys, "recorder", lease_ms=60_000, backlog=9, patience_ms=60_000))
        self.leader: Leadership = play.lead(client, keys)
        play.admit(client, keys, [play.job(0)])
        (held,) = play.lease(client, keys, version=1)
        self.job = held.job
        records = [
            (k, 1, replace(play.meta(k, held.token, 1), num_generated=n, loss_by_version=[[1, n]]).to_bytes())
            for k, n in DRAWN.items()
        ]
        run(client, scripts.commit(keys, held.job, held.token, records, {k: Drawn(n) for k, n in DRAWN.items()}))
        play.keep(client, keys, self.leader, [self.job])

    def acts(self) -> dict[str, Callable[[], object]]:
        """What may become of it, each refused where it cannot be."""
        return {
            "cut": lambda: self._cut("actor", "0:2,1:3", "1:-1:0:"),
            "train": lambda: self._train("actor"),
            "leave": lambda: run(self.client, scripts.unsubscribe(self.keys, "actor")),
            "critic cuts": lambda: self._cut("critic", "", "1:9:0:"),
            "critic trains": lambda: self._train("critic"),
            "critic filters": lambda: self._give_up(
                scripts.judge(self.keys, self.leader, "critic", [Judged(self.job, "easy", False, 2, 0.0)])
            ),
            "critic gives up": lambda: self._give_up(
                scripts.dispose(self.keys, self.leader, "critic", Disposal.STALE, [self.job])
            ),
            "critic leaves": lambda: run(self.client, scripts.unsubscribe(self.keys, "critic")),
            "cancel": lambda: run(self.client, scripts.cancel(self.keys, self.job, self._there())),
            "seal": lambda: play.seal(self.client, self.keys, self.leader, [self.job], self._there()),
            "evict": lambda: self._evict(),
        }

    def _there(self) -> list[str]:
        return [sub for sub in SUBS if self.client.hexists(self.keys.subs, f"sub:{sub}")]

    def _cut(self, sub: str, bearing: str, of_use: str) -> None:
        data = play.manifest(1, sub)
        call = scripts.cut(
            self.keys, self.leader, sub, revision=play.revision(self.client, self.keys), n=1, manifest=data,
            digest=Manifest.digest(data), consumes=1, model="", version=0, oldest_allowed=-1, jobs=[self.job],
            bearing=[bearing], of_use=of_use,
        )  # fmt: skip
        if sub in self._there():
            run(self.client, call)

    def _train(self, sub: str) -> None:
        digest = Manifest.digest(play.manifest(1, sub))
        commit = scripts.commit_batch(self.keys, sub, owner="owner-1", gen=0, n=1, digest=digest, rank=0, ranks=1)
        run(self.client, commit)
        run(self.client, scripts.checkpointed(self.keys, sub, owner="owner-1", gen=0, n=1))

    def _give_up(self, call: Call[int]) -> None:
        if "critic" in self._there():
            run(self.client, call)

    def _evict(self) -> None:
        there = self._there()
        revision = play.revision(self.client, self.keys)
        call = scripts.seal(self.keys, self.leader, revision=revision, subs=there, jobs=[self.job], evict=there)
        run(self.client, call)

    def accounts(self) -> dict[str, int]:
        found = play.drawn_to_train(self.client, self.keys)
        return {name: tokens for name, tokens in found.accounts.items() if tokens}

    def by_rows(self) -> dict[str, int]:
        """Tokens of its samples by the fates of their rows, in the names of the ledger."""
        (group,) = read_retired(self.client, self.keys, [self.job])
        found: Counter[str] = Counter()
        for meta in group.samples:
            fate, reason = fate_of(group, meta, uses_of_sample(group, meta))
            name = f"{fate}:{reason}" if fate in (Fate.FILTERED, Fate.DROPPED) else str(fate)
            found[name.replace("dropped:unused", "dropped:unwanted")] += DRAWN[meta.k]
        return dict(found)


#: That lead to each end, the last of them where a batch that bore loss was not durable, and one that bore none was.
LEADING = (
    ("cut", "train", "critic leaves"),
    ("cut", "train", "critic filters"),
    ("critic cuts", "critic trains", "leave"),
    ("cut", "critic cuts", "critic trains", "leave"),
)


def orders() -> Iterator[Sequence[str]]:
    """All ways to two acts, and some to six."""
    yield from LEADING
    acts = [
        "cut", "train", "leave", "critic cuts", "critic trains", "critic filters", "critic gives up", "critic leaves",
        "cancel",
    ]  # fmt: skip
    chance = random.Random(13)
    for count in range(3):
        yield from itertools.permutations(acts, count)
    for _ in range(60):
        yield chance.sample(acts, chance.randint(3, 6))


@pytest.mark.parametrize("last", ["cancel", "seal", "evict"])
def test_I10_rows_and_accounts_agree_in_every_order(client: redis.Redis, keys: Keys, last: str) -> None:
    wrong = {}
    ends: Counter[str] = Counter()
    for order in orders():
        client.flushall()
        scripts.ensure_lanes(client, keys)
        one = Play(client, keys)
        acts = one.acts()
        for act in (*order, last):
            acts[act]()
        if play.state(client, keys, one.job) != "retiring":
            continue
        accounts, rows = one.accounts(), one.by_rows()
        ends.update(accounts)
        if accounts != rows:
            wrong[", ".join(order)] = (accounts, rows)
    assert not wrong, "\n".join(f"{order}: {accounts} and {rows}" for order, (accounts, rows) in wrong.items())
    assert {"trained", "masked"} <= ends.keys(), "else it has shown little"
