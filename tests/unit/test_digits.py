"""Data and first policy of the digits example."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from transformers import AutoTokenizer

from penstock.config import Config
from tests.unit.example_parts import EXAMPLES, load


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return load("digits/prepare.py")


def test_prompts_are_seeded_distinct_and_held_out_ones_apart(prepare: ModuleType) -> None:
    train, heldout = prepare.make_prompts(prepare.Settings(seed=1))
    assert (train, heldout) == prepare.make_prompts(prepare.Settings(seed=1))
    assert train != prepare.make_prompts(prepare.Settings(seed=2))[0]
    assert (len(set(train)), len(set(heldout))) == (3000, 128)
    # Apart for every seed, and of what the warm-up shows too.
    assert not any(map(prepare.is_heldout, train))
    assert all(map(prepare.is_heldout, heldout))
    numbers = [f"{number:05}=" for number in range(0, 100_000, 7)]
    assert 0.09 < sum(map(prepare.is_heldout, numbers)) / len(numbers) < 0.115


def test_demonstrations_are_not_held_out_and_sort_up_sometimes(prepare: ModuleType) -> None:
    import random

    rng = random.Random(0)
    shown = [prepare.demonstration(rng, 0.3) for _ in range(2000)]
    assert not any(prepare.is_heldout(text[:6]) for text in shown)
    up = sum(text[6:] == f"{prepare.label_of(text)}<eos>" for text in shown) / len(shown)
    assert 0.26 < up < 0.34


def test_the_tokenizer_has_a_token_per_byte_and_loads_as_it_was_saved(prepare: ModuleType, tmp_path: Path) -> None:
    made = prepare.make_tokenizer()
    prepare.make_model(prepare.Settings(), made).config.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    # SGLang warms up with a sentence, and a prompt without any token kills it.
    for text in ("38172=12378", "The capital city of France is", "é"):
        ids = made.encode(text)
        assert len(ids) == len(text.encode())
        assert loaded.encode(text) == ids
        assert loaded.decode([*ids, loaded.eos_token_id], skip_special_tokens=True) == text


def test_prepare_makes_everything_once(prepare: ModuleType, tmp_path: Path) -> None:
    settings = prepare.Settings(steps=2, num_train=20, num_heldout=4)
    said = prepare.prepare(tmp_path / "data", settings)
    assert "20 train and 4 held-out prompts" in said
    lines = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    assert all(line["label"] == "".join(sorted(line["prompt"][:5])) and line["prompt"][5:] == "=" for line in lines)
    model = tmp_path / "data" / "model" / "model.safetensors"
    before = model.stat().st_mtime_ns
    assert "already made" in prepare.prepare(tmp_path / "data", settings)
    assert model.stat().st_mtime_ns == before
    # Other settings, or a start that was cut off, make it anew.
    prepare.prepare(tmp_path / "data", prepare.Settings(steps=3, num_train=20, num_heldout=4))
    assert model.stat().st_mtime_ns != before
    (tmp_path / "data" / "prepared.json").unlink()
    assert "already made" not in prepare.prepare(tmp_path / "data", settings)
    assert not list((tmp_path / "data").glob(".writing-*"))


@pytest.mark.parametrize("example", ["digits", "gsm8k", "code"])
def test_the_configurations_hold(example: str) -> None:
    config = Config(**yaml.safe_load((EXAMPLES / example / "run.yaml").read_text()))
    assert config.run == example
    assert config.engine.server_args["disable-radix-cache"] is True
