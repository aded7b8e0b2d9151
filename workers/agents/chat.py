"""Render chat conversations to token ids by the model's chat template, without encoding generated tokens again.

A template only shows its format by rendering. To find the text that follows an answer, the conversation is rendered
with a marker instead of the answer: the text after the marker ends the answer's turn and contains the new messages.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.text import format_exc, safe_repr, utf8_safe

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
#: Default end of the reasoning in an answer, for templates that do not render reasoning.
THINK_END = "</think>"


class ChatTemplate:
    """Render conversations to token ids.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template.
        kwargs: variables of the template, such as ``enable_thinking``.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template cannot render a message.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer in model.path has no chat template: use an instruct model, or add chat_template.jinja "
                "to the model's folder."
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = {*tokenizer.all_special_ids, *(token for token, about in added if about.special)}
        # Unpredictable, so that no message can contain them.
        self._marker, self._reasoning_marker = (f"M{secrets.token_hex(12)}" for _ in range(2))
        try:
            self._think_end = self._find_think_end()
        except ValueError as exc:
            raise ConfigError(
                f"the chat template of the tokenizer in model.path cannot render a user message: {exc}"
            ) from exc

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> list[int]:
        """Return the token ids of a conversation with the generation prompt for the next answer.

        Raises:
            ValueError: the template cannot render these messages.
        """
        return self.encode(self._render(normalize(messages), tools))

    def continuation(
        self, messages: Sequence[Mapping[str, Any]], answer: int, tools: Tools, generated: Sequence[int]
    ) -> list[int] | None:
        """Return the token ids that follow a generated answer: end of turn, new messages, generation prompt.

        Args:
            messages: complete conversation.
            answer: index of the message with the answer, as the client sent it; later messages are new.
            generated: token ids of the answer; a stop id may be the last one.

        Returns:
            None if appending cannot express this conversation: the template changes text before the answer, removes its
            reasoning, or ends its turn with another token than the generated one.

        Raises:
            ValueError: a message is invalid.
        """
        plain = normalize(messages)
        ids = self._following(plain, answer, tools, generated)
        return None if ids is None else self._without_end(ids, generated)

    def text_continuation(self, answer: str, rest: str, generated: Sequence[int]) -> list[int] | None:
        """Return the token ids of the text after a generated answer, without the generated stop.

        Args:
            answer: text of the answer, without the stop that ended it.
            rest: complete text after the answer.
            generated: token ids of the answer, including the stop.

        Returns:
            None if appending cannot express it: a stop text was generated, and ``rest`` omits it.
        """
        text = self._tokenizer.decode(list(generated), skip_special_tokens=False)
        end = text[len(answer) :] if text.startswith(answer) else ""
        if rest.startswith(end):
            rest = rest[len(end) :]
        elif generated[-1] not in self._special_ids:
            return None
        return self.encode(rest) or None

    def _following(
        self, messages: list[Message], answer: int, tools: Tools, generated: Sequence[int]
    ) -> list[int] | None:
        """Return the token ids from the end of an answer's turn on; None if the template hides them."""
        try:
            context = self._render(messages[:answer], tools, prompts=False)
        except ValueError:
            return None
        has_reasoning = self._think_end in self._tokenizer.decode(list(generated), skip_special_tokens=False)
        calls = messages[answer].get("tool_calls")
        # A turn with calls may end differently from a turn without; some templates refuse several calls.
        for marked in (self._marked_call, self._marked_content) if calls else (self._marked_content,):
            rest = self._after_marker(messages, answer, tools, marked(messages[answer]), context)
            if rest is None or (has_reasoning and not self._keeps_reasoning(messages, answer, tools)):
                continue
            ids = self.encode(rest)
            if marked == self._marked_content:
                return ids
            # The model generated the syntax between the arguments of a call and the next special token.
            if (first := self._first_special(ids)) is not None:
                return ids[first:]
        return None

    def _after_marker(
        self, messages: list[Message], answer: int, tools: Tools, marked: Message, context: str
    ) -> str | None:
        """Return the rendered text after the marker; None if the text does not begin with ``context``."""
        try:
            text = self._render([*messages[:answer], marked, *messages[answer + 1 :]], tools)
        except ValueError:
            return None
        if text.count(self._marker) != 1 or not text.startswith(context):
            return None
        return text.partition(self._marker)[2]

    def _keeps_reasoning(self, messages: list[Message], answer: int, tools: Tools) -> bool:
        """Return whether the template renders the reasoning of an answer, from its field or from the content."""
        marker, message = self._reasoning_marker, messages[answer]
        as_text = f"<think>\n{marker}\n{self._think_end}\n\n{self._marker}"
        for changed in ({"reasoning_content": marker}, {"content": as_text}):
            try:
                text = self._render([*messages[:answer], message | changed, *messages[answer + 1 :]], tools)
            except ValueError:
                continue
            if marker in text:
                return True
        return False

    def _marked_content(self, message: Message) -> Message:
        return {"role": message["role"], "content": self._marker}

    def _marked_call(self, message: Message) -> Message:
        *earlier, last = message["tool_calls"]
        function = last["function"] | {"arguments": {"marker": self._marker}}
        return message | {"tool_calls": [*earlier, last | {"function": function}]}

    def _without_end(self, ids: list[int], generated: Sequence[int]) -> list[int] | None:
        """Remove the generated part of a turn's end; return None if another token ended the turn."""
        last = list(generated)
        first = self._first_special(ids)
        for begin in dict.fromkeys((0, first or 0)):
            following = ids[begin:]
            for length in range(min(len(following), len(last)), 0, -1):
                if last[-length:] == following[:length]:
                    return following[length:]
        return None if last and first is not None and last[-1] in self._special_ids else ids

    def _first_special(self, ids: Sequence[int]) -> int | None:
        return next((at for at, token in enumerate(ids) if token in self._special_ids), None)

    def _find_think_end(self) -> str:
        """Return the text that the template puts between reasoning and content."""
        question = {"role": "user", "content": "a"}
        self._render([question], None)
        answer = {"role": "assistant", "content": self._marker, "reasoning_content": self._reasoning_marker}
        try:
            text = self._render([question, answer], None, prompts=False)
        except ValueError:
            return THINK_END
        between = text.partition(self._reasoning_marker)[2].partition(self._marker)[0]
        return between.strip() or THINK_END

    def _render(self, messages: list[Message], tools: Tools, *, prompts: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=prompts,
                **self._kwargs,
            )
        except Exception as exc:  # a template may raise anything
            raise ValueError(f"the model's chat template cannot render these messages: {format_exc(exc)}.") from exc
        return utf8_safe(str(text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert OpenAI messages to the form that templates expect: content as one string, call arguments as objects.

    Raises:
        ValueError: a message has no role, or parts that are not text.
    """
    return [_normal_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def message_key(message: dict[str, Any]) -> list[Any]:
    """Return the fields that equal messages share; clients may change ids, whitespace and absent fields."""
    calls = [[call["function"]["name"], call["function"].get("arguments")] for call in message.get("tool_calls") or ()]
    return [message["role"], (message.get("content") or "").strip(), message.get("name") or "", calls]


def _normal_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} is {safe_repr(message)}: send an object with a role.")
    plain: Message = {**message, "content": _text(message.get("content"), where)}
    if plain["role"] == "developer":
        plain["role"] = "system"
    if (reasoning := plain.pop("reasoning", None)) and not plain.get("reasoning_content"):
        plain["reasoning_content"] = reasoning
    if calls := plain.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls is {safe_repr(calls)}: send a list of calls.")
        plain["tool_calls"] = [_normal_call(call, f"{where}.tool_calls") for call in calls]
    return plain


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} has content that is not text: send a string, or parts of type text.")
    return "\n".join(map(str, texts))


def _normal_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} contains {safe_repr(call)}: send function calls with a name.")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(text: object) -> object:
    """Parse the arguments of a call as an object; return text that is not a JSON object unchanged."""
    if not isinstance(text, str):
        return text or {}
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
