"""The page of rules: each has its formula or sentence, a source, and tests that are there; codes stay off messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("console", "penstock", "producer", "workers", "buffer", "consumers", "examples")
RULES = [f"T{number}" for number in range(1, 19)]
PAGE = (ROOT / "docs" / "internals" / "truth.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (T\d+) [^\n]+\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
CODE = re.compile(r"\bT(1[0-8]|[1-9])\b|\bdesign\.md\b")


def names_of_tests() -> set[str]:
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return found


def test_every_rule_has_its_section_in_order() -> None:
    assert list(SECTIONS) == RULES


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_names_its_source_and_tests_that_are_there(rule: str) -> None:
    guards = re.findall(r"`(test_\w+)`", SECTIONS[rule].partition("Guarded by")[2])

    assert "- Source: " in SECTIONS[rule]
    assert guards, "no test guards it"
    assert [name for name in guards if name not in names_of_tests()] == []


def test_rules_that_tests_name_are_on_the_page() -> None:
    named = {f"T{number}" for name in names_of_tests() for number in re.findall(r"_T(\d+)(?=_)", name)}

    assert named <= set(RULES)


def told_to_users(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings that are no docstrings, and docstrings of commands, which are their help."""
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        decorators = getattr(node, "decorator_list", [])
        if isinstance(first, ast.Expr) and not any(".command" in ast.unparse(one) for one in decorators):
            docstrings.add(id(first.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_no_message_and_no_help_speaks_in_codes() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in paths
        for line, text in told_to_users(ast.parse(path.read_text(encoding="utf-8")))
        if CODE.search(text)
    ]

    assert found == [], "say it in words: the rules have a page, but who reads a message is in trouble"


def test_settings_and_pages_that_name_a_rule_say_where_it_stands() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.yaml"))]
    lines = [(path, line) for path in pages for line in path.read_text("utf-8").splitlines()]
    configs = sorted((ROOT / "penstock" / "config").glob("*.py"))
    assert configs
    lines += [(path, line) for path in configs for line in path.read_text("utf-8").splitlines() if "#" in line]

    assert [f"{path.name}: {line}" for path, line in lines if CODE.search(line) and "truth" not in line] == []


def test_pages_that_are_named_are_there() -> None:
    named = re.compile(r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.md)\b")
    texts = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    texts += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not any((base / name).is_file() for base in (path.parent, ROOT, ROOT / "docs"))
    ]

    assert missing == []
