"""Where the time of a sample went."""

from penstock.console.read.stages import MEANING, own_try, stages_of
from penstock.records.job import tries_of
from tests.unit.console.read.trace.samples import TRIES, sample


def named(**fields: object) -> list[tuple[str, float, float]]:
    row = sample(**fields)
    return [(one.name, one.begin_s - 1000, one.end_s - 1000) for one in stages_of(row, tries_of(row.tries, "it"))]


def test_the_stages_of_a_sample_follow_each_other() -> None:
    assert named() == [
        ("queued", 0, 10),
        ("starting", 10, 42),
        ("prefill", 42, 43),
        ("decode", 43, 48),
        ("paused", 44, 45),
        ("reward", 48, 49),
        ("commit", 49, 50),
        ("siblings", 50, 55),
        ("cut", 55, 60),
        ("train", 60, 70),
    ]
    assert {name for name, _, _ in [*named(), *named(first_token_s=0.0)]} == set(MEANING)


def test_a_first_token_that_nobody_told_is_no_stage() -> None:
    told = named(first_token_s=0.0)
    assert ("generate", 42, 48) in told
    assert {name for name, _, _ in told} & {"prefill", "decode"} == set()


def test_what_is_not_known_is_left_out() -> None:
    assert named(
        started_s=0.0, drawn_s=0.0, rewarded_s=0.0, committed_s=0.0, ready_s=0.0, cut_s=0.0, trained_s=0.0
    ) == [
        ("queued", 0, 10),
        ("starting", 10, 40),
    ]
    assert named(admitted_s=2000.0)[0] == ("starting", 10, 42), (
        "a clock that is wrong makes no stage of less than nothing"
    )


def test_the_lease_that_committed_a_sample_is_found_by_worker_and_time() -> None:
    tries = tries_of(TRIES, "it")
    assert own_try(sample(), tries) == tries[2]
    assert own_try(sample(committed_s=1015.0), tries) == tries[0]
    assert own_try(sample(worker="other"), tries) is None
