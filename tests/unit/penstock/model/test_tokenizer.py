"""A tokenizer must be that of the model: one id too high ends an engine."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.model.folder import read_vocab_size
from penstock.model.tokenizer import SpelledTokenizer, check_vocabulary, decoding_fast, load_tokenizer
from tests.tiny_model import make_tiny_model


def test_a_model_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path .*nowhere is not a folder with a config.json"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer: Any = load_tokenizer(str(make_tiny_model(tmp_path)))
    size = read_vocab_size(tmp_path)
    with pytest.raises(ConfigError, match=f"gives ids up to {size - 1}, and the model has {size - 1} of them"):
        check_vocabulary(tokenizer, size - 1, "model")
    caplog.clear()
    check_vocabulary(tokenizer, 0, "model")
    assert not caplog.records
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_vocabulary(tokenizer, size, "model")
    assert "added tokens beyond" in caplog.text


def test_the_vocabulary_of_a_model_with_several_parts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 9}}')
    assert read_vocab_size(tmp_path) == 9
    (tmp_path / "config.json").write_text("{}")
    assert read_vocab_size(tmp_path) == 0


def test_byte_level_bpe_is_decoded_to_the_same_texts_from_its_pieces(tmp_path: Path) -> None:
    slow: Any = load_tokenizer(str(make_tiny_model(tmp_path)))
    slow.add_special_tokens({"additional_special_tokens": ["<image>"]})
    slow.add_tokens(["two words"])
    fast: Any = decoding_fast(slow)
    assert isinstance(fast, SpelledTokenizer)
    ids = list(range(len(slow)))
    for some in ([], ids, ids[::-1], ids[::3], [*ids[:5], len(slow) + 7], *([one] for one in ids)):
        for skips in (False, True):
            assert fast.decode(some, skip_special_tokens=skips) == slow.decode(some, skip_special_tokens=skips)
    assert fast.eos_token_id == slow.eos_token_id
    assert fast.encode("two words", add_special_tokens=False) == slow.encode("two words", add_special_tokens=False)
    assert len(fast.get_vocab()) == len(slow), "its other attributes are those of the tokenizer"


def test_a_tokenizer_that_decodes_otherwise_is_kept(tmp_path: Path) -> None:
    class Upper:
        """One that changes the text of its tokens."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def decode(self, *args: Any, **more: Any) -> str:
            return str(self.inner.decode(*args, **more)).upper()

    upper = Upper(load_tokenizer(str(make_tiny_model(tmp_path))))
    assert decoding_fast(upper) is upper
    plain: Any = object()
    assert decoding_fast(plain) is plain
