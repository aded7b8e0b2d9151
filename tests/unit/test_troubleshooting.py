"""docs/troubleshooting.md quotes what penstock says: each quotation must stand in the source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("console", "penstock", "producer", "workers", "buffer", "consumers")
#: Keys of the configuration, names of metrics and files of a run: no sentences.
NAME = re.compile(r"[\w./*\[\]:-]+")


def quotations() -> list[str]:
    """Quoted words of the first column of each table, in pieces between what differs from case to case."""
    found = []
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines():
        if line.startswith("| `"):
            quoted = [one for one in re.findall(r"`([^`]+)`", line.split("|")[1]) if not NAME.fullmatch(one)]
            found += [piece.strip() for one in quoted for piece in one.split("...") if len(piece.split()) > 1]
    return found


@pytest.fixture(scope="module")
def said() -> str:
    """All text in the source, with `{}` for what an f-string fills in."""
    texts = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append(
                        "".join(str(one.value) if isinstance(one, ast.Constant) else "" for one in node.values)
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.parametrize("quotation", quotations())
def test_what_is_quoted_is_said(quotation: str, said: str) -> None:
    assert quotation in said
