"""What tokens say, as the recorder keeps it: the same as the model's tokenizer says, for whatever was drawn."""

import random
from pathlib import Path

import pytest

from penstock.consumers.history.texts import Texts

tokenizers = pytest.importorskip("tokenizers")

CORPUS = [
    "The sky is blue, über allem.",
    "日本語 \U0001f600 and some English words, again and again",
    "for x in range(3):\n\t",
]


def save(folder: Path, decoder: object) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoder
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS * 3,
        tokenizers.trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=alphabet, special_tokens=["<end>", "<|im start|>"]
        ),
    )
    made.add_tokens(["größer als"])
    made.save(str(folder / "tokenizer.json"))


def test_texts_are_what_the_tokenizer_says_of_whatever_was_drawn(tmp_path: Path) -> None:
    save(tmp_path, tokenizers.decoders.ByteLevel())
    texts, rng = Texts(str(tmp_path)), random.Random(7)
    reads = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    size = reads.get_vocab_size()
    assert texts.is_spelled
    for _ in range(200):
        drawn = rng.choices(range(size), k=rng.randrange(1, 40))
        assert texts.answer(drawn) == reads.decode(drawn, skip_special_tokens=True)
        assert texts.prompt(drawn) == reads.decode(drawn, skip_special_tokens=False)
        pieces = texts.pieces(drawn)
        assert texts.prompt(drawn) == b"".join(pieces[one][0] for one in drawn).decode("utf-8", "replace")
        plain = b"".join(piece for piece, special in map(pieces.__getitem__, drawn) if not special)
        assert texts.answer(drawn) == plain.decode("utf-8", "replace")
    for text in CORPUS:
        assert texts.answer(reads.encode(text).ids) == text
    assert texts.answer([size + 5, -1, *reads.encode("blue").ids]) == "blue"
    end = reads.token_to_id("<end>")
    assert texts.pieces([end]) == {end: (b"<end>", True)}


def test_a_tokenizer_of_another_kind_has_its_own_word(tmp_path: Path) -> None:
    save(tmp_path, tokenizers.decoders.BPEDecoder())
    texts = Texts(str(tmp_path))
    reads = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = reads.encode("The sky").ids
    assert not texts.is_spelled
    assert texts.answer(ids) == reads.decode(ids)
