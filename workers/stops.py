"""Where an answer ends, judged from its tokens alone.

The engine judges it while it draws, but not in two places. When it aborts a request it draws one last token and
reports ``abort`` whatever that token is; and when a request resumes it sees the prefix as prompt, so that a stop string
that began before the abort goes unseen.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What penstock needs of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


#: Tokens looked back for a regular expression, whose longest match is not known.
_REGEX_WINDOW = 256


@dataclass(frozen=True)
class StopRule:
    """Ends of an answer under one set of sampling parameters."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    tokenizer: Tokenizer

    @classmethod
    def of(cls, sampling: dict[str, Any], tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> "StopRule":
        ids: frozenset[int] = frozenset()
        if not sampling.get("ignore_eos"):
            ids = eos_token_ids | frozenset(sampling.get("stop_token_ids") or ())
            if tokenizer.eos_token_id is not None:
                ids |= {tokenizer.eos_token_id}
        patterns = tuple(re.compile(pattern) for pattern in _as_list(sampling.get("stop_regex")))
        return cls(ids, tuple(_as_list(sampling.get("stop"))), patterns, tokenizer)

    @property
    def window(self) -> int:
        """Most tokens that a stop spans, and one; a token is at least a byte of text."""
        return max([len(text.encode()) for text in self.strings] + [_REGEX_WINDOW if self.patterns else 0]) + 1

    def end_of(self, drawn: Sequence[int], fresh: int, *, aborted: bool) -> int | None:
        """Length at which a turn ends, or None where it goes on.

        Args:
            drawn: tokens of the turn.
            fresh: how many of them were judged before.
            aborted: the last one was not judged by the engine.
        """
        by_text = self._text_end(drawn, fresh, aborted)
        by_id = None
        if aborted:
            by_id = next((n + 1 for n in range(fresh, len(drawn)) if drawn[n] in self.token_ids), None)
        ends = [end for end in (by_text, by_id) if end is not None]
        return min(ends, default=None)

    def _text_end(self, drawn: Sequence[int], fresh: int, aborted: bool) -> int | None:
        if not self.strings and not self.patterns:
            return None
        window = self.window
        lengths = set(range(fresh + 1, min(fresh + window, len(drawn)) + 1)) if fresh else set()
        if aborted and len(drawn) > fresh:
            lengths.add(len(drawn))
        for length in sorted(lengths):
            tail = list(drawn[max(0, length - window) : length])
            if self._ends_in(self.tokenizer.decode(tail, skip_special_tokens=False)):
                return length
        return None

    def _ends_in(self, text: str) -> bool:
        return any(stop in text for stop in self.strings) or any(pattern.search(text) for pattern in self.patterns)


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
