"""The language check of `make check`: what it counts, and that budgets only go down."""

from pathlib import Path

import pytest

from tests.language import excess, lowered, matches


def found_in(folder: Path, name: str, text: str) -> list[int]:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for doc in ("README.md", "CONTRIBUTING.md"):
        (folder / doc).touch()
    return [number for _, number, _ in matches(folder)]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("buffer/a.py", "# Nobody waits.\nx = 1\n", [1]),
        ("buffer/a.py", '"""Return the seed.\n\nThe caller is told why.\n"""\n', [3]),
        ("buffer/a.py", '"""Of one engine."""\n', [1]),
        ("buffer/a.py", "def told_why() -> None: ...\nclass WasHeard: ...\n", [1, 2]),
        ("buffer/a.py", 'raise ValueError(f"it goes on at {1}")\n', [1]),
        ("buffer/a.py", "drawn = 1\n", []),
        ("buffer/a.py", '"""Return the oldest version that a batch may contain."""\n', []),
        ("penstock/protocol/lua/a.lua", "-- whoever leads\nlocal told = 1\n", [1]),
        ("console/web/assets/a.js", 'const a = "kept by hand"; // told\n', [1]),
        ("docs/a.md", "Waits are shown.\nThe trainer is told.\n", [2]),
        ("tests/a.py", "# Nobody waits.\n", []),
    ],
)
def test_dialect_is_counted_by_line(tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    assert found_in(tmp_path, name, text) == lines


def test_a_folder_over_its_budget_is_reported_with_the_command_that_shows_its_matches() -> None:
    found = {"buffer": {"dialect": 3, "D401": 0}, "workers/new": {"dialect": 1, "D401": 0}}

    said = excess(found, {"buffer": {"dialect": 2, "D401": 0}})

    assert said == [
        "buffer: 3 matches of dialect, budget 2; run `python -m tests.language --show buffer`",
        "workers/new: 1 matches of dialect, budget 0; run `python -m tests.language --show workers/new`",
    ]


def test_budgets_only_go_down() -> None:
    budgets = {"buffer": {"dialect": 2, "D401": 5}, "gone": {"dialect": 4, "D401": 0}}

    lower = lowered({"buffer": {"dialect": 3, "D401": 1}, "new": {"dialect": 9, "D401": 9}}, budgets)

    assert lower == {"buffer": {"dialect": 2, "D401": 1}}
