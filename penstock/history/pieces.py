"""What token ids stand for: a text that is what its tokens spell is not kept beside them.

A file of a history has the pieces of all ids that occur in it, so it can be read where the model's tokenizer is not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token id stands for."""

    #: UTF-8; a letter may be spread over several pieces.
    text: bytes
    #: Part of a prompt as the policy sees it, and of no answer: the end of a turn, for example.
    is_special: bool = False


#: The pieces of token ids, of those that are known. May block for a disk.
LookUp = Callable[[Collection[int]], Mapping[int, Piece]]

#: Ids whose pieces are kept at hand.
MOST_PIECES = 2**18


class Spelling:
    """Spells token ids; asks for each piece once."""

    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        #: With the text of special tokens, and without.
        self._whole: dict[int, bytes] = {}
        self._plain: dict[int, bytes] = {}
        self._unknown: set[int] = set()

    def text(self, tokens: Sequence[int], *, special: bool) -> str | None:
        """Their text; None where the piece of one is not known. ``special``: with that of special tokens."""
        pieces = self._whole if special else self._plain
        try:
            return b"".join(map(pieces.__getitem__, tokens)).decode("utf-8", "replace")
        except KeyError:
            pass
        if not self._learn(set(tokens)):
            return None
        return b"".join(map(pieces.__getitem__, tokens)).decode("utf-8", "replace")

    def pieces(self, tokens: Collection[int]) -> dict[int, Piece]:
        """The pieces of these ids, of those that are known."""
        self._learn(set(tokens))
        return {
            one: Piece(self._whole[one], self._plain[one] != self._whole[one])
            for one in set(tokens)
            if one in self._whole
        }

    def _learn(self, tokens: set[int]) -> bool:
        """Have the pieces of these at hand; False where there is none of one."""
        # One by one: a set less the keys of a map goes through all of the map.
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
    """Of a run without a tokenizer."""
    return {}
