"""Text of each token of a sample, by the tokenizer of the run's model."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from penstock.config.reading.yaml_file import read_yaml
from penstock.errors import ConfigError
from penstock.history.row import SampleRow
from penstock.redis.saved_config import CONFIG_FILE
from penstock.weights.tokenizer import TextOf, load_token_texts

#: Replacement for an incomplete character, which ends in the following tokens.
_TORN = "\ufffd"
#: Most tokens of one character.
_SPAN = 8


def texts_of_row(folder: Path, row: SampleRow, tokens: Sequence[int]) -> list[str | None]:
    """Return the text of each of these tokens of a sample: from its history, else from ``token_texts``."""
    if not row.pieces.keys() >= set(tokens):
        return token_texts(folder, tokens)
    return _each(lambda ids, _: b"".join(map(row.pieces.__getitem__, ids)).decode("utf-8", "replace"), tokens)


def token_texts(folder: Path, tokens: Sequence[int]) -> list[str | None]:
    """Return the text of each token of a run; None for all without a tokenizer.

    A character of several tokens is returned for the first of them, '' for the others. Blocks for the disk at the first
    call, for up to a second.
    """
    text_of = _tokenizer_of(folder)
    return [None] * len(tokens) if text_of is None else _each(text_of, tokens)


def _each(text_of: TextOf, tokens: Sequence[int]) -> list[str | None]:
    texts: list[str | None] = []
    while len(texts) < len(tokens):
        begin = len(texts)
        text, count = _next(text_of, tokens[begin : begin + _SPAN])
        texts += [text] + [""] * (count - 1)
    return texts


def _next(text_of: TextOf, tokens: Sequence[int]) -> tuple[str, int]:
    """Return the text that begins with the first token, and the number of its tokens."""
    alone = text_of(tokens[:1], True)
    if _TORN not in alone:
        return alone, 1
    whole = ((text_of(tokens[:count], True), count) for count in range(2, len(tokens) + 1))
    return next(((text, count) for text, count in whole if _TORN not in text), (alone, 1))


def _tokenizer_of(folder: Path) -> TextOf | None:
    for path in _models(folder):
        # Other formats need a library that takes seconds to load.
        file = path / "tokenizer.json"
        if file.is_file():
            return _loaded(path, file.stat().st_mtime_ns)
    return None


def _models(folder: Path) -> list[Path]:
    """Return folders that may hold the tokenizer: the run's initial model, and its publications."""
    try:
        model = read_yaml(folder / CONFIG_FILE).get("model", {})
        path = model.get("path") if isinstance(model, dict) else None
    except (ConfigError, OSError):
        path = None
    published = sorted((folder / "weights").glob("v*"), reverse=True)[:1]
    return [*([Path(path)] if isinstance(path, str) and "\0" not in path else []), *published]


@lru_cache(maxsize=4)
def _loaded(path: Path, _: int) -> TextOf | None:
    try:
        return load_token_texts(str(path)).text_of
    except ConfigError:
        return None
