"""Check length, sentences and paths of the pages, and the number and names of benchmark results.

    python -m tests.pages            fails with a sentence for each bound that is exceeded
    python -m tests.pages --long     prints the sentences that are longer than :data:`SENTENCE_WORDS`

A word has a letter or a digit; in a sentence a piece of code is one word. A sentence ends at a full stop, a cell of a
table is a paragraph of its own, and blocks of code have no sentences.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Pages that list all that the code has.
REFERENCE = ("docs/configuration.md", "docs/metrics.md")
#: Most words of the pages for users (without the reference), of those for maintainers, and of all together.
USER_WORDS, MAINTAINER_WORDS, ALL_WORDS = 20_000, 13_000, 45_000
SENTENCE_WORDS = 30
#: Most sentences that are longer, in all pages without the reference. It only goes down.
LONG_SENTENCES = 5
CHANGELOG_LINES = 100
RESULT_FILES = 60

_WORD = re.compile(r"\w")
#: A path from the root of the checkout, in backticks: to a folder, or to a file of source or text.
_PATH = re.compile(r"`((?!runs/)(?:[\w.-]+/)+(?:[\w-]+/|[\w-]+\.(?:py|lua|js|md|yaml|sh|json|jsonl)))`")
_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: Where a paragraph begins: an item of a list, a row of a table, a heading, an empty line.
_BEGIN = re.compile(r"\s*(?:[-*] |\d+\. |\||#|$)")


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return the text of each page by its path: docs, README and CONTRIBUTING."""
    paths = [*sorted((root / "docs").rglob("*.md")), root / "README.md", root / "CONTRIBUTING.md"]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}


def words(text: str) -> int:
    """Return the number of words."""
    return sum(_WORD.search(word) is not None for word in text.split())


def is_for_maintainers(page: str) -> bool:
    """Return whether a page counts as one for maintainers: docs/internals, the glossary and the front of the tree."""
    return page.startswith("docs/internals/") or page in ("docs/glossary.md", "README.md", "CONTRIBUTING.md")


def long_sentences(text: str) -> list[str]:
    """Return the sentences of a page that have more than :data:`SENTENCE_WORDS` words."""
    found = []
    for paragraph in _paragraphs(_BLOCK.sub("", text)):
        plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", paragraph))
        found += [one for one in re.split(r"[.!?](?:\s|$)", plain) if words(one) > SENTENCE_WORDS]
    return found


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if _BEGIN.match(line):
            yield " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from line.split("|")
        elif not line.startswith(("#", "    ")):
            lines.append(line.strip())


def missing_paths(root: Path = ROOT) -> list[str]:
    """Return a sentence for each file or folder that a page for maintainers names and that does not exist."""
    texts = {page: text for page, text in pages(root).items() if is_for_maintainers(page)}
    return [
        f"{page}: {path} does not exist"
        for page, text in texts.items()
        for path in sorted(set(_PATH.findall(text)))
        if not (root / path).exists()
    ]


def misnamed_results(folder: Path) -> list[str]:
    """Return a sentence for each result whose name does not begin with the hardware that produced it."""
    found = []
    for path in sorted(folder.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        gpu = re.search(r"NVIDIA (H\d+)", text)
        hardware = gpu[1].lower() if gpu else f"cpu{json.loads(text)['machine']['cores']}"
        if not re.match(rf"{hardware}(x\d+)?-", path.name):
            found.append(f"{path.name} was produced on {hardware}: begin its name with that")
    return found


def excess(root: Path = ROOT) -> list[str]:
    """Return a sentence for each bound that the pages of a checkout exceed."""
    texts = pages(root)
    users = {page: text for page, text in texts.items() if page not in REFERENCE and not is_for_maintainers(page)}
    results = root / "benchmarks" / "results"
    counted = (
        ("words in docs for users", sum(map(words, users.values())), USER_WORDS),
        ("words for maintainers", sum(words(text) for page, text in texts.items() if is_for_maintainers(page)),
         MAINTAINER_WORDS),
        ("words in all pages", sum(map(words, texts.values())), ALL_WORDS),
        (f"sentences of more than {SENTENCE_WORDS} words; `python -m tests.pages --long` prints them",
         sum(len(long_sentences(text)) for page, text in texts.items() if page not in REFERENCE), LONG_SENTENCES),
        ("lines in CHANGELOG.md", len((root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()),
         CHANGELOG_LINES),
        ("files in benchmarks/results", len([path for path in results.rglob("*") if path.is_file()]), RESULT_FILES),
    )  # fmt: skip
    found = [f"{what}: {number:,}, at most {most:,}" for what, number, most in counted if number > most]
    return found + missing_paths(root) + misnamed_results(results)


def main() -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description="Check the pages.")
    parser.add_argument("--long", action="store_true", help="print the long sentences")
    if parser.parse_args().long:
        for page, text in pages().items():
            for sentence in long_sentences(text) if page not in REFERENCE else []:
                print(f"{page}: {sentence.strip()}")
        return 0
    for sentence in (exceeding := excess()):
        print(sentence, file=sys.stderr)
    return 1 if exceeding else 0


if __name__ == "__main__":
    sys.exit(main())
