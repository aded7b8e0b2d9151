"""Find the end of an answer in its tokens, and collect the outcomes of jobs.

The engine detects stops itself, except in two cases. An aborted request samples one last token and reports ``abort``
even if that token is a stop; a resumed request gets the prefix as prompt, so the engine misses a stop string that began
before the abort.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import Config
from penstock.model.tokenizer import Tokenizer
from penstock.names import Lane
from penstock.protocol import scripts
from penstock.protocol.user_failures import WINDOW, digit_of
from penstock.records.job import Job, JobFailure
from penstock.records.keys import Keys
from penstock.redis.control import AsyncControl

#: Longest name and longest error line, in characters.
MAX_NAME, MAX_LINE = 200, 1000


class Outcomes:
    """Collect outcomes of jobs; sent with the worker's presence, and at once if user code makes a job a dead letter.

    The producer then learns of each failure before the worker leases another job.
    """

    def __init__(self, config: Config) -> None:
        self._reward = "+".join(config.reward.names)
        self._group = config.reward.group or ""
        self._datasets = {one.name for one in (*config.data.train, *config.data.eval)}
        self._digits: dict[str, str] = {}
        self._last_lines: dict[str, str] = {}

    def add(self, job: Job, reason: str = "", last_line: str = "") -> None:
        """Add the outcome of a job: ``reason`` and last error line of its dead letter, or '' if it is complete."""
        # A refused job that another program submitted must not stop the producer.
        if job.lane == Lane.SCORE or (reason == JobFailure.REFUSED and job.dataset not in self._datasets):
            return
        kind = f"dataset {job.dataset} with reward {(job.reward or self._reward)[:MAX_NAME]}"
        if self._group and job.lane == Lane.TRAIN:
            kind += f" and {self._group[:MAX_NAME]} of its group"
        if job.environment:
            kind += f" and environment {job.environment[:MAX_NAME]}"
        digit = digit_of(reason)
        self._digits[kind] = self._digits.get(kind, "") + digit
        if digit != "0":
            self._last_lines[kind] = last_line[-MAX_LINE:]

    async def send(self, control: AsyncControl, keys: Keys) -> None:
        """Send the outcomes added since the last call; blocks for a round trip unless none was added."""
        if not self._digits:
            return
        kinds = [(kind, digits, self._last_lines.get(kind, "")) for kind, digits in self._digits.items()]
        self._digits, self._last_lines = {}, {}
        await control.call(scripts.ended(keys, kinds, WINDOW))


#: Number of last tokens searched for a regular expression, whose longest match is unknown.
_REGEX_WINDOW = 256


@dataclass(frozen=True)
class StopRule:
    """Check stop conditions under one set of sampling parameters."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    tokenizer: Tokenizer
    #: Whether the stop stays in the text (no_stop_trim).
    keeps_stop: bool = False
    #: Whether special tokens are omitted from the text.
    skips_special: bool = True
    #: Whether special tokens in the text are surrounded by spaces, if the tokenizer can do both.
    spaces_special: bool = True

    @classmethod
    def of(cls, sampling: dict[str, Any], tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> "StopRule":
        ids: frozenset[int] = frozenset()
        if not sampling.get("ignore_eos"):
            ids = eos_token_ids | frozenset(sampling.get("stop_token_ids") or ())
            if tokenizer.eos_token_id is not None:
                ids |= {tokenizer.eos_token_id}
        patterns = tuple(re.compile(pattern) for pattern in as_list(sampling.get("stop_regex")))
        return cls(
            ids,
            tuple(as_list(sampling.get("stop"))),
            patterns,
            tokenizer,
            keeps_stop=bool(sampling.get("no_stop_trim", False)),
            skips_special=bool(sampling.get("skip_special_tokens", True)),
            spaces_special=bool(sampling.get("spaces_between_special_tokens", True)),
        )

    @property
    def window(self) -> int:
        """Longest stop in tokens, plus one, given that a token has at least one byte of text."""
        return max([len(text.encode()) for text in self.strings] + [_REGEX_WINDOW if self.patterns else 0]) + 1

    def text_of(self, tokens: Sequence[int], *, stopped: bool) -> str:
        """Return the text of a complete turn without the stop that ended it, like SGLang, unless ``keeps_stop`` is set.

        Text that matched a regular expression stays. If the last token is a stop both by its id and by its text, the
        text decides, as in SGLang. The tokens are unchanged: a generated stop bears loss (T8).

        Args:
            tokens: tokens of the turn.
            stopped: the turn ended at a stop, not at its length limit.
        """
        by_token = (
            stopped and bool(tokens) and tokens[-1] in self.token_ids and not self._text_ends_at(tokens, len(tokens))
        )
        text = self._decode(tokens[:-1] if by_token and not self.keeps_stop else tokens)
        if not stopped or by_token:
            return text
        found = [(at, stop) for stop in self.strings if (at := text.find(stop)) >= 0]
        if not found:
            return text
        at, stop = min(found)
        return text[: at + len(stop)] if self.keeps_stop else text[:at]

    def _decode(self, tokens: Sequence[int]) -> str:
        # Only some tokenizers accept this option.
        more: dict[str, Any] = {} if self.spaces_special else {"spaces_between_special_tokens": False}
        return self.tokenizer.decode(list(tokens), skip_special_tokens=self.skips_special, **more)

    def end_of(self, tokens: Sequence[int], fresh: int, *, aborted: bool) -> int | None:
        """Return the length at which a turn ends, or None if it continues.

        Args:
            tokens: tokens of the turn.
            fresh: number of leading tokens that were already checked.
            aborted: the engine did not check the last token.
        """
        by_text = self._text_end(tokens, fresh, aborted)
        by_id = None
        if aborted:
            by_id = next((n + 1 for n in range(fresh, len(tokens)) if tokens[n] in self.token_ids), None)
        ends = [end for end in (by_text, by_id) if end is not None]
        return min(ends, default=None)

    def _text_end(self, tokens: Sequence[int], fresh: int, aborted: bool) -> int | None:
        if not self.strings and not self.patterns:
            return None
        lengths = set(range(fresh + 1, min(fresh + self.window, len(tokens)) + 1)) if fresh else set()
        if aborted and len(tokens) > fresh:
            lengths.add(len(tokens))
        return next((length for length in sorted(lengths) if self._text_ends_at(tokens, length)), None)

    def _text_ends_at(self, tokens: Sequence[int], length: int) -> bool:
        """Return whether the decoded tail before ``length``, with special tokens, contains a stop string or pattern."""
        if not self.strings and not self.patterns:
            return False
        tail = list(tokens[max(0, length - self.window) : length])
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        return any(stop in text for stop in self.strings) or any(pattern.search(text) for pattern in self.patterns)


def as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
