"""Words of texts: what the index of a part holds, and what is asked of it.

A word is a run of letters and digits, whatever its case; of scripts that write no blanks between words (Chinese,
Japanese) each letter is one.
"""

import re
import unicodedata

#: Most characters of a word, and most characters of a text that are indexed.
MAX_WORD, MAX_INDEXED = 64, 1024 * 1024

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_ASKED = re.compile(r'"([^"]*)"|(\S+)')


def indexed(text: str) -> str:
    """What the index of words is given of a text; '' where there is none in it."""
    text = text[:MAX_INDEXED]
    if text.isascii() and "\0" not in text and max(map(len, text.split()), default=0) <= MAX_WORD:
        # The index takes such a text apart as ``words_of`` does, in a tenth of the time.
        return text
    return " ".join(words_of(text))


def words_of(text: str) -> list[str]:
    """The words of a text, each once, as they are compared."""
    return list(dict.fromkeys(word[:MAX_WORD] for word in _WORD.findall(folded(text[:MAX_INDEXED]))))


def folded(text: str) -> str:
    """A text as texts are compared: whatever its case and form, blanks as one."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def phrases_of(asked: str) -> list[str]:
    """What stands between quotation marks, folded: it must occur as it stands."""
    return [folded(phrase) for phrase, _ in _ASKED.findall(asked) if folded(phrase)]


def match_of(asked: str) -> str:
    """What FTS5 is asked for texts that hold every word; a last ``*`` takes any ending. '' where it holds no word."""
    terms = []
    for phrase, word in _ASKED.findall(asked):
        found = words_of(phrase or word)
        terms += [f'"{one}"' for one in found]
        if word.endswith("*") and found:
            terms[-1] += "*"
    return " AND ".join(dict.fromkeys(terms))
