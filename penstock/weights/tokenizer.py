"""The tokenizer in a model's folder."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.weights.model_folder import read_vocab_size

log = logging.getLogger(__name__)

#: Text of token ids, with those that stand for no text (True) or without.
TextOf = Callable[[Sequence[int], bool], str]


class Tokenizer(Protocol):
    """What penstock needs of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


def read_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a folder. Reads local files only. Raises ConfigError where there is none."""
    from transformers import AutoTokenizer

    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path {path} holds no tokenizer that can be read: {exc}") from exc


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a model's folder.

    Raises:
        ConfigError: there is none, or it gives ids that the model does not have.
    """
    if not Path(path, "config.json").is_file():
        raise ConfigError(
            f"model.path {path} is not a folder with a config.json: download the model and name its folder."
        )
    tokenizer = read_tokenizer(path)
    check_vocabulary(tokenizer, read_vocab_size(path), path)
    return tokenizer


def check_vocabulary(tokenizer: Any, size: int, path: str) -> None:
    """Raise ConfigError where a tokenizer gives ids that the model does not have.

    Added tokens beyond, such as a padding token that nothing encodes to, are logged and let pass: a prompt that holds
    one is refused by itself.
    """
    added = set(tokenizer.get_added_vocab().values())
    highest = max(set(tokenizer.get_vocab().values()) - added, default=-1)
    if size and highest >= size:
        raise ConfigError(
            f"model.path {path}: its tokenizer gives ids up to {highest}, and the model has {size} of them: it is the "
            "tokenizer of another model; put the model's own into the folder."
        )
    if size and max(added, default=-1) >= size:
        log.warning("the tokenizer in %s has added tokens beyond the model's %d ids", path, size)


def load_text_of(path: str) -> TextOf:
    """What reads token ids by the tokenizer in a model's folder; ids that it does not have are left out. Reads files.

    Raises:
        ConfigError: there is none that can be read, or the library is not installed.
    """
    check_installed("tokenizers", "The text of token ids")
    # Of itself it is there in no time, where transformers takes seconds.
    from tokenizers import Tokenizer

    file = Path(path, "tokenizer.json")
    if not file.is_file():
        return _slow_text_of(path)
    try:
        inner = Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises no other
        raise ConfigError(f"{file} cannot be read as a tokenizer: {exc}") from exc
    size = inner.get_vocab_size()
    return lambda ids, special: str(inner.decode(_known(ids, size), skip_special_tokens=not special))


def _slow_text_of(path: str) -> TextOf:
    check_installed("transformers", f"The tokenizer in {path}")
    tokenizer = read_tokenizer(path)
    size = max(tokenizer.get_vocab().values(), default=-1) + 1  # type: ignore[attr-defined]
    return lambda ids, special: tokenizer.decode(_known(ids, size), skip_special_tokens=not special)


def _known(ids: Sequence[int], size: int) -> list[int]:
    return [one for one in ids if 0 <= one < size]
