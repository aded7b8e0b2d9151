"""Valid histories broken in one way each, by the property of a T-rule that no longer holds."""

from collections.abc import Callable

from tests.unit.chaos.mutations import Mutant, admitted_at_the_end
from tests.unit.chaos.valid_histories import BUDGET, DRAWN


def lease_for_an_old_engine(m: Mutant) -> None:
    version = m.play.clock - 1
    assert any(facts["version"] > version for _, facts, _ in m.calls("publish"))
    admitted_at_the_end(m, ["new/0/1"], "pooled")
    facts = m.engine("w0.0") | {"version": version, "highest": version}
    m.say("w0.0", "lease", facts, {"jobs": [["new/0/1", "t", 0]]})


def lease_for_a_version_that_no_engine_crashed_on(m: Mutant) -> None:
    admitted_at_the_end(m, ["new/0/1"], "pooled")
    m.say("w0.0", "lease", m.engine("w0.0") | {"version": m.play.clock - 1}, {"jobs": [["new/0/1", "t", 0]]})


def lease_for_an_engine_older_than_the_lease_says(m: Mutant) -> None:
    admitted_at_the_end(m, ["new/0/1"], "pooled")
    m.say("w0.0", "lease", m.engine("w0.0"), {"jobs": [["new/0/1", "t", 0, [], m.play.clock + 1]]})


def tokens_older_than_the_admission(m: Mutant) -> None:
    admitted_at_the_end(m, ["new/0/1"], "pooled", state="ready", samples={"0": "t"})
    m.say("w0.0", "lease", m.engine("w0.0"), {"jobs": [["new/0/1", "t", 0]]})
    m.commit("w0.0", "new/0/1", "t", m.play.clock - 1)


def committed_by_the_first_rank(m: Mutant) -> None:
    """The second rank finds that the cursor has moved."""
    for _, facts, answer in m.calls("commit_batch"):
        answer["said"] = "committed" if facts["rank"] == 0 else "already"


def committed_without_a_role(m: Mutant) -> None:
    m.say("actor-0-0", "subscribe", {"sub": "left", "roles": "actor,critic"})
    for _, facts, _ in m.calls("commit_batch"):
        facts["role"] = "actor" if facts["sub"] == "left" else ""


def committed_twice_by_ranks(m: Mutant) -> None:
    process, facts, answer = next(one for one in m.calls("commit_batch") if one[2]["said"] == "committed")
    m.say(process, "commit_batch", facts, answer)


def trained_on_abandoned_tokens(m: Mutant) -> None:
    """The cut comes after the rewind that abandoned the newest version."""
    _, publish, _ = max(m.calls("publish"), key=lambda one: int(one[1]["version"]))
    _, cut, _ = m.one("cut", lambda facts: facts["sub"] == "left")
    admitted_at_the_end(m, ["new/0/1"], "pooled", state="ready", samples={"0": "t"})
    m.commit("w0.0", "new/0/1", "t", publish["version"])
    m.say("actor-0-99", "rewind", {name: publish[name] for name in ("sub", "gen", "model")} | {"n": -1}, {"gen": 99})
    about = {"masked": False, "lost": False, "newest": publish["version"], "status": "ok", "reward": 0.0}
    made = {"rows": [["new/0/1", 0, "t"]], "scored": [["new/0/1", 0, DRAWN, about]], "jobs": ["new/0/1"]}
    made |= {"counts": {"loss_tokens": DRAWN, "samples": 1, "groups": 1}, "train_version": publish["version"]}
    m.say("buffer", "cut", cut | made | {"n": 900, "digest": "abandoned"}, {"said": "cut"})
    m.account.subscriptions["left"]["cut"] = 900


def cut_for_an_older_version(m: Mutant) -> None:
    """A trainer that was restored publishes, and takes a batch that names another version."""
    _, publish, _ = max(m.calls("publish"), key=lambda one: int(one[1]["version"]))
    process, deliver, _ = m.one("deliver", lambda facts: facts["sub"] == "actor" and facts["rank"] == 0)
    del process
    cut = m.cut_of(deliver) | {"n": 900, "digest": "late", "train_version": publish["version"] - 1}
    cut |= {"jobs": [], "rows": [], "scored": [], "counts": {"loss_tokens": 0, "samples": 0, "groups": 0}}
    m.say("after", "restore", deliver | {"n": 0})
    m.say("after", "publish", publish)
    m.say("buffer", "cut", cut, {"said": "cut"})
    m.account.subscriptions["actor"]["cut"] = 900
    m.say("after", "deliver", deliver | {"n": 900, "digest": "late", "jobs": [], "rows": []})


