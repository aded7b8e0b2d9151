"""Count private dialect in names, docstrings, comments, messages and docs (docs/glossary.md has the terms to use).

    python -m tests.language            fails if a folder has more matches than its budget
    python -m tests.language --lower    writes the budgets of folders that have fewer matches now
    python -m tests.language --show DIR prints the matches of a folder

A budget only goes down. ``dialect`` counts lines that match :data:`DIALECT`; ``D401`` counts functions whose
docstring does not begin with an imperative verb, as Ruff decides.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGETS = Path(__file__).parent / "budgets.json"
PARTS = ("console", "producer", "workers", "buffer", "consumers", "penstock")
#: Words and phrases of the dialect, in any text.
WORDS = re.compile(
    r"\b(told|tells? of|heard|unheard|stands? still|goes on|in the (stead|place) of|is none|nobody|somebody|whoever"
    r"|of late|as told|told apart|let go|keeps? back|holds? up|mends?|mended|gives? up|by hand|at hand|what for"
    r"|the same of|drawn|is there|are there|are not there|is not there)\b",
    re.IGNORECASE,
)
#: First words of a docstring or comment that names no subject and no verb.
OPENING = re.compile(r"^\s*(\"\"\"|#:?|--)\s*(Of|As|Whose|That|Who|What|Where|For who)\b", re.IGNORECASE)
_LUA_AND_JS = re.compile(r"--.*$|//.*$|/\*.*|\".*?\"|'.*?'|`.*?`")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def matches(root: Path = ROOT) -> Iterator[tuple[str, int, str]]:
    """Yield (path, line number, text) of each line that matches, in product code and docs below ``root``."""
    files = [path for part in PARTS for path in (root / part).rglob("*") if path.suffix in (".py", ".lua", ".js")]
    files += [*(root / "docs").rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    for path in sorted(path for path in files if path.is_file()):
        found = {number: text for number, text in _texts(path) if WORDS.search(text) or OPENING.search(text)}
        yield from ((str(path.relative_to(root)), number, text.strip()) for number, text in sorted(found.items()))


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are prose or names."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _python_texts(source)
        return
    for number, line in enumerate(source.splitlines(), 1):
        yield number, line if path.suffix == ".md" else " ".join(_LUA_AND_JS.findall(line))


def _python_texts(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, _CAMEL.sub(" ", node.name).replace("_", " ")


def not_imperative(root: Path = ROOT) -> Iterator[str]:
    """Yield ``path:line`` of each function whose docstring does not begin with an imperative verb."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "D401", "--output-format", "json"]
    done = subprocess.run([*command, *PARTS], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise RuntimeError(f"Ruff failed: {done.stderr}")
    for one in json.loads(done.stdout):
        yield f"{Path(one['filename']).relative_to(root)}:{one['location']['row']}"


def counts(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return the number of matches by folder, then by kind (``dialect``, ``D401``)."""
    by_kind = {
        "dialect": Counter(str(Path(path).parent) for path, _, _ in matches(root)),
        "D401": Counter(str(Path(path).parent) for path in not_imperative(root)),
    }
    folders = sorted(set().union(*by_kind.values()))
    return {folder: {kind: by_kind[kind][folder] for kind in by_kind} for folder in folders}


def excess(found: dict[str, dict[str, int]], budgets: dict[str, dict[str, int]]) -> list[str]:
    """Return a sentence for each folder with more matches than its budget; a folder without a budget has none."""
    return [
        f"{folder}: {number} matches of {kind}, budget {most}; run `python -m tests.language --show {folder}`"
        for folder, kinds in found.items()
        for kind, number in kinds.items()
        if number > (most := budgets.get(folder, {}).get(kind, 0))
    ]


def lowered(found: dict[str, dict[str, int]], budgets: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the budgets, each lowered to the number of matches where that is smaller."""
    lower = {
        folder: {kind: min(most, found.get(folder, {}).get(kind, 0)) for kind, most in kinds.items()}
        for folder, kinds in budgets.items()
    }
    return {folder: kinds for folder, kinds in lower.items() if any(kinds.values())}
