"""Properties of T-rules on small recorded histories: what they accept, and what they refuse."""

from dataclasses import replace
from typing import Any

from tests.chaos import checker
from tests.chaos.checks.evidence import Evidence
from tests.chaos.recording.account import Account
from tests.chaos.recording.history import History, Operation


def operation(at: int, op: str, facts: dict[str, Any], **answer: Any) -> Operation:
    return Operation(op, f"p:{at}", "p", at, facts, "yes", at, {"taken": 0} | answer)


def found(name: str, *operations: Operation) -> list[str]:
    return [one.what for one in checker.PROPERTIES[name](Evidence(History(operations), Account()))]


def cut(at: int, n: int, jobs: list[str], **facts: Any) -> Operation:
    of_batch = {"sub": "a", "n": n, "digest": f"d{n}", "model": "m", "jobs": jobs, "train_version": 1, "mode": "async"}
    rows = [[job, 0, "t"] for job in jobs]
    return operation(at, "cut", of_batch | {"rows": rows, "mask_below": -1} | facts)


def commit(at: int, job: str, *versions: int) -> Operation:
    return operation(at, "commit", {"job": job, "token": "t", "samples": [[0, list(versions)]]})


def publish(at: int, version: int, through: int) -> Operation:
    return operation(at, "publish", {"model": "m", "version": version, "through": through, "rev": 0})


def test_T1_a_batch_may_have_tokens_that_were_abandoned_only_before_the_rewind() -> None:
    rewind = operation(5, "rewind", {"model": "m", "n": 1})
    moves = [publish(1, 1, 1), publish(2, 2, 2), commit(3, "j", 2), publish(6, 3, 1)]

    assert found("abandoned_tokens", *moves, rewind, cut(4, 2, ["j"])) == []
    (what,) = found("abandoned_tokens", *moves, rewind, cut(7, 2, ["j"]))
    assert "version 2, which a rewind abandoned" in what
    assert found("abandoned_tokens", *moves, rewind, cut(7, 2, ["j"], mask_below=3)) == [], "they bear no loss"
    unknown = replace(rewind, outcome="unknown", ended=None)
    assert found("abandoned_tokens", *moves, unknown, cut(7, 2, ["j"])) == []


def test_T1_tokens_of_the_restored_version_are_not_abandoned() -> None:
    moves = [publish(1, 1, 1), publish(2, 2, 2), operation(5, "rewind", {"model": "m", "n": 1}), publish(6, 3, 1)]

    assert found("abandoned_tokens", *moves, commit(3, "j", 1, 3), cut(7, 2, ["j"])) == []


def test_T2_a_batch_names_the_version_that_the_trainer_holds() -> None:
    def of(train_version: int, *more: Operation) -> int:
        deliver = {"sub": "a", "n": 2, "digest": "d2"}
        taken = [operation(at, "deliver", deliver) for at in (8, 9)]
        moves = [operation(1, "restore", {"n": 1}), publish(5, 4, 1), *more, *taken]
        return len(found("wrong_train_version", *moves, cut(3, 2, ["j"], train_version=train_version)))

    assert of(4) == 0
    assert of(3) == 1
    assert of(3, operation(4, "restore", {"n": 1})) == 0, "it was cut before the restore, and keeps its version"


def test_T2_no_batch_is_cut_for_a_version_that_is_published_over() -> None:
    assert found("wrong_train_version", publish(1, 1, 0), publish(2, 2, 1), cut(3, 2, ["j"], train_version=2)) == []
    assert len(found("wrong_train_version", publish(1, 1, 0), publish(2, 2, 1), cut(3, 2, ["j"]))) == 1


def test_T4_only_a_subscription_that_waits_may_give_up_nothing() -> None:
    stale = operation(3, "dispose", {"sub": "a", "reason": "stale", "jobs": ["j"]}, count=1)
    subscribe = operation(1, "subscribe", {"sub": "a", "bound": "1", "gb": "4"})
    other = operation(2, "subscribe", {"sub": "a", "bound": "1", "gb": "2"})
    waits = cut(2, 1, [], on_expiry="wait")

    assert len(found("early_discard", subscribe, waits, stale)) == 1
    assert found("early_discard", subscribe, cut(2, 1, [], on_expiry="drop"), stale) == []
    assert found("early_discard", subscribe, other, waits, stale) == [], "its batches became smaller"


