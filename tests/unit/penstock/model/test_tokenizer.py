"""A tokenizer must be that of the model: one id too high ends an engine."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.model.folder import read_vocab_size
from penstock.model.tokenizer import check_vocabulary, load_tokenizer
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
