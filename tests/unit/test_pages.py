"""The check of pages in `make check`: what it counts, and what it reports."""

from pathlib import Path

import pytest

from tests import pages

LONG = "word " * 31


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with short pages, a changelog and a result."""
    for name in ("docs/internals", "benchmarks/results"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/a.md", "docs/internals/b.md"):
        (tmp_path / name).write_text("Short.\n")
    (tmp_path / "benchmarks/results/cpu2-scale.json").write_text('{"machine": {"cores": 2}}')
    return tmp_path


def test_pages_within_all_bounds_are_accepted(checkout: Path) -> None:
    assert pages.excess(checkout) == []


@pytest.mark.parametrize(
    ("page", "reported"),
    [
        ("docs/a.md", ["words in docs for users: 4, at most 3"]),
        ("docs/internals/b.md", ["words for maintainers: 8, at most 7"]),
        ("README.md", ["words for maintainers: 8, at most 7"]),
    ],
)
def test_words_are_counted_for_users_and_for_maintainers(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, page: str, reported: list[str]
) -> None:
    for path in ("README.md", "CONTRIBUTING.md", "docs/a.md", "docs/internals/b.md"):
        (checkout / path).write_text("one | two\n")
    (checkout / page).write_text("one two - `three` four\n")
    monkeypatch.setattr(pages, "USER_WORDS", 3)
    monkeypatch.setattr(pages, "MAINTAINER_WORDS", 7)

    assert pages.excess(checkout) == reported


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (LONG, 1),
        (f"{LONG}. {LONG}.", 2),
        ("word\n" * 31, 1),
        (f"| {'word ' * 20} | {'word ' * 20} |", 0),
        (f"- {'word ' * 20}\n- {'word ' * 20}", 0),
        (f"{'word ' * 20}\n\n{'word ' * 20}", 0),
        (f"`{LONG}`", 0),
        (f"```\n{LONG}\n```", 0),
        (f"# {LONG}", 0),
        ("word " * 30, 0),
    ],
)
def test_a_sentence_is_long_by_its_words(text: str, number: int) -> None:
    assert len(pages.long_sentences(text)) == number


@pytest.mark.parametrize(
    ("name", "text", "reported"),
    [
        ("h200-a.json", '{"machine": {"gpus": ["NVIDIA H200, 143771 MiB"]}}', []),
        ("h200x2-a.json", '{"machine": {"gpus": ["NVIDIA H200", "NVIDIA H200"]}}', []),
        ("h200-a.json", '{"machine": {"gpus": ["NVIDIA H100"]}}',
         ["h200-a.json was produced on h100: begin its name with that"]),
        ("scale.json", '{"machine": {"cores": 4}}', ["scale.json was produced on cpu4: begin its name with that"]),
    ],
)  # fmt: skip
def test_a_result_is_named_by_its_hardware(checkout: Path, name: str, text: str, reported: list[str]) -> None:
    (checkout / "benchmarks/results" / name).write_text(text)

    assert pages.misnamed_results(checkout / "benchmarks/results") == reported


def test_a_long_changelog_and_many_results_are_reported(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("line\n" * 101)
    for number in range(60):
        (checkout / f"benchmarks/results/{number}.md").touch()

    assert pages.excess(checkout) == [
        "lines in CHANGELOG.md: 101, at most 100",
        "files in benchmarks/results: 61, at most 60",
    ]


@pytest.mark.parametrize("path", ["buffer/none.py", "docs/none/", "docs/internals/none.md"])
def test_a_path_that_does_not_exist_is_reported_on_pages_for_maintainers(checkout: Path, path: str) -> None:
    (checkout / "docs/a.md").write_text(f"`{path}`\n")
    (checkout / "CONTRIBUTING.md").write_text(f"`{path}`, `docs/a.md`, `docs/`, `JOB/k`, `state.py`\n")

    assert pages.excess(checkout) == [f"CONTRIBUTING.md: {path} does not exist"]
