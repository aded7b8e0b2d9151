"""Samples and evaluations on the page, of a run whose Redis is gone."""

from pathlib import Path
from typing import Any

import pytest

from penstock.history.part import parts_of
from penstock.history.row import Use
from penstock.history.writer import HistoryWriter
from tests.unit.console.web.run_files import make_run
from tests.unit.console.web.test_pages import HOSTILE, ask
from tests.unit.penstock.history.rows import row

ANSWER = HOSTILE.replace("\ud800", "")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two prompts twice each, one with hostile words, and an evaluation of versions 1 and 2."""
    folder = make_run(tmp_path)
    writer = HistoryWriter(folder / "history", 1, max_bytes=2**30)
    trained = [row(f"math/0/{line}", k, reward=line + k / 4) for line in range(2) for k in range(2)]
    writer.write(trained, [Use(one.job, one.k, "policy", 7, version=5, staleness=2, loss_tokens=2) for one in trained])
    writer.write([row("math/1/0", answer=ANSWER, reward=-1.0, fate="filtered", reason="zero_std")])
    writer.write([row(f"held/{v}/{n}", lane="eval", reward=v / 2, answer=f"by {v}") for v in (1, 2) for n in range(3)])
    writer.close()
    return tmp_path


def ids(runs: Path, **asked: Any) -> list[str]:
    return [one["id"] for one in ask(runs, "/runs/demo/samples", **asked)["rows"]]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"dataset": "math", "sort": "reward"}, ["math/0/1/1", "math/0/1/0", "math/0/0/1", "math/0/0/0", "math/1/0/0"]),
        ({"dataset": "math", "sort": "-reward", "limit": 1}, ["math/1/0/0"]),
        ({"batch": 7, "sort": "reward", "limit": 1}, ["math/0/1/1"]),
        ({"job": "math/0/0", "sort": "-recorded"}, ["math/0/0/0", "math/0/0/1"]),
        ({"fate": "filtered"}, ["math/1/0/0"]),
        ({"text": "onerror"}, ["math/1/0/0"]),
        ({"text": "nowhere"}, []),
    ],
    ids=str,
)
def test_samples_are_found(runs: Path, asked: dict[str, Any], wanted: list[str]) -> None:
    assert ids(runs, **asked) == wanted


def test_pages_of_samples_hold_each_once(runs: Path) -> None:
    found: list[str] = []
    page = ask(runs, "/runs/demo/samples", limit=4)
    while True:
        found += [one["id"] for one in page["rows"]]
        if page["next"] is None:
            break
        page = ask(runs, "/runs/demo/samples", limit=4, after=page["next"])
    assert (len(found), len(set(found))) == (11, 11)


def test_a_sample_is_shown_with_its_tokens_and_uses(runs: Path) -> None:
    found = ask(runs, "/runs/demo/sample", id="math/0/1/1")
    assert (found["reward"], found["fate"], found["num_left"]) == (1.25, "trained", 0)
    assert found["uses"] == [{"subscription": "policy", "batch": 7, "version": 5, "staleness": 2, "loss_tokens": 2}]
    assert len(found["drawn"]) == found["num_generated"]
    assert found["drawn"][0].keys() == {"at", "token", "logprob", "version", "loss", "text"}
    assert {one["text"] for one in found["drawn"]} == {None}, "the run names no model"
    assert ask(runs, "/runs/demo/sample", id="math/1/0/0")["answer"] == ANSWER


def test_versions_are_compared_on_one_prompt(runs: Path) -> None:
    scores = ask(runs, "/runs/demo/evals")["rows"]
    assert [(one["version"], one["prompts"], one["reward_mean"]) for one in scores] == [(1, 3, 0.5), (2, 3, 1.0)]
    [newest] = ask(runs, "/runs/demo/categories", dataset="held")["rows"]
    assert (newest["version"], newest["category"], newest["reward_mean"]) == (2, "(none)", 1.0)
    answers = ask(runs, "/runs/demo/answers", dataset="held", line=1)["rows"]
    assert [(one["version"], one["answer"]) for one in answers] == [(1, "by 1"), (2, "by 2")]
    assert ask(runs, "/runs/demo/answers", dataset="none", line=1)["rows"] == []


def test_the_newest_batch_is_shown_by_its_ends(runs: Path) -> None:
    found = ask(runs, "/runs/demo/newest")
    assert (found["batch"], found["subscription"], found["version"], found["there"]) == (7, "policy", 5, True)
    # One of a group: it is its best, or its worst.
    assert [one["id"] for one in found["best"]] == ["math/0/1/1", "math/0/0/1"]
    assert [one["id"] for one in found["worst"]] == ["math/0/0/0", "math/0/1/0"]


def test_a_batch_whose_answers_are_rewarded_alike_has_one_end(tmp_path: Path) -> None:
    writer = HistoryWriter(make_run(tmp_path) / "history", 1, max_bytes=2**30)
    writer.write([row("math/0/1", reward=1.0)], [Use("math/0/1", 0, "policy", 3, version=2, staleness=0)])
    writer.close()
    found = ask(tmp_path, "/runs/demo/newest")
    assert ([one["id"] for one in found["best"]], found["worst"]) == (["math/0/1/0"], [])


def test_a_run_that_trained_nothing_has_no_newest_batch(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert ask(tmp_path, "/runs/demo/newest")["batch"] is None


def prompts(runs: Path, **asked: Any) -> dict[str, Any]:
    return ask(runs, "/runs/demo/prompts", dataset="held", **asked)


def test_each_prompt_is_laid_over_the_versions(runs: Path) -> None:
    found = prompts(runs)
    assert (found["versions"], found["total"], found["next"]) == ([1, 2], 3, None)
    assert [(one["line"], one["rewards"]) for one in found["rows"]] == [(n, [0.5, 1.0]) for n in range(3)]
    assert found["rows"][0]["prompt"] == row("held/1/0").prompt


@pytest.mark.parametrize(
    ("order", "lines"), [("", [1, 0, 2]), ("hardest", [0, 2, 1]), ("unlearned", [1, 0, 2]), ("line", [0, 1, 2])]
)
def test_prompts_are_put_in_order_by_how_they_are_answered(tmp_path: Path, order: str, lines: list[int]) -> None:
    writer = HistoryWriter(make_run(tmp_path) / "history", 1, max_bytes=2**30)
    rewards = {0: (0.1, 0.2), 1: (1.0, 0.0), 2: (0.0, 0.4)}
    writer.write([row(f"held/{v}/{n}", lane="eval", reward=rewards[n][v]) for n in rewards for v in (0, 1)])
    writer.close()
    assert [one["line"] for one in prompts(tmp_path, order=order)["rows"]] == lines
    assert prompts(tmp_path, after=2)["rows"][0]["line"] == prompts(tmp_path)["rows"][2]["line"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("sample?id=math/9/9/9", 404),
        ("sample?id=x", 400),
        ("sample", 400),
        ("samples?version=x", 400),
        ("samples?version=99999999999999999999", 400),
        ("samples?least_reward=nan", 400),
        ("samples?sort=cats", 400),
        ("samples?after=x", 400),
        ("samples?text=!", 400),
        ("answers?dataset=held&line=x", 400),
        ("prompts?dataset=held&order=cats", 400),
        ("prompts?dataset=held&after=x", 400),
        ("prompts", 400),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(runs: Path, path: str, status: int) -> None:
    path, _, query = path.partition("?")
    found = ask(runs, f"/runs/demo/{path}", **dict(one.split("=") for one in query.split("&") if query))
    assert (found["status"], found["error"][-1]) == (status, ".")


def test_a_damaged_part_is_told_of_and_the_page_goes_on(runs: Path) -> None:
    folder = runs / "demo" / "history"
    (name,) = parts_of(folder)
    name.path(folder).write_bytes(b"x" * 5000)
    found = ask(runs, "/runs/demo/samples")
    assert (found["rows"], len(found["problems"])) == ([], 1)
    found = ask(runs, "/runs/demo/newest")
    assert (found["batch"], len(found["problems"])) == (None, 1)


def test_a_run_without_a_history_says_so(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert ask(tmp_path, "/runs/demo/samples") == {
        "rows": [],
        "next": None,
        "there": False,
        "problems": [],
        "status": 200,
    }
    assert ask(tmp_path, "/runs/demo/evals")["there"] is False
