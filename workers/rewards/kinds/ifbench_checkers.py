"""Checkers of IFBench that the package has as they were before IFBench mended them, and what they are now.

slime takes IFBench as it is at the time; these are its verdicts of August 2026, but where the table of cases
(``tests/unit/workers/rewards/kinds/cases.py``) says why not. Importing this imports the package, which
``ifbench.load`` alone does: it has nothing fetched.

Each is built by the package's own ``build_description``.
"""

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

import nltk
from if_verifiable.ifbench import instructions, instructions_util

# Sentences are nltk's, as they are in IFBench; the package's own end at other places. They need its punkt_tab.
instructions_util.split_into_sentences = nltk.sent_tokenize

#: Words that stand for others: personal, possessive, reflexive, demonstrative, relative and indefinite pronouns.
_PRONOUNS = frozenset({
    "i", "me", "my", "mine", "myself", "we", "us", "our", "ours", "ourselves", "you", "your", "yours",
    "yourself", "yourselves", "he", "him", "his", "himself", "she", "her", "hers", "herself", "it", "its",
    "itself", "they", "them", "their", "theirs", "themselves", "this", "that", "these", "those", "who", "whom",
    "whose", "which", "what", "whoever", "whomever", "whatever", "whichever", "anybody", "anyone", "anything",
    "everybody", "everyone", "everything", "nobody", "nothing", "somebody", "someone", "something", "each",
    "either", "neither", "both", "all", "some", "any", "none",
})  # fmt: skip


class PersonNames(instructions.PersonNameCountChecker):  # type: ignore[misc]
    """Names are whole words: no Leo is in Leonardo."""

    def build_description(self, **kwargs: Any) -> str:
        said = str(super().build_description(**kwargs))
        # It names those that count, and nothing else does.
        self._names = set(re.findall(r"\w+", said.rpartition(":")[2]))
        return said

    def check_following(self, value: str) -> bool:
        return bool(len(self._names & set(re.findall(r"\w+", value))) >= self._num_person_names)


class Pronouns(instructions.PronounCountChecker):  # type: ignore[misc]
    """All kinds of pronouns count, in short forms too (you're)."""

    def check_following(self, value: str) -> bool:
        words = nltk.word_tokenize(value.replace("/", " ").lower())
        return bool(sum(word in _PRONOUNS for word in words) >= self._num_pronouns)


class KeywordInSentence(instructions.IncludeKeywordChecker):  # type: ignore[misc]
    """The keyword is a whole word."""

    def check_following(self, value: str) -> bool:
        sentences = nltk.sent_tokenize(value)
        at = int(self._keyword_position) - 1
        return at < len(sentences) and _has_word(self._keyword, sentences[at])


class KeywordAtPlace(instructions.KeywordSpecificPositionChecker):  # type: ignore[misc]
    """Punctuation is no word, and capitals are no matter."""

    def check_following(self, value: str) -> bool:
        sentences = nltk.sent_tokenize(value)
        if len(sentences) < self._n:
            return False
        words = [word for word in nltk.word_tokenize(sentences[self._n - 1]) if any(map(str.isalnum, word))]
        return len(words) >= self._m and _same(words[self._m - 1], self._keyword)


class SecondAndSecondToLast(instructions.WordsPositionChecker):  # type: ignore[misc]
    """A mark at the end is no word, and capitals are no matter."""

    def check_following(self, value: str) -> bool:
        words = nltk.word_tokenize(value)
        if words and words[-1] in string.punctuation:
            words.pop()
        return len(words) >= 2 and _same(words[1], self._keyword) and _same(words[-2], self._keyword)


class TitleCase(instructions.TitleCaseChecker):  # type: ignore[misc]
    """Words of one letter are looked at, too; what begins with no letter is none."""

    def check_following(self, value: str) -> bool:
        words = [word for word in nltk.word_tokenize(value) if word[0].isalpha()]
        return not any(
            word[0].islower() and (word[1:].islower() or word[1:].isupper() or len(word) == 1) for word in words
        )


class QuoteUnquote(instructions.QuoteExplanationChecker):  # type: ignore[misc]
    """An answer of marks alone has no quotation."""

    def check_following(self, value: str) -> bool:
        try:
            return bool(super().check_following(value))
        except IndexError:
            return True


class RepeatSpan(instructions.RepeatSpanChecker):  # type: ignore[misc]
    """Words of the prompt from one index to another, both included, as IFBench's prompts say; the first has index 0."""

    def build_description(self, *, n_start: int | None = None, n_end: int | None = None, **kwargs: Any) -> str:
        said = str(super().build_description(n_start=n_start, n_end=n_end, **kwargs))
        # Of 0 the package makes a number by chance.
        if n_start == 0:
            self._n_start = 0
        return said

    def check_following(self, value: str) -> bool:
        words = self._prompt_to_repeat.lower().split()
        return bool(value.lower().split() == words[self._n_start : self._n_end + 1])


def _has_word(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def _same(one: str, other: str) -> bool:
    return one.lower() == other.lower()


#: Instruction -> what checks it.
CHECKERS: Mapping[str, Callable[[str], Any]] = {
    "count:person_names": PersonNames,
    "count:pronouns": Pronouns,
    "format:quote_unquote": QuoteUnquote,
    "format:title_case": TitleCase,
    "repeat:repeat_span": RepeatSpan,
    "sentence:keyword": KeywordInSentence,
    "words:keywords_specific_position": KeywordAtPlace,
    "words:words_position": SecondAndSecondToLast,
}
