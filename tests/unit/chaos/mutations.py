"""Valid histories broken in one way each, by the property that no longer holds."""

import random
from collections.abc import Callable
from typing import Any

from tests.chaos.recording.account import Account, Reported
from tests.unit.chaos.valid_histories import DRAWN, MODEL, PLACES, Play


class Mutant:
    """A valid history with its account, to be broken in one way."""

    def __init__(self, seed: int) -> None:
        self.play = Play(seed, turns=600)
        self.rng = random.Random(seed)
        self.account: Account = self.play.account()

    def calls(self, op: str, outcome: str = "yes") -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        """(process, facts, answer) of every call of a kind that was answered so; in their order."""
        found = []
        for process, lines in self.play.records.items():
            ends = {line["of"]: line for line in lines if "of" in line}
            for line in lines:
                if line.get("op") == op and ends.get(line["seq"], {}).get("outcome") == outcome:
                    found.append((line["mono"], process, line["facts"], ends[line["seq"]]["facts"]))
        return [one[1:] for one in sorted(found, key=lambda one: one[0])]

    def one(
        self, op: str, where: Callable[[Any], bool] = lambda facts: True
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        return self.rng.choice([one for one in self.calls(op) if where(one[1])])

    def cut_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The facts of the cut of a batch that was trained."""
        cuts = (line["facts"] for line in self.play.records["buffer"] if line.get("op") == "cut")
        return next(facts for facts in cuts if facts["digest"] == batch["digest"])

    def say(self, process: str, op: str, facts: dict[str, Any], answer: dict[str, Any] | None = None) -> None:
        # A leader acts in the epoch that it is by then.
        now = {"epoch": self.play.epoch} if "epoch" in facts else {}
        self.play.record(process, op, facts | now, answer or {})

    def engine(self, worker: str) -> dict[str, Any]:
        """The facts of a lease by a worker whose engine has the newest version."""
        return {"worker": worker, "version": self.play.clock, "highest": self.play.clock}

    def commit(self, worker: str, job: str, token: str, version: int | None = None) -> None:
        """Commit sample 0 of a job, whose tokens are of ``version``, or of the newest one."""
        samples = [[0, [self.play.clock if version is None else version]]]
        facts = {"job": job, "token": token, "samples": samples, "servers": ["control"]}
        facts |= {"loss": [[[samples[0][1][0], DRAWN]]], "generated": [[DRAWN, 1]]}
        self.say(worker, "commit", facts, {"new": 1, "again": 0, "taken": 0})

    def commit_and_give_up(self, job: str) -> None:
        """Commit a group that its subscription gives up unused."""
        admitted_at_the_end(self, [job], "pooled")
        self.commit("w0.0", job, "t")
        self.say("buffer", "dispose", {"sub": "left", "reason": "rewound", "jobs": [job], "epoch": 0}, {"count": 1})
        self.lose(job)
        self.account.done.append(job)

    @property
    def rows(self) -> list[tuple[str, int, str]]:
        assert self.account.rows is not None
        return self.account.rows

    def job(self, where: Callable[[Any], bool]) -> str:
        return self.rng.choice([name for name, about in self.account.jobs.items() if where(about)])

    def lose(self, job: str) -> None:
        del self.account.jobs[job]
        self.account.keys = {key: ttl for key, ttl in self.account.keys.items() if f":{job}" not in key}


def job_lost(m: Mutant) -> None:
    asked = {job for _, _, answer in m.calls("admit") for job in answer["jobs"]}
    m.lose(m.rng.choice(sorted(asked & set(m.account.jobs))))


def job_lost_of_several_reported(m: Mutant) -> None:
    job_lost(m)
    job_lost(m)
    m.account.reported["jobs"] = Reported(1)


def sample_lost(m: Mutant) -> None:
    _, facts, _ = m.one("commit", lambda facts: facts["job"] in m.account.jobs)
    slots = m.account.jobs[facts["job"]]["samples"]
    token = slots.pop(str(facts["samples"][0][0]))
    assert token == facts["token"]
    del m.account.keys[f"payload:{facts['job']}/{facts['samples'][0][0]}:{token}"]


def sample_of_a_retired_group_in_no_batch(m: Mutant) -> None:
    process, facts, _ = m.one("admit")
    job = "lost/0/1"
    m.say(process, "admit", facts | {"jobs": [[job, 1]]}, {"jobs": [job]})
    m.commit("w0.0", job, "t")
    m.account.done.append(job)
    m.rows.append((job, 0, "dropped"))


def batch_lost(m: Mutant) -> None:
    sub = m.account.subscriptions["actor"]
    sub["cursor"] = sub["cut"] = m.calls("cut")[0][1]["n"] - 1
    sub["checkpoint"] = 10**6


def checkpoint_lost(m: Mutant) -> None:
    _process, facts, _ = m.calls("checkpoint")[-1]
    m.account.subscriptions[facts["sub"]]["checkpoint"] -= 1


def version_lost(m: Mutant) -> None:
    m.account.clock[MODEL] = m.calls("publish")[-1][1]["version"] - 1


def reported_and_there(m: Mutant) -> None:
    m.account.reported["jobs"] = Reported(1, [next(iter(m.account.jobs))])


def reported_too_many(m: Mutant) -> None:
    job_lost(m)
    m.account.reported["jobs"] = Reported(2)


def samples_reported_and_there(m: Mutant) -> None:
    m.account.reported["samples"] = Reported(3)


def job_from_nowhere(m: Mutant) -> None:
    m.account.jobs["x/0/1"] = {"state": "queued", "lane": "train", "worker": "", "samples": {}}


def job_that_was_refused(m: Mutant) -> None:
    m.account.done.append("never/0/1")


def lease_from_nowhere(m: Mutant) -> None:
    m.say("w0.0", "lease", m.engine("w0.0"), {"jobs": [["x/0/1", "t", 0]]})


def sample_from_nowhere(m: Mutant) -> None:
    m.account.jobs[m.job(lambda about: about["state"] == "queued")]["samples"]["77"] = "nobody"


def batch_from_nowhere(m: Mutant) -> None:
    m.one("deliver")[1]["digest"] = "nobody"


def commit_without_the_fence(m: Mutant) -> None:
    _, facts, answer = m.one("commit")
    m.say("w9.0", "commit", facts | {"token": "late"}, answer)


def commit_counted_twice(m: Mutant) -> None:
    m.one("commit")[2]["new"] += 1


def commit_overwritten(m: Mutant) -> None:
    """The second lease was never told, and its sample is the one that stands."""
    _, facts, _ = m.one("commit", lambda facts: facts["job"] in m.account.jobs)
    m.play.record("w9.0", "commit", facts | {"token": "late"}, None)
    m.account.jobs[facts["job"]]["samples"][str(facts["samples"][0][0])] = "late"
    m.account.keys = {key: ttl for key, ttl in m.account.keys.items() if not key.startswith("payload")}


def reward_by_two_leases(m: Mutant) -> None:
    process, _, answer = m.one("lease")
    job, token = answer["jobs"][0][:2]
    m.say(process, "reward", {"job": job, "token": token}, {"said": "ready"})
    m.say("w9.0", "reward", {"job": job, "token": "late"}, {"said": "ready"})


def reward_after_the_next_lease(m: Mutant) -> None:
    process, facts, answer = m.one("lease")
    job, token, *rest = answer["jobs"][0]
    m.say("w9.0", "lease", facts | {"worker": "w9.0"}, {"jobs": [[job, "next", *rest]]})
    m.say(process, "reward", {"job": job, "token": token}, {"said": "ready"})


def turn_drawn_again(m: Mutant) -> None:
    facts = {"sample": "d/0/0/0", "turn": 2, "resumes": True, "versions": [m.play.clock]}
    m.say("w0.0", "turn", facts | {"digest": "first"})
    m.say("w9.0", "turn", facts | {"digest": "first"})
    m.say("w9.0", "turn", facts | {"digest": "again"})


def answer_trained_otherwise(m: Mutant) -> None:
    _, facts, _ = m.one("told", lambda facts: bool(facts["logprobs"]))
    facts["reward"] = 1.0
    m.say("agent", "finished", {"sample": facts["sample"], "answers": ["never generated"], "reward": 1.0})


def reward_trained_otherwise(m: Mutant) -> None:
    _, facts, _ = m.one("told", lambda facts: bool(facts["logprobs"]))
    facts["reward"] = 1.0
    m.say("agent", "finished", {"sample": facts["sample"], "answers": [], "reward": 0.0})


def batch_trained_twice(m: Mutant) -> None:
    process, facts, _ = m.calls("train")[-1]
    m.say(process, "train", facts)


def group_in_two_batches(m: Mutant) -> None:
    process, facts, _ = m.calls("train")[-1]
    cut = m.cut_of(facts)
    again = {"n": 900, "digest": "again"}
    m.say("buffer", "cut", cut | again, {"said": "cut"})
    m.account.subscriptions[facts["sub"]]["cut"] = 900
    m.say(process, "train", facts | again)


def group_in_two_members_of_a_pool(m: Mutant) -> None:
    _, facts, _ = [one for one in m.calls("train") if one[1]["sub"] == "left"][-1]
    process, other, _ = [one for one in m.calls("train") if one[1]["sub"] == "right" and one[1]["rank"] == 0][-1]
    cut = m.cut_of(facts)
    again = {"sub": "right", "n": 900, "digest": "again"}
    m.say("buffer", "cut", cut | again, {"said": "cut"})
    m.account.subscriptions["right"]["cut"] = 900
    m.say(process, "train", other | again | {"jobs": facts["jobs"], "rows": facts["rows"]})


def sample_by_two_ranks(m: Mutant) -> None:
    for _, facts, _ in m.calls("train"):
        if facts["rank"] == 1:
            shared = [one for _, one, _ in m.calls("train") if one["digest"] == facts["digest"] and one["rank"] == 0]
            facts["rows"] = next(one["rows"] for one in shared if one["gen"] == facts["gen"])
            return


def restore_that_undid_less(m: Mutant) -> None:
    """The weights have seen a batch that comes again."""
    _process, facts, _ = m.calls("train")[-1]
    m.say("after", "restore", facts | {"n": facts["n"] - 1, "seen": facts["n"]})
    m.say("after", "train", facts | {"owner": "after"})


def wrong_lane(m: Mutant) -> None:
    m.account.subscriptions["actor"]["lanes"] = ["eval"]


def given_up_and_used(m: Mutant) -> None:
    _, facts, _ = m.one("cut")
    line = {"sub": facts["sub"], "reason": "stale", "jobs": facts["jobs"][:1]}
    m.play.records["early"] = [
        {"seq": 1, "mono": -2, "wall": 0, "op": "dispose", "facts": line},
        {"seq": 2, "mono": -1, "wall": 0, "of": 1, "outcome": "yes", "facts": {"count": 1}},
    ]


def batch_cut_twice(m: Mutant) -> None:
    _, facts, _ = m.one("cut")
    m.say("buffer-2", "cut", facts | {"digest": "other"}, {"said": "cut"})


def rank_trains_another_batch(m: Mutant) -> None:
    _, facts, _ = m.one("train")
    facts["digest"] = next(one["digest"] for _, one, _ in m.calls("cut") if one["digest"] != facts["digest"])


def rank_trains_a_foreign_sample(m: Mutant) -> None:
    m.one("train")[1]["rows"].append(["d/0/0", 88])


def cut_too_late(m: Mutant) -> None:
    m.one("cut")[1]["train_version"] += 30


def bound_of_the_subscription_is_less(m: Mutant) -> None:
    m.account.subscriptions["actor"]["bound"] = -1


def boundary_one_token_off(m: Mutant) -> None:
    _, facts, _ = m.one("told", lambda facts: len(set(facts["versions"])) > 1)
    versions = facts["versions"]
    at = next(i for i in range(1, len(versions)) if versions[i] != versions[i - 1])
    versions[at] = versions[at - 1]


def prefix_with_new_versions(m: Mutant) -> None:
    _, facts, _ = m.one("told", lambda facts: len(set(facts["versions"])) > 1)
    facts["versions"] = [facts["versions"][-1]] * len(facts["versions"])


def logprob_off(m: Mutant) -> None:
    m.one("told", lambda facts: bool(facts["logprobs"]))[1]["logprobs"][0] += 0.001


def number_of_other_weights(m: Mutant) -> None:
    _process, facts, answer = m.one("publish")
    m.say("actor-0-99", "publish", facts | {"weights": "others"}, answer)


def loaded_other_weights(m: Mutant) -> None:
    process, facts, _ = m.one("load")
    m.say(process, "load", facts | {"weights": "others"})


def folder_of_other_weights(m: Mutant) -> None:
    m.one("whole")[1]["weights"] = "others"


def folder_without_an_index(m: Mutant) -> None:
    m.one("whole")[1]["weights"] = ""


def loaded_before_it_was_announced(m: Mutant) -> None:
    process, facts, _ = m.calls("load")[-1]
    m.say(process, "load", facts | {"version": facts["version"] + 1})


def folder_of_what_nobody_announced(m: Mutant) -> None:
    process, facts, _ = m.calls("whole")[-1]
    m.say(process, "whole", facts | {"version": facts["version"] + 1000})


def version_that_goes_back(m: Mutant) -> None:
    _process, facts, _ = m.calls("publish")[-1]
    m.say("actor-0-99", "publish", facts | {"version": -1, "weights": "before"}, {"clock": -1})


def lease_of_a_dead_worker(m: Mutant) -> None:
    job = m.account.jobs[m.job(lambda about: about["state"] == "queued")]
    job["state"], job["worker"] = "leased", "w7.0"


def lease_of_nobody(m: Mutant) -> None:
    m.account.jobs[m.job(lambda about: about["state"] == "queued")]["state"] = "leased"


def group_left(m: Mutant) -> None:
    m.account.keys["group:x/0/1"] = -1


def payload_left(m: Mutant) -> None:
    m.account.keys[f"payload:{next(iter(m.account.jobs))}/0:nobody"] = -1


def key_of_no_kind(m: Mutant) -> None:
    m.account.keys["scratch"] = -1


def batches_left(m: Mutant) -> None:
    m.account.keys["batches:gone"] = -1


def memory_that_grows(m: Mutant) -> None:
    for look in m.account.memory:
        look["bytes"] += look["done"] * 100_000


def group_cut_twice(m: Mutant) -> None:
    """Nobody has trained it yet."""
    _, facts, _ = m.one("cut")
    m.say("buffer", "cut", facts | {"n": 900, "digest": "again"}, {"said": "cut"})
    m.account.subscriptions[facts["sub"]]["cut"] = 900


def admitted_at_the_end(m: Mutant, names: list[str], lane: str, **job: Any) -> None:
    m.say("producer", "admit", {"lane": lane, "jobs": [[name, 1] for name in names]}, {"jobs": names})
    m.account.jobs |= {name: {"state": "queued", "lane": lane, "worker": "", "samples": {}} | job for name in names}


def late_commit(m: Mutant) -> None:
    """The worker was stopped, lost its lease to another one, and committed all the same."""
    job = "late/0/1"
    admitted_at_the_end(m, [job], "pooled", state="ready", samples={"0": "before"})
    for worker, token in (("w0.0", "before"), ("w1.0", "behind")):
        m.say(worker, "lease", m.engine(worker), {"jobs": [[job, token, 0]]})
    m.commit("w0.0", job, "before")


def commit_that_the_next_lease_did_not_know(m: Mutant) -> None:
    """It was sent before the lease was told, and carried out after it."""
    job = "late/0/2"
    admitted_at_the_end(m, [job], "pooled", state="ready", samples={"0": "before"})
    m.say("w0.0", "lease", m.engine("w0.0"), {"jobs": [[job, "before", 0, []]]})
    m.commit("w0.0", job, "before")
    m.say("w1.0", "lease", m.engine("w1.0"), {"jobs": [[job, "behind", 0, []]]})


def token_given_twice(m: Mutant) -> None:
    admitted_at_the_end(m, ["twice/0/1"], "pooled")
    for worker in ("w0.0", "w1.0"):
        m.say(worker, "lease", m.engine(worker), {"jobs": [["twice/0/1", "same", 0]]})


def act_of_a_deposed_leader(m: Mutant) -> None:
    m.calls("cut")[-1][1]["epoch"] = 0


def failure_forgotten(m: Mutant) -> None:
    tried = [
        (job, facts, at) for _, facts, answer in m.calls("lease") for at, job in enumerate(answer["jobs"]) if job[2] > 0
    ]
    m.rng.choice(tried)[0][2] = 0


def gate_left_open(m: Mutant) -> None:
    admitted_at_the_end(m, [f"many/0/{at}" for at in range(PLACES + 1)], "train")


def row_missing(m: Mutant) -> None:
    m.account.rows = [row for row in m.rows if row[0] != m.rows[0][0]]


def row_of_one_sample_missing(m: Mutant) -> None:
    m.account.rows = [row for row in m.rows if row is not max(m.rows, key=lambda row: row[1])]


def row_missing_though_others_were_given_up(m: Mutant) -> None:
    gone = {m.rows[0][0], m.rows[-1][0]}
    m.account.rows, m.account.unrecorded = [row for row in m.rows if row[0] not in gone], 1


def row_twice(m: Mutant) -> None:
    m.account.rows = [*m.rows, m.rng.choice(m.rows)]


def row_of_nobody(m: Mutant) -> None:
    m.account.rows = [*m.rows, ("never/0/9", 0, "dropped")]


def row_of_what_was_in_no_batch(m: Mutant) -> None:
    m.commit_and_give_up("dropped/0/1")
    m.rows.append(("dropped/0/1", 0, "trained"))


def said_by_a_recorder_that_was_deposed(m: Mutant) -> None:
    for epoch in (3, 2):
        m.play.record("recorder", "recorded", {"epoch": epoch, "jobs": []}, {"count": 1})


def retry_booked_twice(m: Mutant) -> None:
    m.account.tokens = m.account.tokens | {"train:heard": m.account.drawn + 1}


def tokens_that_nobody_told_of(m: Mutant) -> None:
    m.account.drawn, m.account.unheard = 2000, 3


MUTATIONS: dict[str, list[Callable[[Mutant], None]]] = {
    "lost": [
        job_lost, job_lost_of_several_reported, sample_lost, sample_of_a_retired_group_in_no_batch, batch_lost,
        checkpoint_lost, version_lost,
    ],
    "misreported": [reported_and_there, reported_too_many, samples_reported_and_there],
    "unexpected": [job_from_nowhere, job_that_was_refused, lease_from_nowhere, sample_from_nowhere, batch_from_nowhere],
    "committed_twice": [commit_without_the_fence, commit_counted_twice, commit_overwritten],
    "lost_right": [
        late_commit, commit_that_the_next_lease_did_not_know, token_given_twice, act_of_a_deposed_leader,
        said_by_a_recorder_that_was_deposed,
    ],
    "rewarded_twice": [reward_by_two_leases, reward_after_the_next_lease],
    "forgotten_try": [failure_forgotten],
    "turn_again": [turn_drawn_again],
    "other_answers": [answer_trained_otherwise, reward_trained_otherwise],
    "over_admitted": [gate_left_open],
    "trained_twice": [
        batch_trained_twice, group_in_two_batches, group_in_two_members_of_a_pool, sample_by_two_ranks,
        restore_that_undid_less, group_cut_twice,
    ],
    "wrong_batch": [
        wrong_lane, given_up_and_used, batch_cut_twice, rank_trains_another_batch, rank_trains_a_foreign_sample,
    ],
    "over_bound": [cut_too_late, bound_of_the_subscription_is_less],
    "wrong_tokens": [boundary_one_token_off, prefix_with_new_versions, logprob_off],
    "heard_twice": [retry_booked_twice, tokens_that_nobody_told_of],
    "reused_version": [
        number_of_other_weights, loaded_other_weights, version_that_goes_back, folder_of_other_weights,
        folder_without_an_index, loaded_before_it_was_announced, folder_of_what_nobody_announced,
    ],
    "unrecorded": [
        row_missing, row_of_one_sample_missing, row_missing_though_others_were_given_up, row_twice, row_of_nobody,
        row_of_what_was_in_no_batch,
    ],
    "dead_lease": [lease_of_a_dead_worker, lease_of_nobody],
    "orphan": [group_left, payload_left, key_of_no_kind, batches_left],
    "growth": [memory_that_grows],
}  # fmt: skip
