"""The code blocks of the pages, as a reader sees them: fenced, or indented by four blanks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/internals/*.md", "examples/*/README.md")


@dataclass(frozen=True, slots=True)
class Block:
    """One block."""

    page: str
    #: Of its first line, from 1.
    line: int
    language: str
    text: str

    @property
    def key(self) -> str:
        """How the list of the tests names it: its page and its first line."""
        return f"{self.page}: {self.text.strip().splitlines()[0].strip()}"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """All of them, in the order of pages and lines."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return [block for path in pages for block in _of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))]


def _of(page: str, text: str) -> Iterator[Block]:
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if fence := re.match(r"```(\w*)$", lines[at]):
            end = lines.index("```", at + 1)
            yield Block(page, at + 2, fence[1], "\n".join(lines[at + 1 : end]) + "\n")
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
                end += 1
            yield Block(page, at + 1, "", "\n".join(line[4:] for line in lines[at:end]).strip() + "\n")
            at = end
        else:
            at += 1
