"""Conversations as ids: what follows an answer is what the template renders after it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.workers.agents.chat import ChatTemplate
from tests.chat_templates import CHATML, LLAMA, MISTRAL, PLAIN, SPECIAL, THINKING, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
#: Token that ends a turn.
ENDS = {CHATML: "<|im_end|>", THINKING: "<|im_end|>", LLAMA: "<|eot_id|>", MISTRAL: "</s>", PLAIN: "<|endoftext|>"}
STYLES = pytest.mark.parametrize("template", ENDS, ids=["chatml", "thinking", "llama", "mistral", "plain"])
TOKENIZERS = {template: make_tokenizer(template) for template in ENDS}
USER = {"role": "user", "content": "how much is 1 + 2?"}


def call(text: str = "1", *, index: int = 0) -> dict[str, Any]:
    arguments = json.dumps({"text": text})
    return {"id": f"call{index}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def generated_call(template: str, *calls: dict[str, Any]) -> str:
    """An answer with calls, as models of this style write it; spaces and the order of keys are their own."""
    texts = [f'{{"arguments":{one["function"]["arguments"]},  "name":"add"}}' for one in calls]
    if template == LLAMA:
        return texts[0]
    if template == MISTRAL:
        return "[TOOL_CALLS] [" + ",".join(texts) + "]"
    return "".join(f"\n<tool_call>\n{text}\n</tool_call>" for text in texts)


class Talk:
    """A conversation whose answers are generated; it checks each continuation against the complete rendering."""

    def __init__(self, template: str, tools: Any = TOOLS) -> None:
        self.tokenizer = TOKENIZERS[template]
        self.chat, self.tools, self.end = ChatTemplate(self.tokenizer), tools, ENDS[template]
        self.messages: list[dict[str, Any]] = [dict(USER)]
        self.ids = self.chat.start(self.messages, tools)

    def turn(
        self, text: str, message: dict[str, Any], new: Sequence[dict[str, Any]], *, stop: bool = True
    ) -> list[int] | None:
        """Append an answer and what follows it; return that."""
        generated = self.tokenizer.encode(text + self.end * stop, add_special_tokens=False)
        self.messages += [{"role": "assistant"} | message, *new]
        answer = len(self.messages) - 1 - len(new)
        ids = self.chat.continuation(self.messages, answer, self.tools, generated)
        self.ids += [*generated, *(ids or [])]
        return ids

    def special(self, ids: Sequence[int]) -> list[str]:
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        # The plain style does not render the id that stops an answer.
        return [token for token in tokens if token in SPECIAL and token != "<|endoftext|>"]

    def assert_renders(self, ids: Sequence[int] | None) -> None:
        """The complete rendering has the special tokens of all ids, and ends with the text of the last ``ids``."""
        assert ids
        rendered = self.chat.start(self.messages, self.tools)
        assert self.special(self.ids) == self.special(rendered)
        assert self.tokenizer.decode(rendered).endswith(self.tokenizer.decode(ids))


@STYLES
@pytest.mark.parametrize("stop", [True, False])
@given(text=st.text(max_size=20), question=st.text(max_size=20))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_user_message_follows_an_answer(template: str, stop: bool, text: str, question: str) -> None:
    talk = Talk(template, tools=None)

    for _ in range(3):
        talk.assert_renders(talk.turn(text, {"content": text}, [{"role": "user", "content": question}], stop=stop))


@STYLES
@pytest.mark.parametrize("stop", [True, False])
@given(text=st.text(max_size=20), result=st.text(max_size=20))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_results_of_tools_follow_calls(template: str, stop: bool, text: str, result: str) -> None:
    talk = Talk(template)

    for index in range(3):
        one = call(text, index=index)
        new = [{"role": "tool", "tool_call_id": one["id"], "content": result}]
        answer = generated_call(template, one)
        talk.assert_renders(talk.turn(answer, {"content": None, "tool_calls": [one]}, new, stop=stop))


@pytest.mark.parametrize("template", [CHATML, THINKING, MISTRAL], ids=["chatml", "thinking", "mistral"])
def test_results_of_parallel_calls_follow_them(template: str) -> None:
    talk = Talk(template)
    calls = [call(str(index), index=index) for index in range(3)]
    new = [{"role": "tool", "tool_call_id": one["id"], "content": "x"} for one in calls]

    talk.assert_renders(talk.turn(generated_call(template, *calls), {"content": "", "tool_calls": calls}, new))


def test_generated_ids_are_never_encoded_again() -> None:
    """The client returns other text than was generated, with spaces and another order of keys."""
    talk = Talk(CHATML)
    begin = list(talk.ids)

    ids = talk.turn("  1 +  2 = 3\n", {"content": "1 + 2 = 3"}, [USER])

    assert talk.tokenizer.decode(talk.ids[len(begin) :]) == (
        "  1 +  2 = 3\n<|im_end|>\n<|im_start|>user\nhow much is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids is not None
    assert talk.tokenizer.decode(ids).startswith("\n<|im_start|>user")


def test_the_end_of_a_call_is_appended_as_far_as_it_is_missing() -> None:
    """A turn may be ended by several special tokens, and a stop text may have cut any of them."""
    template = CHATML.replace(
        "</tool_call>\n{%- endfor %}", "</tool_call>\n{%- endfor %}{% if message.tool_calls %}<s></s>{% endif %}"
    )
    tokenizer = make_tokenizer(template)
    chat, one = ChatTemplate(tokenizer), call()
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [one]}, {"role": "tool", "content": "3"}]
    answer = generated_call(template, one)

    for end, rest in [("", "<s></s><|im_end|>"), ("<s>", "</s><|im_end|>"), ("<s></s><|im_end|>", "")]:
        generated = tokenizer.encode(answer + end)
        ids = chat.continuation(messages, 1, TOOLS, generated)
        assert ids is not None
        assert tokenizer.decode(ids).partition("\n<|im_start|>")[0] == rest


def test_reasoning_that_the_template_removes_starts_a_new_part() -> None:
    talk = Talk(THINKING)
    one = call()
    thought = "<think>\nhm\n</think>\n\n"
    result = {"role": "tool", "tool_call_id": one["id"], "content": "3"}

    kept = talk.turn(thought + generated_call(THINKING, one), {"content": "", "tool_calls": [one]}, [result])
    removed = talk.turn(thought + "it is 3", {"content": "it is 3"}, [USER])

    assert kept is not None
    assert removed is None


def test_reasoning_that_an_earlier_answer_returned_is_missed_too() -> None:
    talk = Talk(THINKING)
    one = call()
    result = {"role": "tool", "tool_call_id": one["id"], "content": "3"}
    message = {"content": "", "tool_calls": [one], "reasoning": "hm"}

    assert talk.turn("<think>\nhm\n</think>\n\n" + generated_call(THINKING, one), message, [result]) is not None
    assert talk.turn("it is 3", {"content": "it is 3"}, [USER]) is None


def test_a_template_that_keeps_reasoning_as_text_continues() -> None:
    talk = Talk(CHATML)
    thought = "<think>\nhm\n</think>\n\nit is 3"

    talk.assert_renders(talk.turn(thought, {"content": thought}, [USER]))


def test_tools_that_move_to_a_new_user_message_start_a_new_part() -> None:
    talk = Talk(MISTRAL)

    assert talk.turn("3", {"content": "3"}, [USER]) is None


def test_a_turn_that_another_token_ended_starts_a_new_part() -> None:
    talk = Talk(CHATML)
    talk.end = "<|endoftext|>"

    assert talk.turn("3", {"content": "3"}, [USER]) is None


def test_what_a_template_refuses_is_no_continuation_and_an_error_at_a_start() -> None:
    talk = Talk(MISTRAL, tools=None)

    assert talk.turn("3", {"content": "3"}, [{"role": "assistant", "content": "4"}]) is None
    with pytest.raises(ValueError, match=r"these messages: TemplateError.*roles must alternate"):
        talk.chat.start(talk.messages)


def test_several_calls_that_a_template_refuses_are_followed_by_their_results() -> None:
    talk = Talk(LLAMA)
    calls = [call(index=0), call(index=1)]
    new = [{"role": "tool", "tool_call_id": one["id"], "content": "x"} for one in calls]

    ids = talk.turn("two calls", {"content": "", "tool_calls": calls}, new)

    assert ids is not None
    assert talk.special(ids) == ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"] * 2 + [
        "<|start_header_id|>",
        "<|end_header_id|>",
    ]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", r"messages\[0\] is 'hi': send an object with a role"),
        ({"content": "hi"}, "send an object with a role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "content that is not text"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "send function calls with a name"),
    ],
)
def test_a_message_of_another_form_is_refused(message: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ChatTemplate(TOKENIZERS[CHATML]).start([message])


def test_messages_of_openai_become_those_of_templates() -> None:
    tokenizer = TOKENIZERS[CHATML]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call("é")]},
    ]

    text = tokenizer.decode(ChatTemplate(tokenizer).start(messages))

    assert text.startswith("<|im_start|>system\na\nb<|im_end|>")
    assert '{"name": "add", "arguments": {"text": "é"}}' in text


def test_a_tokenizer_without_a_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="has no chat template: use an instruct model"):
        ChatTemplate(make_tokenizer(None))
    with pytest.raises(ConfigError, match=r"cannot render a user message: .* never"):
        ChatTemplate(make_tokenizer("{{ raise_exception('never') }}"))


def test_variables_reach_the_template() -> None:
    tokenizer = make_tokenizer("{{ messages[0].content }}{% if thinks %}<think>{% endif %}")

    assert tokenizer.decode(ChatTemplate(tokenizer, {"thinks": True}).start([USER])).endswith("<think>")


def test_a_template_that_ends_content_with_a_newline_of_its_own_does_not_end_a_turn_twice() -> None:
    tokenizer = make_tokenizer(CHATML.replace("{%- endfor %}<|im_end|>", "{%- endfor %}{{ '\\n' }}<|im_end|>"))
    messages = [USER, {"role": "assistant", "content": "3"}, USER]

    for end, rest in [("", "\n<|im_end|>"), ("\n", "<|im_end|>"), ("<|im_end|>", ""), ("\n<|im_end|>", "")]:
        ids = ChatTemplate(tokenizer).continuation(messages, 1, None, tokenizer.encode("3" + end))
        assert ids is not None
        assert tokenizer.decode(ids).partition("\n<|im_start|>")[0] == rest


def test_text_that_is_not_unicode_is_escaped() -> None:
    tokenizer = TOKENIZERS[PLAIN]

    ids = ChatTemplate(tokenizer).start([{"role": "user", "content": "\ud800"}])

    assert tokenizer.decode(ids) == "user: \\ud800\nassistant:"
