"""Words of texts, as a part indexes and searches them.

A word is a run of letters and digits, case-folded; in scripts that write no spaces between words (Chinese, Japanese)
each character is a word.
"""

import re
import unicodedata

#: Most characters of a word, and most characters of a text that are indexed.
MAX_WORD, MAX_INDEXED = 64, 1024 * 1024

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_ASKED = re.compile(r'"([^"]*)"|(\S+)')


def indexed(text: str) -> str:
    """Return the words of a text for the index, separated by spaces; '' if it has none."""
    text = text[:MAX_INDEXED]
    if text.isascii() and "\0" not in text and max(map(len, text.split()), default=0) <= MAX_WORD:
        # The index tokenizes such a text as ``words_of`` does, in a tenth of the time.
        return text
    return " ".join(words_of(text))


def words_of(text: str) -> list[str]:
    """Return the distinct words of a text, folded."""
    return list(dict.fromkeys(word[:MAX_WORD] for word in _WORD.findall(folded(text[:MAX_INDEXED]))))


def folded(text: str) -> str:
    """Normalize a text for comparisons: case, Unicode form, and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def phrases_of(asked: str) -> list[str]:
    """Return the phrases between quotation marks, folded."""
    return [folded(phrase) for phrase, _ in _ASKED.findall(asked) if folded(phrase)]


def match_of(asked: str) -> str:
    """Return the FTS5 query for texts with every word; a last ``*`` matches any ending. '' without words."""
    terms = []
    for phrase, word in _ASKED.findall(asked):
        found = words_of(phrase or word)
        terms += [f'"{one}"' for one in found]
        if word.endswith("*") and found:
            terms[-1] += "*"
    return " AND ".join(dict.fromkeys(terms))
