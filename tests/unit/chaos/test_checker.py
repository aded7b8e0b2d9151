"""The checker finds nothing in valid histories, and each kind of broken promise by its name."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from tests.chaos import checker
from tests.chaos.checks.evidence import Evidence
from tests.chaos.recording import account
from tests.chaos.recording.account import Account, Reported
from tests.chaos.recording.history import History, Operation
from tests.unit.chaos.mutations import MUTATIONS, Mutant, commit_overwritten, job_lost
from tests.unit.chaos.truth_mutations import TRUTH_MUTATIONS
from tests.unit.chaos.valid_histories import Play, law

SEEDS = range(3)
ALL_MUTATIONS = MUTATIONS | TRUTH_MUTATIONS
#: Mutation -> other properties that it may break as well: a rank that has other samples has another share, and a batch
#: that is cut again names the version of its first cut.
ALSO = {
    "sample_by_two_ranks": {"wrong_share"},
    "rank_trains_another_batch": {"wrong_share"},
    "rank_trains_a_foreign_sample": {"wrong_share"},
    "group_cut_twice": {"wrong_train_version"},
    "batch_cut_twice": {"wrong_train_version"},
    "group_in_two_batches": {"wrong_train_version"},
    "group_in_two_members_of_a_pool": {"wrong_train_version"},
}


@pytest.mark.parametrize("seed", range(30))
def test_a_valid_history_is_found_valid(seed: int) -> None:
    play = Play(seed)

    verdict = checker.check(play.history(), play.account(), law)

    assert verdict.broken == [], checker.words(verdict)
    assert verdict.unchecked == {}


def test_valid_histories_have_all_that_can_go_wrong() -> None:
    counts: dict[str, int] = {}
    for seed in range(30):
        for op, count in Play(seed).history().counts().items():
            counts[op] = counts.get(op, 0) + count

    wanted = {"admit", "lease", "commit", "cut", "deliver", "train", "commit_batch", "publish", "checkpoint", "restore"}
    assert wanted | {"rewind", "dispose", "told", "load"} <= {op for op, count in counts.items() if count > 20}


def test_every_property_has_a_mutation() -> None:
    assert set(ALL_MUTATIONS) == set(checker.PROPERTIES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("broken", "mutate"),
    [pytest.param(name, one, id=one.__name__) for name, all_ in ALL_MUTATIONS.items() for one in all_],
)
def test_a_broken_promise_is_found_and_no_other(broken: str, mutate: Callable[[Mutant], None], seed: int) -> None:
    mutant = Mutant(seed)
    mutate(mutant)

    verdict = checker.check(mutant.play.history(), mutant.account, law)

    assert set(verdict.broken) - ALSO.get(mutate.__name__, set()) == {broken}, checker.words(verdict)


def test_what_was_lost_and_reported_is_no_violation() -> None:
    mutant = Mutant(1)
    before = set(mutant.account.jobs)
    job_lost(mutant)
    (lost,) = before - set(mutant.account.jobs)
    mutant.account.reported["jobs"] = Reported(1, [lost])

    assert checker.check(mutant.play.history(), mutant.account, law).broken == []


def test_a_lost_commit_that_was_reported_may_be_made_again() -> None:
    mutant = Mutant(1)
    commit_overwritten(mutant)
    mutant.account.reported["samples"] = Reported(1)

    assert checker.check(mutant.play.history(), mutant.account, law).broken == []


def test_what_a_fault_may_have_lost_is_held_against_nobody() -> None:
    mutant = Mutant(1)
    before = set(mutant.account.jobs)
    job_lost(mutant)
    (lost,) = before - set(mutant.account.jobs)
    history = mutant.play.history()
    admit = next(one for one in history.of("admit") if lost in one.answer.get("jobs", ()))
    assert admit.ended is not None

    mutant.account.forgotten = [(admit.ended, admit.ended)]
    assert checker.check(history, mutant.account, law).broken == []

    mutant.account.forgotten = [(admit.ended + 1, admit.ended + 2)]
    assert checker.check(history, mutant.account, law).broken == ["lost"]


def test_no_more_may_be_reported_than_a_fault_can_have_lost() -> None:
    mutant = Mutant(1)
    mutant.say("buffer", "report", {"counters": {"committed": 2}})
    assert checker.check(mutant.play.history(), mutant.account, law).broken == ["misreported"]

    mutant.account.forgotten = [(0, 2**62)]
    assert checker.check(mutant.play.history(), mutant.account, law).broken == []

    mutant.account.rolled_back = {"committed": 1_000_000}
    assert checker.check(mutant.play.history(), mutant.account, law).broken == ["misreported"]


def test_a_version_published_after_the_account_was_read_is_not_lost() -> None:
    """A trainer that takes long to restart publishes when the rest of the run is at rest already."""
    mutant = Mutant(1)
    clock = mutant.account.clock["m"]
    publish = next(facts for _, facts, _ in mutant.calls("publish") if facts["version"] == clock)

    def broken(*read_at: int) -> list[str]:
        mutant.account.read_at = read_at
        return checker.check(mutant.play.history(), mutant.account, law).broken

    before = mutant.play._now
    mutant.say("restarting", "publish", publish | {"version": clock + 1, "weights": "restored"}, {"clock": clock + 1})
    after = mutant.play._now

    assert broken(before, before) == [], "it began after the account was read"
    assert broken(before, after) == [], "the account was read while it was published"
    assert broken(after + 1, after + 2) == ["lost"]
    assert broken() == ["lost"]


def test_a_payload_may_be_gone_that_was_freed_elsewhere_while_redis_forgot_it() -> None:
    mutant = Mutant(1)
    job = mutant.job(lambda about: about["samples"] and about["state"] != "leased")
    mutant.account.reported["samples"] = Reported(1, [f"{job}/{min(mutant.account.jobs[job]['samples'])}"])
    committed = next(facts for _, facts, _ in mutant.calls("commit") if facts["job"] == job)

    def broken(server: str, forgotten: list[tuple[int, int]]) -> list[str]:
        committed["servers"], mutant.account.forgotten = [server] * len(committed["samples"]), forgotten
        return checker.check(mutant.play.history(), mutant.account, law).broken

    forgetting = [(10**9, 2 * 10**9)]
    assert broken("p1", forgetting) == ["misreported"], "nobody had freed it"
    mutant.play._now = 10**9
    mutant.say("buffer", "seal", {"subs": [], "jobs": [job], "evict": [], "epoch": 0}, {"jobs": [job]})
    assert broken("p1", [(1, 2)]) == ["misreported"], "Redis remembers that"
    assert broken("control", forgetting) == ["misreported"], "there it goes back with Redis"
    assert broken("p1", forgetting) == []


def test_a_group_that_was_given_up_or_over_before_any_recorder_needs_no_row() -> None:
    mutant = Mutant(1)
    gone = mutant.rows[0][0]
    mutant.account.rows, mutant.account.unrecorded = [row for row in mutant.rows if row[0] != gone], 1
    assert checker.check(mutant.play.history(), mutant.account, law).broken == []

    mutant.account.unrecorded = 0
    mutant.play._now = -100
    mutant.say("early", "seal", {"subs": [], "jobs": [gone], "evict": []}, {"jobs": [gone]})
    assert checker.check(mutant.play.history(), mutant.account, law).broken == []

    mutant.account.rows = None
    assert checker.check(mutant.play.history(), mutant.account, law).broken == [], "it keeps no history"


def test_what_was_forgotten_and_made_anew_must_be_reported() -> None:
    mutant = Mutant(1)
    _, facts, _ = mutant.one("commit", lambda facts: bool(facts["samples"]))
    span = 4_000_000_000
    history = mutant.play.history()
    made = next(one for one in history.of("commit") if one.facts == facts)
    cut = history.of("cut")[0]
    assert made.ended is not None

    def end_of(*more: Operation) -> list[str]:
        mutant.account.forgotten = [(0, made.ended + span)]
        later = made.ended + span + 1
        again = replace(made, where="again:1", began=later, ended=later, facts=facts | {"token": "other"})
        leads = [replace(cut, where=f"cut:{at}", process="b", began=at, ended=at) for at in (1, later)]
        verdict = checker.check(History([*history.all(), again, *leads, *more]), mutant.account, law)
        return [one.what for one in verdict.violations["lost"] if "no loss was reported" in one.what]

    assert end_of() != []
    report = Operation("report", "report:1", "b", 5, {"seen": {"committed": 1}}, "yes", 6, {"counters": {}})
    assert end_of(report) != [], "there was nothing that others had not reported, and nobody had"
    assert end_of(replace(report, answer={"counters": {"committed": 1}})) == []
    assert end_of(replace(report, outcome="unknown", ended=None, answer={})) == []


def test_a_token_may_be_newer_than_it_claims_where_that_is_not_proven_and_never_older() -> None:
    def broken(claimed: int, drawn: int, unproven: int) -> list[str]:
        mutant = Mutant(4)
        low, high = sorted({facts["version"] for _, facts, _ in mutant.calls("publish")})[:2]
        version, true = (low, high)[claimed], (low, high)[drawn]
        told = {"sample": "s/0", "tokens": [5], "versions": [version], "logprobs": [law(true, [5], 0)]}
        mutant.say("worker", "told", told | {"unproven": unproven})
        return checker.check(mutant.play.history(), mutant.account, law).broken

    assert broken(claimed=0, drawn=1, unproven=1) == []
    assert broken(claimed=0, drawn=1, unproven=0) == ["wrong_tokens"]
    assert broken(claimed=1, drawn=0, unproven=1) == ["wrong_tokens"]


def test_a_violation_names_the_operations_that_prove_it() -> None:
    mutant = Mutant(2)
    process, facts, _ = mutant.calls("train")[-1]
    mutant.say(process, "train", facts)

    (found, *_) = checker.check(mutant.play.history(), mutant.account, law).violations["trained_twice"]

    assert [where.rpartition(":")[0] for where in found.proof] == [process, process]


@pytest.mark.parametrize("leak", [0, 1000])
def test_memory_of_jobs_that_stay_is_no_growth_and_that_of_jobs_done_is(leak: int) -> None:
    """Dead letters stay, so that the jobs live rise with those done."""
    stay = [{"done": 12 * at, "live": 30 + 9 * at + at % 7, "bytes": 5000 * (30 + 9 * at) + at**2} for at in range(90)]
    leave = [{"done": 12 * at, "live": 30 + at % 7, "bytes": 5000 * (30 + at % 7) + leak * 12 * at} for at in range(90)]

    assert not checker.check(History(()), Account(memory=stay)).violations.get("growth")
    assert bool(checker.check(History(()), Account(memory=leave)).violations.get("growth")) == bool(leak)


def test_what_cannot_be_looked_at_is_said_and_not_found_good() -> None:
    verdict = checker.check(History(()), Account())

    assert set(verdict.unchecked) == {*checker.NEEDED, "orphan", "growth", "heard_twice"}
    assert "trained_twice: not checked (no train was recorded)" in checker.words(verdict)


def test_the_command_reads_a_folder_and_fails_where_something_was_found(tmp_path: Path) -> None:
    mutant = Mutant(3)
    write(mutant, tmp_path)
    assert run(tmp_path).returncode == 0

    job_lost(mutant)
    write(mutant, tmp_path)
    done = run(tmp_path)

    assert done.returncode == 1
    assert "lost: 1\n    job " in done.stdout


def test_an_empty_folder_is_not_found_good(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == 2


def test_the_checker_imports_nothing_of_penstock() -> None:
    parts = "('penstock', 'consumers', 'workers', 'buffer', 'producer', 'console')"
    code = f"import sys, tests.chaos.checker; print([n for n in sys.modules if n.split('.')[0] in {parts}])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "[]\n"


def write(mutant: Mutant, folder: Path) -> None:
    for process, lines in mutant.play.records.items():
        (folder / f"{process}.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (folder / "account.json").write_bytes(orjson.dumps(mutant.account))


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.chaos.checker", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_account_with_a_field_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="no field jobz"):
        account.from_json({"jobz": {}})


@pytest.mark.parametrize(
    ("masked", "broken"), [({}, True), ({"mask_below": 4}, False), ({"mask_offpolicy": True}, False)]
)
def test_I6_counts_only_tokens_that_bear_loss(masked: dict[str, object], broken: bool) -> None:
    cut = {"sub": "a", "n": 1, "digest": "d", "model": "m", "jobs": ["j"], "rows": [["j", 0, "t"]]}
    cut |= {"train_version": 6, "bound": 2, "mask_below": -1, "mask_offpolicy": False}
    history = History(
        [
            operation(1, "commit", {"job": "j", "token": "t", "samples": [[0, [1, 4]]]}),
            operation(2, "cut", cut | masked),
        ]
    )

    found = list(checker.PROPERTIES["over_bound"](Evidence(history, Account())))

    assert bool(found) == broken


def test_I6_versions_that_a_restore_abandoned_age_nothing() -> None:
    cut = {"sub": "a", "n": 3, "digest": "d", "model": "m", "jobs": ["j"], "rows": [["j", 0, "t"]]}
    cut |= {"train_version": 5, "bound": 1, "mask_below": -1, "mask_offpolicy": False}
    publish = {"model": "m", "rev": 0}
    moves = [
        operation(1, "publish", publish | {"version": 1, "through": 1}),
        operation(2, "publish", publish | {"version": 2, "through": 2}),
        operation(3, "publish", publish | {"version": 3, "through": 3}),
        operation(4, "rewind", {"model": "m", "n": 1}),
        operation(5, "publish", publish | {"version": 4, "through": 1}),
        operation(6, "publish", publish | {"version": 5, "through": 2}),
    ]
    commit = operation(7, "commit", {"job": "j", "token": "t", "samples": [[0, [1]]]})

    valid = History([*moves, commit, operation(8, "cut", cut)])
    stale = History([*(one for one in moves if one.op == "publish"), commit, operation(8, "cut", cut)])

    assert list(checker.PROPERTIES["over_bound"](Evidence(valid, Account()))) == []
    assert list(checker.PROPERTIES["over_bound"](Evidence(stale, Account()))) != []


def test_T12_an_older_engine_may_start_what_requires_a_version_that_was_set_aside() -> None:
    jobs = {"lane": "train", "jobs": [["j", 1]]}
    lease = {"worker": "w", "version": 1, "highest": 2}
    publishes = [operation(at, "publish", {"model": "m", "version": at, "through": at}) for at in (1, 2)]
    leased = replace(operation(5, "lease", lease), answer={"jobs": [["j", "t", 0, [], 2]]})
    commit = operation(6, "commit", {"job": "j", "token": "t", "samples": [[0, [1]]]})
    crash = operation(4, "crash", {"job": "other", "token": "t", "publication": "2-0"})

    def found(*more: Operation) -> int:
        history = History([*publishes, operation(3, "admit", jobs), *more, leased, commit])
        return len(list(checker.PROPERTIES["early_start"](Evidence(history, Account()))))

    assert found() == 2, "the lease, and what was drawn under it"
    assert found(crash) == 0


def test_T12_what_was_drawn_before_a_requeue_may_be_older_than_the_job_requires_since() -> None:
    publish = operation(1, "publish", {"model": "m", "version": 1, "through": 1})
    admit = operation(2, "admit", {"lane": "train", "jobs": [["j", 1]]})
    leases = [
        replace(
            operation(at, "lease", {"worker": "w", "version": version, "highest": version}),
            answer={"jobs": [["j", f"t{at}", 0, [], version]]},
        )
        for at, version in ((3, 1), (6, 4))
    ]
    commit = operation(4, "commit", {"job": "j", "token": "t3", "samples": [[0, [1]]]})

    def found(*more: Operation) -> int:
        history = History([publish, admit, *leases, commit, *more])
        return len(list(checker.PROPERTIES["early_start"](Evidence(history, Account()))))

    assert found(operation(5, "requeue", {"job": "j"})) == 0
    assert found() == 1, "the version that a job requires changes by a requeue alone"


def test_T15_a_rank_whose_reply_was_lost_may_have_committed_before_the_last_one() -> None:
    def barrier(rank: int, **answer: object) -> Operation:
        facts = {"sub": "a", "owner": "o", "gen": 1, "n": 1, "digest": "d", "rank": rank, "ranks": 2, "role": ""}
        return replace(operation(rank, "commit_batch", facts), answer=answer, ended=9)

    def found(*calls: Operation) -> int:
        return len(list(checker.PROPERTIES["partial_commit"](Evidence(History(calls), Account()))))

    last = barrier(1, said="committed")
    assert found(barrier(0, said="waiting"), last) == 0
    assert found(barrier(0, said="already", resent=True), last) == 0, "its first try set the rank's bit"
    assert found(replace(barrier(0), outcome="unknown", ended=None), last) == 0
    assert found(barrier(0, said="already"), last) == 1, "the cursor had moved before it was asked"
    assert found(last) == 1
    assert found(barrier(0, said="waiting"), last, replace(last, began=8)) == 1, "it was committed twice"
    forgotten = replace(last, outcome="unknown", ended=None)
    assert found(barrier(0, said="waiting"), forgotten, replace(last, began=8)) == 0, "Redis forgot the first commit"


def operation(at: int, op: str, facts: dict[str, object]) -> Operation:
    return Operation(op, f"p:{at}", "p", at, facts, "yes", at, {"taken": 0})


def test_a_sample_that_went_with_its_server_may_be_reported() -> None:
    mutant = Mutant(1)
    _, facts, _ = mutant.one("commit")
    # Committed together, they may lie apart.
    for name, more in {"samples": [7, []], "loss": [], "generated": [0, 1]}.items():
        facts[name].append(more)
    facts["servers"] = [*("kept" for _ in facts["samples"][1:]), "gone"]
    mutant.account.lost_servers = ["gone"]

    def broken(k: int) -> bool:
        mutant.account.reported["samples"] = Reported(1, [f"{facts['job']}/{k}"])
        return "misreported" in checker.check(mutant.play.history(), mutant.account, law).broken

    assert broken(facts["samples"][0][0])
    assert not broken(7)
