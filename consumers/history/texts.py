"""Decode the tokens of recorded samples."""

import logging
from collections.abc import Collection, Mapping, Sequence

from penstock.errors import ConfigError
from penstock.history.blocks import Piece
from penstock.model.tokenizer import TokenTexts, load_token_texts

log = logging.getLogger(__name__)


class Texts:
    """Decode tokens with the tokenizer of the run's model, or to '' without a tokenizer."""

    def __init__(self, model_path: str) -> None:
        self._path = model_path
        self._is_loaded = False
        self._found: TokenTexts | None = None
        #: Last prompt and its text, which the samples of a group share.
        self._prompt: tuple[list[int], str] = [], ""

    def load(self) -> None:
        """Load the tokenizer now instead of on first use. Blocks, possibly for seconds."""
        self._tokenizer()

    @property
    def is_spelled(self) -> bool:
        """Return whether texts are concatenations of ``pieces``."""
        found = self._tokenizer()
        return found is not None and found.is_spelled

    def pieces(self, tokens: Collection[int]) -> Mapping[int, Piece]:
        """Return the text of each of these tokens; {} without a tokenizer."""
        found = self._tokenizer()
        return {} if found is None else {one: found.piece_of(one) for one in tokens}

    def prompt(self, tokens: list[int]) -> str:
        """Return the text of a prompt, including special tokens such as the end of a turn."""
        if tokens != self._prompt[0]:
            self._prompt = tokens, self._text(tokens, special=True)
        return self._prompt[1]

    def answer(self, tokens: list[int]) -> str:
        """Return the text of generated tokens, without special tokens."""
        return self._text(tokens, special=False)

    def _text(self, tokens: Sequence[int], *, special: bool) -> str:
        found = self._tokenizer()
        return "" if found is None else found.text_of(tokens, special)

    def _tokenizer(self) -> TokenTexts | None:
        if not self._is_loaded:
            self._is_loaded = True
            try:
                self._found = load_token_texts(self._path)
            except ConfigError as exc:
                log.warning("failed to load the tokenizer, recording tokens without text: %s", exc)
        return self._found
