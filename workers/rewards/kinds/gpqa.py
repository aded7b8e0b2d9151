"""``gpqa``: the letter of a choice, or its text.

Rein et al. 2023, "GPQA: A Graduate-Level Google-Proof Q&A Benchmark".
"""

import re
import string
from dataclasses import dataclass
from typing import Any

from penstock.workers.rewards.kinds.boxed import after_thoughts
from penstock.workers.rewards.kinds.kind import Question, check_label

#: Letters that count if neither ``valid_letters`` nor ``choices`` is given.
LETTERS = tuple(string.ascii_uppercase[:10])
#: Most choices that are read.
MAX_CHOICES = 26

#: Phrases that name the letter; the first match counts. The letter is no part of a word ("is because" does not name B),
#: but may be emphasised: ``_B_`` names B, and ``F_B`` names nothing. Possessive, so that matching takes linear time.
_NAMED = (
    re.compile(r"(?:answer|option|choice)\s*+(?:is(?![^\W_])|:)?+[\s:*_({\[]*+([A-Z])_{0,3}+(?!\w)", re.IGNORECASE),
    re.compile(r"(?<!\w)_{0,3}+([A-Z])_{0,3}+(?!\w)[\s*)}\]]{0,8}+is\s{1,8}+(?:the\s{1,8}+)?+correct", re.IGNORECASE),
)
_ALONE = re.compile(r"(?<!\w)_{0,3}+([A-Z])_{0,3}+(?!\w)")
_NOT_WORDS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class _Key:
    """The correct answer."""

    letters: tuple[str, ...]
    #: '' if only a text is known.
    letter: str
    #: Accepted if no letter was chosen; words alone, separated by blanks.
    texts: frozenset[str]


def gpqa(question: Question) -> float:
    """Return 1 if the answer chooses the correct letter; if it chooses none, or none is known, 1 if it contains the
    correct text; else 0. Only the text after ``</think>`` counts.

    The label is a letter, the text of a choice, or its number from 0. Of ``metadata``: ``choices`` (a list, or a map),
    ``valid_letters``, ``correct_letter``, ``correct_answer``, ``answer_text``.

    Raises:
        ValueError: the label and these have more than ``MAX_LABEL`` characters.
    """
    key, text = _key(question), after_thoughts(question.text)
    chosen = _chosen(text, key.letters)
    if chosen and key.letter:
        return float(chosen == key.letter)
    said = f" {_words(text)} "
    return float(any(f" {right} " in said for right in key.texts))


def _chosen(text: str, letters: tuple[str, ...]) -> str:
    for pattern in _NAMED:
        if (found := pattern.search(text)) and found[1].upper() in letters:
            return found[1].upper()
    alone = [letter for letter in _ALONE.findall(text) if letter in letters]
    return alone[-1] if alone else ""


def _key(question: Question) -> _Key:
    about, label = question.metadata, question.raw_label
    choices = _choices(about.get("choices"))
    answers = [str(about.get(name) or "") for name in ("correct_answer", "answer_text")]
    letters = _letters(about.get("valid_letters"), len(choices))
    lettered = list(zip(letters, choices, strict=False))
    named = about.get("correct_letter")
    letter = named.strip().upper() if isinstance(named, str) else ""
    text = label.strip() if isinstance(label, str) else ""
    check_label("gpqa", [*choices, *answers, text])
    if isinstance(label, (int, float)) and not isinstance(label, bool) and 0 <= label < len(letters):
        letter = letters[int(label)]
    if not letter and text.upper() in letters:
        letter = text.upper()
    if not letter and text:
        wanted = _words(text)
        letter = next((one for one, choice in lettered if _words(choice) == wanted), "")
    chosen = [choice for one, choice in lettered if one == letter]
    texts = [*chosen, *answers, text]
    return _Key(letters, letter, frozenset(filter(None, (_words(one) for one in texts if one.upper() not in letters))))


def _choices(choices: Any) -> list[str]:
    if isinstance(choices, dict):
        choices = list(choices.values())
    return [str(one) for one in choices[:MAX_CHOICES]] if isinstance(choices, list) else []


def _letters(valid: Any, num_choices: int) -> tuple[str, ...]:
    if isinstance(valid, (list, str)) and valid:
        return tuple(str(one).upper() for one in valid[:MAX_CHOICES])
    return tuple(string.ascii_uppercase[:num_choices]) if num_choices else LETTERS


def _words(text: str) -> str:
    return _NOT_WORDS.sub(" ", text.lower()).strip()
