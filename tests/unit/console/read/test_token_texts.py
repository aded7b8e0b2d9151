"""What each token says: characters of several tokens stand at the first of them."""

from pathlib import Path

import numpy as np
import pytest

from penstock.console.read.samples import texts_of_row, token_texts, turn_rows
from tests.unit.penstock.history.rows import row

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose model has a byte for a token: id 1 + byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={"<eos>": 0} | {one: 1 + at for at, one in enumerate(alphabet)}, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "config.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}\n")
    return tmp_path


def ids(folder: Path, text: str) -> list[int]:
    return list(tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json")).encode(text).ids)


def test_a_character_of_several_tokens_stands_at_the_first(folder: Path) -> None:
    assert token_texts(folder, ids(folder, "aé b")) == ["a", "é", "", " ", "b"]
    assert token_texts(folder, ids(folder, "𝄞x")) == ["𝄞", "", "", "", "x"]


def test_a_history_that_knows_its_tokens_needs_no_tokenizer(tmp_path: Path) -> None:
    pieces = {7: b"\xc3", 8: b"\xa9", 9: b" f"}
    assert texts_of_row(tmp_path, row(pieces=pieces), [9, 7, 8]) == [" f", "é", ""]
    assert texts_of_row(tmp_path, row(pieces=pieces), [9, 10]) == [None, None]


def test_what_is_no_character_keeps_nobody_from_being_read(folder: Path) -> None:
    torn = ids(folder, "é")[:1]
    assert token_texts(folder, [*torn, *ids(folder, "a")]) == ["\ufffd", "a"]
    assert token_texts(folder, []) == []


@pytest.mark.parametrize("config", ["model: {path: /nowhere}", "model: 3", "{", "model: {path: '\\0'}"])
def test_without_a_tokenizer_there_is_no_text(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    assert token_texts(tmp_path, [1, 2]) == [None, None]
    assert token_texts(tmp_path / "none", [1]) == [None]


def test_a_damaged_tokenizer_is_as_none(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").write_text("{}")
    assert token_texts(folder, [1]) == [None]


def test_turns_and_observations_are_shown_in_order(folder: Path) -> None:
    tokens = ids(folder, "add 1 2?calc(1+2)=3is 3")
    generated = [0] * 8 + [1] * 9 + [0] * 2 + [1] * 4
    versions = [-1] * 8 + [3] * 4 + [4] * 5 + [-1] * 2 + [4] * 4
    arrays = {name: np.array(value) for name, value in (("tokens", tokens), ("generated", generated))}
    arrays |= {"versions": np.array(versions), "loss_mask": np.array([0] * 19 + [1] * 4)}
    shown = turn_rows(folder, row(prompt_length=8, **arrays))
    assert shown == [
        {"by": "policy", "tokens": 9, "loss_tokens": 0, "versions": [3, 4], "text": "calc(1+2)"},
        {"by": "environment", "tokens": 2, "loss_tokens": 0, "versions": None, "text": "=3"},
        {"by": "policy", "tokens": 4, "loss_tokens": 4, "versions": [4, 4], "text": "is 3"},
    ]
    assert turn_rows(folder, row(tokens=None)) == []
