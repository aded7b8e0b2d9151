"""Chat conversations as token ids, by the model's chat template: generated tokens are never encoded a second time.

A template is only known by what it renders. So the text that follows an answer is found by rendering the conversation
with a marker in place of the answer: what follows the marker ends the answer's turn, and holds the new messages.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.text import format_exc, safe_repr, utf8_safe

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
#: End of the reasoning in an answer, if the template does not render reasoning.
THINK_END = "</think>"


class ChatTemplate:
    """Render conversations to token ids.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        kwargs: variables of the template, such as ``enable_thinking``.

    Raises:
        ConfigError: the tokenizer has no chat template, or the template cannot render one message.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer in model.path has no chat template: use an instruct model, or put a chat_template.jinja "
                "into the model's folder."
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
        """Return the ids of a conversation and of the prompt for the next answer.

        Raises:
            ValueError: the template cannot render these messages.
        """
        return self.encode(self._render(normalize(messages), tools))

    def continuation(
        self, messages: Sequence[Mapping[str, Any]], answer: int, tools: Tools, generated: Sequence[int]
    ) -> list[int] | None:
        """Return the ids that follow a generated answer: the end of its turn, new messages, and the next prompt.

        Args:
            messages: the whole conversation.
            answer: index of the message that holds the answer, as the client returned it; later messages are new.
            generated: ids of the answer; a stop id may be the last one.

        Returns:
            None if ids that only grow cannot express this conversation: the template changes what precedes the answer,
            removes its reasoning, or ends its turn with another token than the generated one.

        Raises:
            ValueError: a message is not a message.
        """
        plain = normalize(messages)
        ids = self._following(plain, answer, tools, generated)
        return None if ids is None else self._without_end(ids, generated)

    def text_continuation(self, answer: str, rest: str, generated: Sequence[int]) -> list[int] | None:
        """Return the ids of the text behind a generated answer, without the end of the answer that was generated.

        Args:
            answer: text of the answer, without the stop that ended it.
            rest: all text that follows it.
            generated: ids of the answer; they include the stop.

        Returns:
            None if ids that only grow cannot express it: a stop text was generated, and ``rest`` omits it.
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
        """Return the ids of the complete end of an answer's turn, and of all that follows; None if unknown."""
        try:
            context = self._render(messages[:answer], tools, prompts=False)
        except ValueError:
            return None
        has_reasoning = self._think_end in self._tokenizer.decode(list(generated), skip_special_tokens=False)
        calls = messages[answer].get("tool_calls")
        # The end of a turn with calls may differ from that of a turn without; some templates refuse several calls.
        for marked in (self._marked_call, self._marked_content) if calls else (self._marked_content,):
            rest = self._after_marker(messages, answer, tools, marked(messages[answer]), context)
            if rest is None or (has_reasoning and not self._keeps_reasoning(messages, answer, tools)):
                continue
            ids = self.encode(rest)
            if marked == self._marked_content:
                return ids
            # The syntax between the arguments of a call and the next special token was generated.
            if (first := self._first_special(ids)) is not None:
                return ids[first:]
        return None

    def _after_marker(
        self, messages: list[Message], answer: int, tools: Tools, marked: Message, context: str
    ) -> str | None:
        """Return the text after the marker in a conversation; None if its beginning is not ``context``."""
        try:
            text = self._render([*messages[:answer], marked, *messages[answer + 1 :]], tools)
        except ValueError:
            return None
        if text.count(self._marker) != 1 or not text.startswith(context):
            return None
        return text.partition(self._marker)[2]

    def _keeps_reasoning(self, messages: list[Message], answer: int, tools: Tools) -> bool:
        """Return whether the reasoning of an answer is rendered, in its own field or as text of the content."""
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
        """Remove what was generated of the end of a turn; None if it was ended by another token."""
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
        """Return the text between the reasoning and the content of an answer."""
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
        """Return the ids of a text, without special tokens added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return OpenAI messages as templates expect them: text as one string, arguments of calls as objects.

    Raises:
        ValueError: one has no role, or parts that are not text.
    """
    return [_normal_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def message_key(message: dict[str, Any]) -> list[Any]:
    """Return what two messages must have in common to be equal: clients change ids, blanks and absent fields."""
    calls = [[call["function"]["name"], call["function"].get("arguments")] for call in message.get("tool_calls") or ()]
    return [message["role"], (message.get("content") or "").strip(), message.get("name") or "", calls]


def _normal_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} is {safe_repr(message)}, which is not an object with a role.")
    plain: Message = {**message, "content": _text(message.get("content"), where)}
    if plain["role"] == "developer":
        plain["role"] = "system"
    if (reasoning := plain.pop("reasoning", None)) and not plain.get("reasoning_content"):
        plain["reasoning_content"] = reasoning
    if calls := plain.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls is {safe_repr(calls)}, which is not a list of calls.")
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
        raise ValueError(f"{where} holds {safe_repr(call)}, which is not a call of a function with a name.")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(text: object) -> object:
    """Return the arguments of a call as an object; text that is not a JSON object stays text."""
    if not isinstance(text, str):
        return text or {}
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