def given_up_by_one_that_waits(m: Mutant) -> None:
    for _, facts, _ in m.calls("cut"):
        facts["on_expiry"] = "wait" if facts["sub"] == "actor" else "mask"
    for _, facts, _ in m.calls("dispose"):
        facts["reason"] = "rewound"
    m.commit_and_give_up("old/0/1")
    m.rows.append(("old/0/1", 0, "dropped"))
    line = {"sub": "actor", "reason": "stale", "jobs": ["old/0/1"], "epoch": 0}
    m.say("buffer", "dispose", line, {"count": 1})


def cohort_of_two_versions(m: Mutant) -> None:
    versions = {(facts["job"], k): tuple(of) for _, facts, _ in m.calls("commit") for k, of in facts["samples"]}
    found = [
        facts
        for _, facts, _ in m.calls("cut")
        if len({one for job, k, _ in facts["rows"] for one in versions.get((job, k), ())}) > 1
    ]
    m.rng.choice(found)["mode"] = "one_step"


def budget_of_every_resume(m: Mutant) -> None:
    m.one("commit")[1]["generated"][0] = [BUDGET + 1, 1]


def counts_of_one_rank(m: Mutant) -> None:
    m.one("counts")[1]["counts"]["loss_tokens"] -= DRAWN


def manifest_that_counts_too_much(m: Mutant) -> None:
    m.one("cut")[1]["counts"]["loss_tokens"] += 1


def masked_tokens_that_bear_loss(m: Mutant) -> None:
    commits = {(facts["job"], k): facts for _, facts, _ in m.calls("commit") for k, _ in facts["samples"]}
    cut = m.one("cut", lambda facts: any((job, k) in commits for job, k, _ in facts["rows"]))[1]
    commit = next(commits[job, k] for job, k, _ in cut["rows"] if (job, k) in commits)
    commit["loss"] = [[[0, DRAWN + 1]] for _ in commit["samples"]]


def advantage_of_half_a_group(m: Mutant) -> None:
    m.one("told", lambda facts: "advantage" in facts)[1]["advantage"] += 0.5


def reward_of_another_sample(m: Mutant) -> None:
    m.one("told", lambda facts: "reward" in facts)[1]["reward"] += 1


def share_without_a_sample(m: Mutant) -> None:
    both = {(facts["digest"], facts["gen"], facts["owner"]) for _, facts, _ in m.calls("train") if facts["rank"] == 1}
    found = [one[1] for one in m.calls("train") if one[1]["rank"] == 0 and one[1]["rows"]]
    chosen = m.rng.choice([one for one in found if (one["digest"], one["gen"], one["owner"]) in both])
    chosen["rows"] = chosen["rows"][1:]


def split_that_changes(m: Mutant) -> None:
    _, facts, _ = m.one("deliver", lambda facts: bool(facts["rows"]))
    m.say("after", "deliver", facts | {"rows": facts["rows"][1:]})


def prompts_of_evaluation_that_are_trained_on(m: Mutant) -> None:
    admitted_at_the_end(m, ["d/9/1"], "eval")


def batch_of_another_lane(m: Mutant) -> None:
    m.one("subscribe")[1]["lanes"] = "eval"


TRUTH_MUTATIONS: dict[str, list[Callable[[Mutant], None]]] = {
    "abandoned_tokens": [trained_on_abandoned_tokens],
    "wrong_train_version": [cut_for_an_older_version],
    "early_discard": [given_up_by_one_that_waits],
    "wrong_cohort": [cohort_of_two_versions],
    "over_budget": [budget_of_every_resume],
    "wrong_denominator": [counts_of_one_rank, manifest_that_counts_too_much, masked_tokens_that_bear_loss],
    "wrong_advantage": [advantage_of_half_a_group, reward_of_another_sample],
    "wrong_share": [share_without_a_sample, split_that_changes],
    "mixed_lanes": [prompts_of_evaluation_that_are_trained_on, batch_of_another_lane],
    "early_start": [
        lease_for_an_old_engine, lease_for_a_version_that_no_engine_crashed_on,
        lease_for_an_engine_older_than_the_lease_says, tokens_older_than_the_admission,
    ],
    "partial_commit": [committed_by_the_first_rank, committed_without_a_role, committed_twice_by_ranks],
}  # fmt: skip
