"""T18: what a row of an evaluation says of the versions that generated it."""

import fcntl
from pathlib import Path
from typing import Any

import pytest

from penstock.history.eval_rows import add_rows, pass_rates, read_rows, summarize
from penstock.records.manifest import Row
from tests.batch_factory import make_manifest


def row(job: str, drawn: dict[int, int], reward: float = 1.0) -> Row:
    """A sample of an evaluation: tokens by the version that drew them."""
    total, several = sum(drawn.values()), len(drawn) > 1
    return Row(
        job, 0, "t", "s", 0, 0, total + 2, 2, total, total, min(drawn), max(drawn), min(drawn), reward, "completed",
        loss_versions=[[version, tokens] for version, tokens in drawn.items()] if several else [],
    )  # fmt: skip


def rows_of(*rows: Row, asked: int | None = None) -> list[dict[str, Any]]:
    """``asked``: prompts of the evaluation; None: those that were answered."""
    return list(summarize(make_manifest(list(rows)).samples(), len(rows) if asked is None else asked))


def test_T18_every_row_tells_oldest_newest_and_the_share_of_the_asked_version() -> None:
    """Weights that changed in place: 45 tokens by version 1, 63 by 2, 292 by 3."""
    first, second = rows_of(
        row("held/1/0", {1: 45, 2: 63, 3: 192}), row("held/1/1", {3: 100}), row("other/1/0", {1: 8})
    )
    assert (first["version"], first["oldest"], first["newest"]) == (1, 1, 3)
    assert first["asked_share"] == pytest.approx(45 / 400)
    assert (second["dataset"], second["oldest"], second["newest"], second["asked_share"]) == ("other", 1, 1, 1.0)


def test_T18_a_token_whose_version_is_not_proven_is_of_none() -> None:
    """It carries the oldest version that may have drawn it, which is the one that was asked."""
    sure, unsure = row("held/1/0", {1: 100}), row("held/1/1", {1: 60, 2: 40})
    unsure.num_unproven = 30
    [found] = rows_of(sure, unsure)
    assert found["asked_share"] == pytest.approx((100 + 30) / 200)


def test_T18_the_share_of_the_requested_version_is_never_more_than_is_proven() -> None:
    """A row counts unproven tokens of all versions together: they may all be of the requested one."""
    mixed = row("held/2/0", {2: 60, 3: 40})
    mixed.num_unproven = 20
    [found] = rows_of(mixed)
    assert found["asked_share"] == pytest.approx(0.4), "0.6 if those of version 3 are the unproven ones"
    later = row("held/2/0", {3: 40})
    later.num_unproven = 20
    [found] = rows_of(later)
    assert found["asked_share"] == 0.0


def answers(job: str, *rewards: float) -> list[Row]:
    made = [row(job, {1: 10}) for _ in rewards]
    for k, (one, reward) in enumerate(zip(made, rewards, strict=True)):
        one.k, one.reward = k, reward
    return made


def test_chances_to_pass_are_unbiased_means_over_prompts() -> None:
    """Of 4 answers 1 is right: of 2 drawn from them it is among them in 3 of 6 cases."""
    [found] = rows_of(*answers("held/1/0", 0, 1, 0, 0), *answers("held/1/1", 1, 1, 1, 1))
    rates = {key: value for key, value in found.items() if key.startswith(("pass@", "maj@"))}
    assert rates == {"pass@1": (0.25 + 1) / 2, "pass@2": (0.5 + 1) / 2, "pass@4": 1.0}


@pytest.mark.parametrize(
    ("rewards", "rates"),
    [([], {}), ([[1.0]], {}), ([[1, 1, 1], [0.5, 0.5]], {1: 0.5, 2: 0.5})],
    ids=["nothing", "one answer each", "as many as each prompt has"],
)
def test_chances_to_pass_need_several_answers(rewards: list[list[float]], rates: dict[int, float]) -> None:
    rows = [one for prompt, given in enumerate(rewards) for one in answers(f"held/1/{prompt}", *given)]
    assert pass_rates(rows) == rates


def test_T18_tokens_that_a_filter_masked_are_nobody_elses() -> None:
    """10 of 100 tokens bear no loss, and only of the others is it told who drew them."""
    one, other = row("held/1/0", {1: 90}), row("held/1/1", {1: 45, 2: 45})
    one.num_generated = other.num_generated = 100
    [found] = rows_of(one, other, asked=4)
    assert found["asked_share"] == pytest.approx(135 / 180)
    assert (found["prompts"], found["asked"]) == (2, 4)


def test_T18_an_evaluation_is_one_record_with_the_mean_version_of_its_tokens() -> None:
    """Requested of version 11, of whose tokens it generated one in ten."""
    (found,) = rows_of(row("held/11/0", {11: 10, 12: 30}), row("held/11/1", {14: 60}))
    assert found["mean_version"] == pytest.approx((11 * 10 + 12 * 30 + 14 * 60) / 100)
    assert (found["version"], found["oldest"], found["newest"]) == (11, 11, 14)
    assert found["asked_share"] == pytest.approx(0.1)


def test_T18_a_row_is_written_once_whatever_number_of_readers_write_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "eval.jsonl"
    first, second = rows_of(row("held/1/0", {1: 8}), row("other/1/0", {1: 8}))
    add_rows(path, [first])
    add_rows(path, [first | {"time_s": 0.0}, second])
    assert read_rows(path) == [first, second]
    with path.open() as other_reader:
        fcntl.flock(other_reader, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            add_rows(path, [first])
