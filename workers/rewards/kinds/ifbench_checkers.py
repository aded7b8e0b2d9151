"""Checkers of IFBench that were corrected after the release of the package, in their corrected form.

slime uses IFBench's current version; these are its verdicts of August 2026, except where the table of cases
(``tests/unit/workers/rewards/kinds/cases.py``) says why not. Importing this module imports the package, which only
``ifbench.load`` does, with downloads disabled.

Each is built by the package's own ``build_description``.
"""

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

import nltk
from if_verifiable.ifbench import instructions, instructions_util

# Sentences are nltk's, as in IFBench; the package's own end elsewhere. They need its punkt_tab.
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
    """Match names as whole words: Leonardo does not contain Leo."""

    def build_description(self, **kwargs: Any) -> str:
        said = str(super().build_description(**kwargs))
        # Only the description lists the names that count.
        self._names = set(re.findall(r"\w+", said.rpartition(":")[2]))
        return said

    def check_following(self, value: str) -> bool:
        return bool(len(self._names & set(re.findall(r"\w+", value))) >= self._num_person_names)


class Pronouns(instructions.PronounCountChecker):  # type: ignore[misc]
    """Count all kinds of pronouns, in short forms too (you're)."""

    def check_following(self, value: str) -> bool:
        words = nltk.word_tokenize(value.replace("/", " ").lower())
        return bool(sum(word in _PRONOUNS for word in words) >= self._num_pronouns)


class KeywordInSentence(instructions.IncludeKeywordChecker):  # type: ignore[misc]
    """Match the keyword as a whole word."""

    def check_following(self, value: str) -> bool:
        sentences = nltk.sent_tokenize(value)
        at = int(self._keyword_position) - 1
        return at < len(sentences) and _has_word(self._keyword, sentences[at])


class KeywordAtPlace(instructions.KeywordSpecificPositionChecker):  # type: ignore[misc]
    """Ignore punctuation and case."""

    def check_following(self, value: str) -> bool:
        sentences = nltk.sent_tokenize(value)
        if len(sentences) < self._n:
            return False
        words = [word for word in nltk.word_tokenize(sentences[self._n - 1]) if any(map(str.isalnum, word))]
        return len(words) >= self._m and _same(words[self._m - 1], self._keyword)


class SecondAndSecondToLast(instructions.WordsPositionChecker):  # type: ignore[misc]
    """Ignore a mark at the end, and case."""

    def check_following(self, value: str) -> bool:
        words = nltk.word_tokenize(value)
        if words and words[-1] in string.punctuation:
            words.pop()
        return len(words) >= 2 and _same(words[1], self._keyword) and _same(words[-2], self._keyword)


class TitleCase(instructions.TitleCaseChecker):  # type: ignore[misc]
    """Check words of one letter too; ignore those that begin with another character."""

    def check_following(self, value: str) -> bool:
        words = [word for word in nltk.word_tokenize(value) if word[0].isalpha()]
        return not any(
            word[0].islower() and (word[1:].islower() or word[1:].isupper() or len(word) == 1) for word in words
        )


class QuoteUnquote(instructions.QuoteExplanationChecker):  # type: ignore[misc]
    """Accept an answer of quotation marks alone: it has no quotation."""

    def check_following(self, value: str) -> bool:
        try:
            return bool(super().check_following(value))
        except IndexError:
            return True


class RepeatSpan(instructions.RepeatSpanChecker):  # type: ignore[misc]
    """Repeat words of the prompt between two indices, both included, as IFBench's prompts say, from 0."""

    def build_description(self, *, n_start: int | None = None, n_end: int | None = None, **kwargs: Any) -> str:
        said = str(super().build_description(n_start=n_start, n_end=n_end, **kwargs))
        # The package replaces 0 by a random number.
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


#: Instruction -> its checker.
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
