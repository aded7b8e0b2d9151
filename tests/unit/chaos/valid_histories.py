"""Random histories of a run in which every promise is kept, by seed: what the checker must find nothing in.

A little run in memory: jobs are admitted, leased and committed, batches cut, trained and committed, weights published;
workers and trainers die at any of it, so that some calls have no end, and trainers go back to their checkpoints.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.recording.account import Account, from_json
from tests.chaos.recording.history import History, operations_of

MODEL = "m"
BOUND = 3
RANKS = 2
#: Groups of a version, and places at the gate.
GROUPS = 10
#: Tokens that may be generated in a turn, and those that are in every sample.
BUDGET, DRAWN = 8, 6
PLACES = (1 + BOUND) * GROUPS


def law(version: int, tokens: Sequence[int], position: int) -> float:
    """Log-probability of one of 8 tokens, another one for every version and position."""
    return math.log(1 / (2 + (version * 31 + position * 7 + tokens[position]) % 97))


@dataclass
class Sub:
    """One subscription and its trainer."""

    name: str
    lane: str
    pool: str = ""
    driving: bool = False
    gen: int = 1
    start: int = 0
    cut: int = 0
    cursor: int = 0
    checkpoint: int = 0
    batches: dict[int, dict[str, Any]] = field(default_factory=dict)

    def process(self, rank: int) -> str:
        return f"{self.name}-{rank}-{self.start}"


@dataclass
class Job:
    """One job and what has become of it."""

    lane: str
    n: int
    state: str = "queued"
    token: str = ""
    worker: str = ""
    attempts: int = 0
    #: Version at its admission.
    required: int = 0
    samples: dict[str, str] = field(default_factory=dict)
    #: Loss tokens and reward of each sample.
    scores: dict[str, tuple[int, float]] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    used: bool = False
    batch: tuple[str, int] | None = None


class Play:
    """One history; ``records`` by process and ``account()`` are what a real run would leave."""

    def __init__(self, seed: int, turns: int = 400) -> None:
        self.rng = random.Random(seed)
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.jobs: dict[str, Job] = {}
        self.done: list[str] = []
        #: Those of them, as they were.
        self.ended: dict[str, Job] = {}
        self.subs = [Sub("actor", "train", driving=True), Sub("left", "pooled", "p"), Sub("right", "pooled", "p")]
        self.clock = 0
        self.ageless: set[int] = set()
        self.publications: list[tuple[int, int]] = []
        self.workers = {"w0": 0, "w1": 0}
        self.memory: list[dict[str, int]] = []
        self._now = self._next = self._admitted = 0
        #: Of the leader; and groups of lane train that nobody consumed or gave up.
        self.epoch = 1
        self._stock: set[str] = set()
        self._subscribe()
        self.record("recorder", "record", {}, {"epoch": 1})
        acts = [self.admit] * 3 + [self.lease] * 4 + [self.commit] * 6 + [self.cut_one, self.train_one] * 3
        acts += [self.publish, self.checkpoint, self.retire, self.give_up, self.kill_worker, self.kill_trainer]
        acts += [self.fail, self.kill_leader, self.grant]
        for turn in range(turns):
            self.rng.choice(acts)()
            if turn % max(1, turns // 30) == 0:
                self.memory.append(
                    {"done": len(self.done), "live": len(self.jobs), "bytes": 10**6 + 99 * len(self.jobs)}
                )

    def record(
        self, process: str, op: str, facts: dict[str, Any], answer: dict[str, Any] | None, outcome: str = "yes"
    ) -> None:
        """A call of ``process``, and its end, where ``answer`` is not None."""
        lines = self.records.setdefault(process, [])
        self._append(lines, {"op": op, "facts": facts})
        if answer is not None:
            self._append(lines, {"of": len(lines), "outcome": outcome, "facts": answer})

    def _append(self, lines: list[dict[str, Any]], record: dict[str, Any], took: int = 0) -> None:
        self._now += took or self.rng.randint(1, 9)
        lines.append({"seq": len(lines) + 1, "mono": self._now, "wall": self._now} | record)

    def history(self) -> History:
        return History(one for name, lines in self.records.items() for one in operations_of(name, lines))

    def account(self) -> Account:
        jobs = {
            name: {"state": job.state, "lane": job.lane, "worker": job.worker, "samples": dict(job.samples)}
            for name, job in self.jobs.items()
        }
        subscriptions = {
            sub.name: {
                "lanes": [sub.lane], "bound": BOUND, "reuse": 1, "pool": sub.pool,
                "cut": sub.cut, "cursor": sub.cursor, "checkpoint": sub.checkpoint,
            }
            for sub in self.subs
        }  # fmt: skip
        keys = {"counters": -1, "clock": -1, **{f"sub:{sub.name}": -1 for sub in self.subs}}
        for name, job in self.jobs.items():
            keys |= {f"group:{name}": -1} | {f"payload:{name}/{k}:{token}": -1 for k, token in job.samples.items()}
        return from_json(
            {
                "jobs": jobs, "done": list(self.done), "subscriptions": subscriptions, "clock": {MODEL: self.clock},
                "workers": [f"{name}.{start}" for name, start in self.workers.items()],
                "keys": keys | {"payload:gone/0:t": 60}, "memory": self.memory,
                "rows": self._rows(),
                "tokens": {"train:heard": 90, "train:trained": 60}, "drawn": 100, "unheard": 1,
            }
        )  # fmt: skip

    def _rows(self) -> list[tuple[str, int, str]]:
        """Of each job that is done: its samples, or itself."""
        return [(job, int(k), "trained" if self.ended[job].used else "dropped") for job in self.done
                for k in self.ended[job].samples or [-1]]  # fmt: skip

    def _fate(self) -> tuple[bool, bool]:
        """(it happens, it is acknowledged): a reply is lost now and then, and a call that never came."""
        roll = self.rng.random()
        return roll < 0.97, roll < 0.94

    def admit(self) -> None:
        lane = self.rng.choice(["train", "train", "pooled"])
        names = [f"d/0/{self._admitted + i}" for i in range(self.rng.randint(1, 3))]
        if lane == "train" and len(self._stock) + len(names) > PLACES:
            return
        self._admitted += len(names)
        happens, told = self._fate()
        asked = [[name, self.rng.randint(1, 3)] for name in names]
        if happens:
            self.jobs |= {name: Job(lane, n, required=self.clock) for name, n in asked}
            self._stock |= set(names) if lane == "train" else set()
        self.record("producer", "admit", {"lane": lane, "jobs": asked}, {"jobs": names} if told else None)
        if self.rng.random() < 0.05:
            self.record("producer", "admit", {"lane": lane, "jobs": [["never/0/1", 1]]}, {"why": "closed"}, "no")

    def _pick(self, state: str) -> str | None:
        found = [name for name, job in self.jobs.items() if job.state == state]
        return self.rng.choice(found) if found else None

    def lease(self) -> None:
        name = self._pick("queued")
        if name is None:
            return
        worker = self.rng.choice(list(self.workers))
        self._next += 1
        token, process = f"t{self._next}", f"{worker}.{self.workers[worker]}"
        self.jobs[name].state, self.jobs[name].token, self.jobs[name].worker = "leased", token, process
        _, told = self._fate()
        self.record(process, "sampling", {"job": name}, {"max_new_tokens": BUDGET})
        facts = {"worker": process, "version": self.clock, "highest": self.clock}
        self.record(process, "lease", facts, {"jobs": [[name, token, self.jobs[name].attempts]]} if told else None)

    def _subscribe(self) -> None:
        facts = {"driving": "1", "unit": "groups", "share": "", "bound": str(BOUND), "gb": str(GROUPS), "over": "0"}
        facts |= {"lanes": "train"}
        self.record("actor-0-0", "subscribe", facts | {"sub": "actor"}, {})

    def grant(self) -> None:
        self.record("buffer", "grant", {"sub": "actor", "groups": 1}, {"owed": 0}, "no")

    def kill_leader(self) -> None:
        self.epoch += 1

    def fail(self) -> None:
        name = self._pick("leased")
        if name is None or self.rng.random() < 0.5:
            return
        job = self.jobs[name]
        happens, told = self._fate()
        facts = {"job": name, "token": job.token, "reason": "reward_raised"}
        self.record(job.worker, "fail", facts, {"where": "delayed"} if told else None)
        if happens:
            job.state, job.token, job.worker, job.attempts = "queued", "", "", job.attempts + 1

    def commit(self) -> None:
        name = self._pick("leased")
        if name is None:
            return
        job = self.jobs[name]
        left = [k for k in range(job.n) if str(k) not in job.samples]
        ks = self.rng.sample(left, self.rng.randint(1, len(left)))
        drawn = [self._draw(name, k, job.worker) for k in ks]
        samples = [[k, sorted(set(versions))] for k, versions in zip(ks, drawn, strict=True)]
        happens, told = self._fate()
        facts = {"job": name, "token": job.token, "samples": samples, "servers": ["control"] * len(samples)}
        facts["loss"] = [[[one, versions.count(one)] for one in sorted(set(versions))] for versions in drawn]
        facts["generated"] = [[DRAWN, 1] for _ in samples]
        counts = {"new": len(ks), "again": 0, "taken": 0}
        self.record(job.worker, "commit", facts, counts if told else None)
        if not happens:
            return
        for k, versions in samples:
            job.samples[str(k)] = job.token
            job.scores[str(k)] = DRAWN, self.rng.random()
            job.versions |= set(versions)
        if len(job.samples) == job.n:
            job.state, job.worker = "ready", ""

    def _draw(self, name: str, k: int, worker: str) -> list[int]:
        """Versions of a sample's tokens, which its worker tells."""
        required = self.jobs[name].required
        living = [version for version, _ in self.publications[-2:] if version >= required] or [self.clock]
        versions = sorted(self.rng.choices([*living, self.clock], k=DRAWN))
        tokens = [self.rng.randrange(8) for _ in versions]
        sample = f"{name}/{k}"
        logprobs = [law(version, tokens, at) for at, version in enumerate(versions)]
        facts = {"sample": sample, "tokens": tokens, "versions": versions, "logprobs": logprobs}
        self.record(worker, "told", facts, {})
        return versions

    def kill_worker(self) -> None:
        worker = self.rng.choice(list(self.workers))
        process = f"{worker}.{self.workers[worker]}"
        self.workers[worker] += 1
        for job in self.jobs.values():
            if job.state == "leased" and job.worker == process:
                job.state, job.token, job.worker = "queued", "", ""

    def _staleness(self, oldest: int) -> int:
        return sum(version not in self.ageless for version in range(oldest + 1, self.clock + 1))

    def _usable(self, sub: Sub) -> list[str]:
        return [
            name for name, job in self.jobs.items() if job.state == "ready" and job.lane == sub.lane and not job.used
        ]

    def cut_one(self) -> None:
        sub = self.rng.choice(self.subs)
        jobs = [name for name in self._usable(sub) if self._staleness(min(self.jobs[name].versions)) <= BOUND][:4]
        # What drives the clock publishes for what was cut before (T2).
        if not jobs or sub.cut > sub.cursor + (not sub.driving):
            return
        n, digest = sub.cut + 1, f"{sub.name}{self._now}"
        rows = [[name, int(k), token] for name in jobs for k, token in self.jobs[name].samples.items()]
        facts = {"sub": sub.name, "n": n, "digest": digest, "model": MODEL, "jobs": jobs, "rows": rows}
        facts |= {
            "train_version": self.clock,
            "bound": BOUND,
            "mask_below": -1,
            "mask_offpolicy": False,
            "epoch": self.epoch,
            "mode": "async",
            "on_expiry": "mask",
            "mask_truncated": False,
        }
        facts |= self._scored(jobs)
        happens, told = self._fate()
        self.record("buffer", "cut", facts, {"said": "cut"} if told else None)
        if not happens:
            return
        sub.cut, sub.batches[n] = n, facts
        for name in jobs:
            self.jobs[name].used, self.jobs[name].batch = True, (sub.name, n)

    def _scored(self, jobs: list[str]) -> dict[str, Any]:
        about = {"masked": False, "lost": False, "newest": self.clock, "status": "ok"}
        scored = [
            [name, int(k), num_loss, about | {"reward": reward}]
            for name in jobs
            for k, (num_loss, reward) in self.jobs[name].scores.items()
        ]
        counts = {"loss_tokens": DRAWN * len(scored), "samples": len(scored), "groups": len(jobs)}
        return {"scored": scored, "counts": counts}

    def _hand_out(self, process: str, batch: dict[str, Any], own: list[list[Any]]) -> None:
        """What a rank is handed beside its samples: the counts of the batch, and their rewards and advantages."""
        of_batch = {name: batch[name] for name in ("sub", "n", "digest")}
        counts = batch["counts"] | {"loss_samples": len(batch["scored"])}
        self.record(process, "counts", of_batch | {"role": "", "rank": 0, "counts": counts}, {})
        rewards = {(job, k): about["reward"] for job, k, _, about in batch["scored"]}
        for job, k in own:
            group = [reward for (other, _), reward in rewards.items() if other == job]
            deviation = statistics.stdev(group) if len(group) > 1 else 0.0
            advantage = (rewards[job, k] - statistics.mean(group)) / (deviation + 1e-6)
            facts = {"sample": f"{job}/{k}", "tokens": [], "versions": [], "logprobs": []}
            self.record(process, "told", facts | of_batch | {"reward": rewards[job, k], "advantage": advantage}, {})

    def train_one(self) -> None:
        sub = self.rng.choice(self.subs)
        if sub.cursor == sub.cut:
            return None
        n = sub.cursor + 1
        batch = sub.batches[n]
        for rank in range(RANKS):
            own = [row[:2] for row in batch["rows"][rank::RANKS]]
            who = self._seat(sub, rank)
            facts = who | {"n": n, "digest": batch["digest"], "jobs": batch["jobs"], "rows": own}
            self.record(sub.process(rank), "deliver", facts, {})
            self._hand_out(sub.process(rank), batch, own)
            if self.rng.random() < 0.03:  # killed on the way: it comes again after a restore
                return self._restart(sub)
            self.record(sub.process(rank), "train", facts, {})
            if self.rng.random() < 0.03:
                return self._restart(sub)
        sub.cursor = n
        for rank in range(RANKS):
            said = {"said": "committed" if rank == RANKS - 1 else "waiting"}
            facts = {"sub": sub.name, "gen": sub.gen, "n": n, "digest": batch["digest"], "rank": rank, "role": ""}
            facts |= {"owner": f"{sub.name}.{sub.start}", "ranks": RANKS}
            self.record(sub.process(rank), "commit_batch", facts, said)
        return None

    def _seat(self, sub: Sub, rank: int) -> dict[str, Any]:
        owner = f"{sub.name}.{sub.start}"
        return {
            "sub": sub.name,
            "role": "",
            "rank": rank,
            "share": rank,
            "shares": RANKS,
            "gen": sub.gen,
            "owner": owner,
        }

    def publish(self) -> None:
        sub = self.subs[0]
        if sub.cut == sub.cursor > (self.publications[-1][1] if self.publications else -1):
            self._announce(sub, f"weights {sub.start} {self._now}")

    def _announce(self, sub: Sub, weights: str) -> None:
        self.clock += 1
        self.publications.append((self.clock, sub.cursor))
        self._stock -= {job for n, cut in sub.batches.items() if n <= sub.cursor for job in cut["jobs"]}
        facts = {"sub": sub.name, "gen": sub.gen, "model": MODEL, "version": self.clock, "through": sub.cursor}
        facts |= {"rev": 0, "weights": weights}
        _, told = self._fate()
        self.record(sub.process(0), "publish", facts, {"clock": self.clock} if told else None)
        for worker, start in self.workers.items():
            self.record(f"{worker}.{start}", "load", {"model": MODEL, "version": self.clock, "weights": weights}, {})
        if self.clock % 2:  # its folder came behind it
            told_of = {"sub": sub.name, "gen": sub.gen, "model": MODEL, "version": self.clock, "weights": weights}
            lines = self.records[sub.process(0)]
            self._append(lines, {"op": "whole", "facts": told_of}, took=1)
            self._append(lines, {"of": len(lines), "outcome": "yes", "facts": {"said": "whole"}}, took=1)

    def checkpoint(self) -> None:
        sub = self.rng.choice(self.subs)
        if sub.cursor > sub.checkpoint:
            sub.checkpoint = sub.cursor
            facts = {"sub": sub.name, "gen": sub.gen, "n": sub.cursor, "role": ""}
            self.record(sub.process(0), "checkpoint", facts, {})

    def kill_trainer(self) -> None:
        if self.rng.random() < 0.3:
            self._restart(self.rng.choice(self.subs))

    def _restart(self, sub: Sub) -> None:
        """A new trainer goes back to the checkpoint; what was published since is abandoned."""
        sub.start += 1
        n = sub.checkpoint
        facts = {"sub": sub.name, "gen": sub.gen, "n": n, "model": MODEL if sub.driving else ""}
        self.record(sub.process(0), "rewind", facts, {"gen": sub.gen + 1})
        sub.gen, sub.cursor = sub.gen + 1, n
        for rank in range(RANKS):
            self.record(sub.process(rank), "restore", self._seat(sub, rank) | {"n": n}, {})
        if sub.driving:
            self._go_back(sub, n)

    def _go_back(self, sub: Sub, n: int) -> None:
        while self.publications and self.publications[-1][1] > n:
            self.publications.pop()
        restored, through = self.publications[-1] if self.publications else (0, -1)
        abandoned = set(range(restored + 1, self.clock + 1))
        self.ageless |= abandoned
        if through == n:
            self.ageless.add(self.clock + 1)
        drawn = [name for name, job in self.jobs.items() if job.versions & abandoned and not job.used]
        for name in drawn:
            self._dispose(name, "rewound")
        self._announce(sub, f"restored {self._now}")

    def give_up(self) -> None:
        for name, job in list(self.jobs.items()):
            if job.state == "ready" and not job.used and self._staleness(min(job.versions)) > BOUND:
                self._dispose(name, "stale")

    def _dispose(self, name: str, reason: str) -> None:
        sub = next(sub for sub in self.subs if sub.lane == self.jobs[name].lane)
        facts = {"sub": sub.name, "reason": reason, "jobs": [name], "epoch": self.epoch}
        self.record("buffer", "dispose", facts, {"count": 1})
        self._stock.discard(name)
        self.ended[name] = self.jobs.pop(name)
        self.done.append(name)

    def retire(self) -> None:
        checkpoints = {sub.name: sub.checkpoint for sub in self.subs}
        past = [name for name, job in self.jobs.items() if job.batch and job.batch[1] <= checkpoints[job.batch[0]]]
        for name in past:
            self.ended[name] = self.jobs.pop(name)
        self.record("recorder", "recorded", {"epoch": 1, "jobs": past}, {"count": len(past)})
        self.done += past
