"""The tokenizer in a model's folder."""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from penstock.errors import ConfigError
from penstock.model.folder import read_vocab_size
from penstock.system.extras import check_installed

log = logging.getLogger(__name__)

#: Decodes token ids, with (True) or without special tokens.
TextOf = Callable[[Sequence[int], bool], str]
#: Returns the bytes of a token id (empty if unknown), and whether it is a special token.
PieceOf = Callable[[int], tuple[bytes, bool]]


class Tokenizer(Protocol):
    """Declare the part of a Hugging Face tokenizer that penstock uses."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...

    def __hash__(self) -> int: ...


def read_tokenizer(path: str) -> Tokenizer:
    """Read the tokenizer in a folder, from local files only. Raises ConfigError if that fails."""
    from transformers import AutoTokenizer

    try:
        return cast(Tokenizer, AutoTokenizer.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path {path} holds no tokenizer that can be read: {exc}") from exc


def load_tokenizer(path: str) -> Tokenizer:
    """Read the tokenizer in a model's folder and check its vocabulary.

    Raises:
        ConfigError: no tokenizer can be read, or it has ids that the model does not have.
    """
    if not Path(path, "config.json").is_file():
        raise ConfigError(
            f"model.path {path} is not a folder with a config.json: download the model and name its folder."
        )
    tokenizer = read_tokenizer(path)
    check_vocabulary(tokenizer, read_vocab_size(path), path)
    return tokenizer


def check_vocabulary(tokenizer: Any, size: int, path: str) -> None:
    """Raise ConfigError if a tokenizer has ids that the model does not have.

    Added tokens beyond the model's ids, such as a padding token, are only logged: a prompt that contains one is
    rejected on its own.
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


def check_same_ids(policy: str, other: str, what: str) -> None:
    """Raise ConfigError unless each id of the policy's tokenizer is the same token for another model. Reads files.

    Args:
        policy, other: folders of the models.
        what: name of the other model in the error.
    """
    own, theirs = (cast(Any, load_tokenizer(folder)).get_vocab() for folder in (policy, other))
    # The smallest that differs, so that the error is deterministic.
    wrong = min((token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token)), default=None)
    if wrong is not None:
        raise ConfigError(
            f"{what}: its tokenizer ({other}) is not the policy's ({policy}): token {wrong!r} is id "
            f"{theirs.get(wrong)} there and {own.get(wrong)} here, so what it says of ids would be of other words; "
            "take a model of the same family."
        )
    size, of_policy = read_vocab_size(other), read_vocab_size(policy)
    # Added tokens beyond the policy's own ids are never sampled.
    highest = max((one for one in own.values() if not of_policy or one < of_policy), default=-1)
    if size and size <= highest:
        raise ConfigError(
            f"{what}: the policy has ids up to {highest}, and the model in {other} has {size} of them: take one with "
            "the policy's whole vocabulary."
        )


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Decode token ids with the tokenizer of a model."""

    text_of: TextOf
    piece_of: PieceOf
    #: Whether every text is the concatenation of its pieces.
    is_spelled: bool


def load_token_texts(path: str) -> TokenTexts:
    """Load the decoder of token ids from a model's folder; unknown ids are skipped. Reads files.

    Raises:
        ConfigError: no tokenizer can be read, or the library is not installed.
    """
    check_installed("tokenizers", "The text of token ids")
    # Imports at once; transformers takes seconds.
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel

    file = Path(path, "tokenizer.json")
    if not file.is_file():
        return _slow_token_texts(path)
    try:
        inner = Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises no other
        raise ConfigError(f"{file} cannot be read as a tokenizer: {exc}") from exc
    size = inner.get_vocab_size()
    special = {token for token, added in inner.get_added_tokens_decoder().items() if added.special}
    is_spelled = isinstance(inner.decoder, ByteLevel)
    bytes_of = _byte_level if is_spelled else _sentence_piece
    return TokenTexts(
        lambda ids, whole: str(inner.decode(_known(ids, size), skip_special_tokens=not whole)),
        lambda token: (bytes_of(inner.id_to_token(token) or "") if 0 <= token < size else b"", token in special),
        is_spelled,
    )


def _slow_token_texts(path: str) -> TokenTexts:
    check_installed("transformers", f"The tokenizer in {path}")
    tokenizer: Any = read_tokenizer(path)
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    special = set(tokenizer.all_special_ids)
    return TokenTexts(
        lambda ids, whole: str(tokenizer.decode(_known(ids, size), skip_special_tokens=not whole)),
        lambda token: (
            _sentence_piece(str(tokenizer.convert_ids_to_tokens(token) or "")) if 0 <= token < size else b"",
            token in special,
        ),
        is_spelled=False,
    )


def _byte_level(token: str) -> bytes:
    """Decode a token of byte-level BPE, with one letter per byte; a token with any other letter is plain text."""
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    """Decode a SentencePiece token: U+2581 is a blank, ``<0x0A>`` a single byte."""
    if _ONE_BYTE.fullmatch(token):
        return bytes([int(token[1:-1], 16)])
    return token.replace("\u2581", " ").encode()


_ONE_BYTE = re.compile("<0x[0-9A-F]{2}>")


def _byte_letters() -> dict[str, int]:
    """Return letter -> byte of byte-level BPE: printable bytes map to themselves, others to U+0100 and above."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()


def _known(ids: Sequence[int], size: int) -> list[int]:
    return [one for one in ids if 0 <= one < size]
