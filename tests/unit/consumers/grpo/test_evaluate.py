"""T18: what an evaluation tells of the versions that drew it, and when it may end training."""

import logging
from pathlib import Path
from typing import Any

import pytest

from consumers.grpo import evaluate
from consumers.grpo.evaluate import Evaluation, summarize
from consumers.grpo.scores import pass_rates
from penstock.config import Config
from penstock.errors import PenstockError, WaitTimeout
from penstock.protocol.records.manifest import Row
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
    return list(summarize(make_manifest(list(rows)), len(rows) if asked is None else asked))


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


@pytest.fixture
def evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluation:
    monkeypatch.setattr(evaluate, "Subscriber", lambda *_: None)
    config = Config.model_validate(
        {
            "run": "r",
            "redis": {"url": "redis://127.0.0.1:1"},
            "model": {"path": str(tmp_path)},
            "data": {
                "train": [{"name": "d", "path": "d.jsonl"}],
                "eval": [{"name": name, "path": f"{name}.jsonl"} for name in ("held", "other")],
            },
        }
    )
    return Evaluation(config, tmp_path / "eval.jsonl")


def test_T18_only_what_the_asked_version_drew_ends_training(
    evaluation: Evaluation, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation.remember(rows_of(row("held/1/0", {1: 94, 2: 6}), row("other/1/0", {1: 100})))
    with caplog.at_level(logging.WARNING):
        assert not evaluation.has_reached(0.9)
        assert not evaluation.has_reached(0.9)
    (said,) = caplog.messages
    assert "version 1 is at 1.000, and does not end training: it drew 94 %" in said
    assert "data.eval_pinned" in said
    evaluation.remember(rows_of(row("held/2/0", {2: 95, 3: 5}), row("other/2/0", {2: 10}, reward=0.0)))
    assert not evaluation.has_reached(0.9)
    assert evaluation.has_reached(0.5)


def test_T18_tokens_that_a_filter_masked_are_nobody_elses() -> None:
    """10 of 100 tokens bear no loss, and only of the others is it told who drew them."""
    one, other = row("held/1/0", {1: 90}), row("held/1/1", {1: 45, 2: 45})
    one.num_generated = other.num_generated = 100
    [found] = rows_of(one, other, asked=4)
    assert found["asked_share"] == pytest.approx(135 / 180)
    assert (found["prompts"], found["asked"]) == (2, 4)


def test_an_evaluation_most_of_whose_prompts_are_missing_ends_nothing(
    evaluation: Evaluation, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation.remember(rows_of(row("held/1/0", {1: 10}), asked=10))
    with caplog.at_level(logging.WARNING):
        assert not evaluation.has_reached(0.5)
    assert "version 1 is at 1.000, and does not end training: 10 % of its prompts were answered" in caplog.text
    evaluation.remember(rows_of(row("held/2/0", {2: 10}), asked=1))
    assert evaluation.has_reached(0.5)


def test_a_row_that_does_not_tell_its_versions_ends_nothing(evaluation: Evaluation) -> None:
    evaluation.remember([{"dataset": "held", "version": 1, "accuracy": 1.0}])
    assert not evaluation.has_reached(0.5)


def test_the_last_evaluation_is_waited_for_until_every_dataset_has_its_row_its_limit_or_a_stop(
    evaluation: Evaluation,
) -> None:
    evaluation.remember(rows_of(row("held/1/0", {1: 10})))
    with pytest.raises(WaitTimeout, match=r"did not finish within data\.eval_timeout_s = 0\.01"):
        evaluation.wait(1, 0.01)
    assert evaluation.wait(1, None, stopped=lambda: True) is None
    evaluation.remember(rows_of(row("other/1/0", {1: 10}, reward=0.0)))
    assert evaluation.wait(1, None) == {"held": 1.0, "other": 0.0}


def test_an_evaluation_that_is_over_without_an_answer_to_a_dataset_is_told_of_and_not_waited_for(
    evaluation: Evaluation, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation.remember(rows_of(row("held/1/0", {1: 10})))
    evaluation.end(1)
    with pytest.raises(PenstockError, match="Version 1 has no accuracy on other, and none is to come"):
        evaluation.wait(1, None)
    assert "Version 1 has no accuracy on other" in caplog.text
    with pytest.raises(WaitTimeout, match="0 of 2 datasets did, not held, other") as told:
        evaluation.wait(2, 0.01)
    assert (told.value.count, told.value.cause) == (0, "the evaluation of version 2 on held, other")
