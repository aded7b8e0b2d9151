"""Whatever a configuration holds, it is read, or refused by one sentence per mistake; nothing else is raised."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.load import load_config, save_resolved
from penstock.config.reading import yaml_file
from penstock.config.reading.yaml_file import NotYaml, parse_yaml
from penstock.errors import ConfigError
from penstock.redis.saved_config import _addresses
from tests.hostile import SAME, WORST_JSON, is_read_or_refused, near, value_near

GOOD: dict[str, Any] = {
    "run": "r", "seed": 3, "directory": "runs", "prepare": ["make.py", "--all"],
    "redis": {"url": "redis://:secret@h:1/0", "payload_servers": {"a": "redis://h:2"}},
    "model": {"path": "model"},
    "data": {"train": [{"name": "d", "path": "d.jsonl", "n": 2, "sampling": {"temperature": 0.5}}],
             "eval": [{"name": "e", "path": "e.jsonl"}], "epochs": 2},
    "rollout": {"n": 4, "sampling": {"max_new_tokens": 8, "temperature": 1.0, "stop": ["x"]}, "sides": ["images"]},
    "staleness": {"mode": "async", "bound": 2, "on_expiry": "mask"},
    "engine": {"args": {"tp-size": 2}, "env": {"A": "1"}, "python": "python3", "url": "http://h:1"},
    "worker": {"count": 1, "slots": 4, "rewards": ["mine:reward"]},
    "reward": {"function": "exact_match", "pool": {"kind": "rq"}},
    "buffer": {"lease_s": 4.0},
    "trainer": {"batch_groups": 2, "lr": 1e-6, "filter": {"functions": ["nonzero_std"]},
                "subscription": {"size": 2, "unit": "groups", "start": "version:1"}},
    "fleet": {"models": [{"name": "m", "model_path": "m"}], "nodes": [{"host": "h", "gpus": 1}]},
}  # fmt: skip
#: The least that is one.
SHORT = "{run: r, model: {path: m}, data: {train: [{name: d, path: d}]}, engine: {env: {}}}"
TAGS = ["!!int", "!!float", "!!bool", "!!timestamp", "!!binary", "!!map", "!!set", "!!omap", "!!pairs", "!!merge"]


def load(text: str | bytes, *overrides: str, environ: dict[str, str] | None = None) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
        return load_config(path, list(overrides), environ or {})


@SAME
@given(data=near(yaml.safe_dump(GOOD).encode()))
def test_any_bytes_are_a_configuration_or_refused(data: bytes) -> None:
    is_read_or_refused(load, data)


@SAME
@given(values=value_near(GOOD, WORST_JSON))
def test_any_values_are_a_configuration_or_refused(values: Any) -> None:
    is_read_or_refused(load, json.dumps(values))


@SAME
@given(tag=st.sampled_from(TAGS), text=st.sampled_from(["", "x", "{}", "[]", "[[]]", "{x: }", "[x, y]", "0x", "1:2"]))
def test_a_value_that_is_not_what_its_tag_says_is_refused(tag: str, text: str) -> None:
    is_read_or_refused(load, f"run: r\nseed: {tag} {text}\n")
    is_read_or_refused(load, f"{tag} {text}: 1\n")
    is_read_or_refused(load, "run: r", f"--seed={tag} {text}")


@SAME
@given(
    key=st.sampled_from(
        [*GOOD, "data.train.0.n", "data.train.²", "data.train." + "9" * 5000, "engine.env", "a.b", "."]
    ),
    text=st.one_of(st.text(max_size=12), st.sampled_from(["{1: 2}", "[" * 400, "&a [*a]", "2001-99-99", "1" * 5000])),
    by_variable=st.booleans(),
)
def test_any_setting_is_taken_or_refused(key: str, text: str, by_variable: bool) -> None:
    name = "PENSTOCK_" + key.upper().replace(".", "__")
    given = {"environ": {name: text}} if by_variable else {}
    is_read_or_refused(lambda: load(SHORT, *([] if given else [f"--{key}={text}"]), **given))


def doubling(levels: int, merged: bool = False) -> str:
    lines = ["a0: &a0 {x: 1}" if merged else "a0: &a0 [x, x]"]
    for at in range(1, levels):
        twice = f"[*a{at - 1}, *a{at - 1}]"
        # With a key of its own each: PyYAML 6.0.4 takes what is merged twice once, and sums grow all the same.
        lines.append(f"a{at}: &a{at} {{<<: {twice}, x{at}: 1}}" if merged else f"a{at}: &a{at} {twice}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        doubling(40), doubling(40, merged=True), "[" * 400, "a: " + "{a: " * 400, "a: &a [*a]", "a: &a {b: *a}",
        "- x\n" * 301, " " * 100_001,
    ],
    ids=["aliases", "merges", "lists", "maps", "a list in itself", "a map in itself", "many", "long"],
)  # fmt: skip
def test_what_grows_without_an_end_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "MAX_VALUES", 300)
    monkeypatch.setattr(yaml_file, "MAX_CHARACTERS", 100_000)
    with pytest.raises(NotYaml):
        parse_yaml(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(text)


def test_aliases_and_merges_are_read() -> None:
    found = parse_yaml("base: &b {x: 1, y: [2]}\nmore: {<<: *b, x: 3}\nsame: *b")

    assert found == {"base": {"x": 1, "y": [2]}, "more": {"x": 3, "y": [2]}, "same": {"x": 1, "y": [2]}}


@SAME
@given(values=value_near(GOOD, WORST_JSON))
def test_a_configuration_that_was_saved_is_read_back_as_it_was(values: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, saved = Path(folder, "run.yaml"), Path(folder, "saved.yaml")
        path.write_text(json.dumps(values | {"redis": {}} if isinstance(values, dict) else values))
        try:
            config = load_config(path, [], {})
        except ConfigError:
            return
        save_resolved(config, saved)
        assert load_config(saved, [], {}) == config


@SAME
@given(values=value_near({"redis": {"url": "redis://h", "payload_servers": {"a": "x"}}}, WORST_JSON))
def test_a_saved_configuration_says_where_redis_is_or_is_refused(values: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text(json.dumps(values))
        Path(folder, "redis.json").write_text('{"url": "redis://:x@h", "payload_servers": {"a": "redis://:x@h"}}')
        is_read_or_refused(_addresses, Path(folder))
