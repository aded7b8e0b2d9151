"""Chat messages on their way to a prompt: system prompt, tools, keywords of the template."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config import DatasetConfig
from penstock.producer.main import fingerprint
from penstock.producer.mixture import Mixture
from penstock.producer.prompt import Template
from penstock.producer.sources.rows import BadLine
from tests.unit.producer.making import made

SHOWN = Template(lambda messages, **keywords: json.dumps([messages, keywords]))
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = [{"type": "function", "function": {"name": "search"}}]


def rendered(folder: Path, row: dict[str, Any], **keys: Any) -> tuple[Any, Any]:
    """(messages, keywords) that the template was given."""
    messages, keywords = json.loads(made(folder, [row], template=SHOWN, apply_chat_template=True, **keys)[0].text or "")
    return messages, keywords


def test_a_system_prompt_comes_first_unless_the_row_has_one(tmp_path: Path) -> None:
    for prompt in ("hi", [USER]):
        assert rendered(tmp_path, {"prompt": prompt}, system_prompt="be brief")[0] == [SYSTEM, USER]
    own = [{"role": "system", "content": "be long"}, USER]
    assert rendered(tmp_path, {"prompt": own}, system_prompt="be brief")[0] == own


def test_the_template_is_given_keywords_and_tools(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"tools_key": "t", "chat_template_kwargs": {"enable_thinking": False}}
    for value in (TOOLS, json.dumps(TOOLS)):
        assert rendered(tmp_path, {"prompt": "hi", "t": value}, **keys)[1] == {"enable_thinking": False, "tools": TOOLS}
    for value in (None, [], "[]", ""):
        assert rendered(tmp_path, {"prompt": "hi", "t": value}, **keys)[1] == {"enable_thinking": False}


def test_tools_are_in_the_metadata_too(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"template": SHOWN, "apply_chat_template": True, "tools_key": "t", "metadata_key": "m"}
    one, other = made(tmp_path, [{"prompt": "a", "t": TOOLS}, {"prompt": "a", "t": TOOLS, "m": {"tools": 1}}], **keys)
    assert (one.metadata, other.metadata) == ({"tools": TOOLS}, {"tools": 1})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "the row has no column 't'"),
        ({"t": "{"}, "'t' is invalid JSON"),
        ({"t": {"a": 1}}, "is not a list of maps"),
    ],
)
def test_tools_that_are_none_are_told_with_their_line(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(BadLine, match=f"line 1: .*{says}"):
        rendered(tmp_path, {"prompt": "a", **row}, tools_key="t")


def test_keys_that_need_a_template_or_are_ours_are_refused() -> None:
    for keys in ({"system_prompt": "x"}, {"tools_key": "t"}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(ValidationError, match="needs a chat template: set apply_chat_template: true"):
            DatasetConfig(name="d", path="d", **keys)
    with pytest.raises(ValidationError, match="penstock sets tokenize, tools itself"):
        DatasetConfig(
            name="d", path="d", apply_chat_template=True, chat_template_kwargs={"tools": [], "tokenize": True}
        )


def test_what_shapes_prompts_is_in_the_fingerprint_and_what_only_refuses_them_is_not(tmp_path: Path) -> None:
    def of(**keys: Any) -> str:
        rows = [{"prompt": "hi", "t": TOOLS}]
        return fingerprint(Mixture([made(tmp_path, rows, template=SHOWN, apply_chat_template=True, **keys)], 0))

    shapes = ({"system_prompt": "x"}, {"tools_key": "t"}, {"chat_template_kwargs": {"a": 1}})
    assert len({of(), *(of(**keys) for keys in shapes)}) == 4
    for keys in ({"on_bad_line": "skip"}, {"max_prompt_tokens": 9}, {"max_prompt_tokens": 9, "on_long_prompt": "skip"}):
        assert of(**keys) == of()