def test_T5_cohorts_come_in_the_order_of_admission_each_of_one_version() -> None:
    jobs = [[f"j{at}", 1] for at in range(4)]
    admit = operation(1, "admit", {"lane": "train", "position": 0, "jobs": jobs})
    commits = [commit(2, job, version) for job, version in zip(("j0", "j1", "j2", "j3"), (0, 0, 1, 1), strict=True)]

    def of(first: list[str], second: list[str], mode: str = "one_step") -> int:
        cuts = [cut(3, 1, first, mode=mode), cut(4, 2, second, mode=mode)]
        return len(found("wrong_cohort", admit, *commits, *cuts))

    assert of(["j0", "j1"], ["j2", "j3"]) == 0
    assert of(["j0"], ["j3"]) == 0, "others were buried"
    assert of(["j0", "j2"], ["j1", "j3"]) == 3, "two batches of two versions, and a group behind a later one"
    assert of(["j0", "j2"], ["j1", "j3"], mode="async") == 0


def test_T8_the_budget_is_that_of_each_turn() -> None:
    sampling = operation(1, "sampling", {"job": "j"}, max_new_tokens=8)
    facts = {"job": "j", "token": "t", "samples": [[0, [1]]]}

    def of(generated: int, turns: int) -> int:
        return len(found("over_budget", sampling, operation(2, "commit", facts | {"generated": [[generated, turns]]})))

    assert [of(8, 1), of(9, 1), of(16, 2)] == [0, 1, 0]


def test_T10_masked_truncated_and_lost_tokens_are_not_counted() -> None:
    about = {"lost": False, "newest": 4, "status": "ok"}

    def of(num_loss: int, about: dict[str, Any], **masks: Any) -> int:
        facts = {"mask_below": -1, "mask_offpolicy": False, "mask_truncated": False} | masks
        counts = {"loss_tokens": num_loss, "samples": 1, "groups": 1}
        batch = cut(3, 1, ["j"], scored=[["j", 0, num_loss, about]], counts=counts, **facts)
        made = operation(2, "commit", {"job": "j", "token": "t", "samples": [[0, [3, 4]]], "loss": [[[3, 5], [4, 2]]]})
        return len(found("wrong_denominator", made, batch))

    assert of(7, about) == 0
    assert of(6, about) == 1
    assert of(2, about, mask_below=4) == of(2, about, mask_offpolicy=True) == 0
    assert of(7, about, mask_below=4) == 1
    assert of(0, about | {"status": "truncated"}, mask_truncated=True) == 0
    assert of(0, about | {"lost": True}) == 0


def test_T11_a_masked_sample_takes_no_part_in_its_group() -> None:
    rewards = {0: 1.0, 1: 0.0, 2: 5.0}
    scored = [["j", k, 1, {"reward": reward, "masked": k == 2}] for k, reward in rewards.items()]
    batch = cut(1, 1, ["j"], scored=scored)

    def of(k: int, advantage: float) -> int:
        named = {"sub": "a", "n": 1, "digest": "d1", "sample": f"j/{k}", "reward": rewards[k]}
        return len(found("wrong_advantage", batch, operation(2, "told", named | {"advantage": advantage})))

    assert [of(0, 0.70711), of(1, -0.70711), of(2, 0.0)] == [0, 0, 0]
    assert of(0, -0.37796) == 1, "as among all three"


def test_T14_a_batch_may_be_split_anew_over_another_number_of_ranks() -> None:
    def train(at: int, share: int, shares: int, *jobs: str) -> Operation:
        seat = {"sub": "a", "role": "", "gen": shares, "owner": "o", "share": share, "shares": shares}
        return operation(at, "train", seat | {"n": 1, "digest": "d1", "rows": [[job, 0] for job in jobs]})

    batch = cut(1, 1, ["j", "k"])
    halves = [train(2, 0, 2, "j"), train(3, 1, 2, "k")]

    assert found("wrong_share", batch, *halves, train(4, 0, 1, "j", "k")) == []
    assert found("wrong_share", batch, *halves, train(4, 0, 2, "k")) != [], "equally many ranks have the same shares"
    assert found("wrong_share", batch, train(2, 0, 2, "j"), train(3, 1, 2)) != [], "nobody has k"
    assert found("wrong_share", batch, train(2, 0, 2, "j")) == [], "the other rank was killed"


def test_T18_a_dataset_is_for_training_or_for_evaluation() -> None:
    def admit(at: int, lane: str, job: str) -> Operation:
        return operation(at, "admit", {"lane": lane, "jobs": [[job, 1]]})

    assert found("mixed_lanes", admit(1, "train", "d/0/1"), admit(2, "eval", "e/0/1")) == []
    assert len(found("mixed_lanes", admit(1, "train", "d/0/1"), admit(2, "eval", "d/0/2"))) == 1
    takes = operation(1, "subscribe", {"sub": "a", "lanes": "train"})
    assert found("mixed_lanes", takes, admit(2, "train", "d/0/1"), cut(3, 1, ["d/0/1"])) == []
    assert len(found("mixed_lanes", takes, admit(2, "eval", "d/0/1"), cut(3, 1, ["d/0/1"]))) == 1
