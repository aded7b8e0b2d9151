"""Texts of token ids, so that a text which its tokens spell is not stored besides them.

A file of a history has the pieces of all ids that occur in it, so it can be read without the model's tokenizer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token id."""

    #: UTF-8; a character may be spread over several pieces.
    text: bytes
    #: Part of the text of a prompt but not of an answer: the end of a turn, for example.
    is_special: bool = False


#: Returns the pieces of the token ids that are known. May block for a disk.
LookUp = Callable[[Collection[int]], Mapping[int, Piece]]

#: Most ids whose pieces are cached.
MOST_PIECES = 2**18


class Spelling:
    """Spells token ids; looks up each piece once."""

    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        #: Including the text of special tokens, and without it.
        self._whole: dict[int, bytes] = {}
        self._plain: dict[int, bytes] = {}
        self._unknown: set[int] = set()

    def text(self, tokens: Sequence[int], *, special: bool) -> str | None:
        """Return their text; None if the piece of one is not known. ``special``: include special tokens."""
        pieces = self._whole if special else self._plain
        try:
            return b"".join(map(pieces.__getitem__, tokens)).decode("utf-8", "replace")
        except KeyError:
            pass
        if not self._learn(set(tokens)):
            return None
        return b"".join(map(pieces.__getitem__, tokens)).decode("utf-8", "replace")

    def pieces(self, tokens: Collection[int]) -> dict[int, Piece]:
        """Return the pieces of the ids that are known."""
        self._learn(set(tokens))
        return {
            one: Piece(self._whole[one], self._plain[one] != self._whole[one])
            for one in set(tokens)
            if one in self._whole
        }

    def _learn(self, tokens: set[int]) -> bool:
        """Cache the pieces of these ids; return whether all are known."""
        # One by one: subtracting the keys of a map from a set iterates over the complete map.
        missing = {one for one in tokens if one not in self._whole and one not in self._unknown}
        if missing:
            if len(self._whole) + len(self._unknown) + len(missing) > MOST_PIECES:
                self._whole, self._plain, self._unknown, missing = {}, {}, set(), tokens
            found = self._look_up(missing)
            self._whole |= {one: piece.text for one, piece in found.items()}
            self._plain |= {one: b"" if piece.is_special else piece.text for one, piece in found.items()}
            self._unknown |= missing - found.keys()
        return all(one in self._whole for one in tokens)


def nothing_known(tokens: Collection[int]) -> Mapping[int, Piece]:
    """Look up pieces in a run without a tokenizer: none are known."""
    return {}
