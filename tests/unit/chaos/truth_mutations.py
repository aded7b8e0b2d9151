"""Valid histories broken in one way each, by the property of a T-rule that no longer holds."""

from collections.abc import Callable

from tests.unit.chaos.mutations import Mutant, admitted_at_the_end


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


TRUTH_MUTATIONS: dict[str, list[Callable[[Mutant], None]]] = {
    "early_start": [
        lease_for_an_old_engine, lease_for_a_version_that_no_engine_crashed_on,
        lease_for_an_engine_older_than_the_lease_says, tokens_older_than_the_admission,
    ],
    "partial_commit": [committed_by_the_first_rank, committed_without_a_role, committed_twice_by_ranks],
}  # fmt: skip
