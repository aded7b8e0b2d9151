"""Implement OpenAI's chat completions and completions APIs."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.text import safe_repr
from penstock.workers.agents.gateway.turns import (
    ApiError,
    Format,
    Turn,
    TurnRequest,
    check_fields,
    flag,
    invalid,
    maps,
    stops,
    text_at,
    text_of,
    token_limit,
)

#: Unsupported parameters of OpenAI, SGLang and vLLM, which would constrain an answer or change its content.
_REFUSED = frozenset({
    "allowed_token_ids", "audio", "bad_words", "continue_final_message", "custom_logit_processor", "ebnf",
    "function_call", "functions", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "input_ids", "json_schema", "logits_processors", "prompt_logprobs", "prompt_token_ids", "regex",
    "return_hidden_states", "structural_tag", "structured_outputs", "tokens", "use_beam_search", "web_search_options",
})  # fmt: skip
_SHARED = ("stream", "stream_options", "max_tokens", "stop", "logprobs", "n", "logit_bias", "response_format")
_CHAT = (*_SHARED, "messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens",
         "top_logprobs", "modalities")  # fmt: skip
_COMPLETION = (*_SHARED, "prompt", "echo", "best_of", "suffix")

#: HTTP status -> type and code of the error.
_ERRORS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    409: ("invalid_request_error", "episode_restarted"),
    410: ("invalid_request_error", "episode_ended"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "no_episode"),
}


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class _OpenAI(Format):
    """Implement the parts that both APIs share."""

    ping = b": waiting for the turn\n\n"

    def error(self, error: ApiError) -> dict[str, Any]:
        kind, code = _ERRORS.get(error.status, ("server_error", None))
        return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}

    def event(self, data: Mapping[str, Any]) -> bytes:
        return _event(data)


class Chat(_OpenAI):
    """Implement ``POST /v1/chat/completions``."""

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        ignored = check_fields(body, _CHAT, _REFUSED) + _check_choice(body.get("tool_choice"))
        _check_shared(body)
        if body.get("top_logprobs"):
            raise invalid("top_logprobs is not supported: only the logprobs of generated tokens are recorded.")
        if body.get("modalities") not in (None, ["text"]):
            raise invalid("modalities must be ['text'].")
        if body.get("parallel_tool_calls") is False:
            raise invalid("parallel_tool_calls: false is not supported: remove it.")
        messages = maps(body.get("messages"), "messages")
        if not messages:
            raise invalid("messages is empty: send at least one message.")
        limit = token_limit(body, "max_completion_tokens")
        return TurnRequest(
            messages=[_message(one, f"messages.{index}") for index, one in enumerate(messages)],
            tools=[] if body.get("tool_choice") == "none" else _tools(body),
            max_tokens=token_limit(body, "max_tokens") if limit is None else limit,
            stop=stops(body, "stop"),
            stream=flag(body, "stream"),
            include_usage=_include_usage(body),
            logprobs=flag(body, "logprobs"),
            ignored=ignored,
        )

    def answer(self, turn: Turn, request: TurnRequest, model: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
        if turn.reasoning is not None:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = _calls(turn)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": turn.finish_reason,
            "logprobs": _logprobs(turn) if request.logprobs else None,
        }
        return {**_head(turn, model, "chat.completion"), "choices": [choice], "usage": _usage(turn)}

    def events(self, turn: Turn, request: TurnRequest, model: str) -> Iterator[bytes]:
        head = _head(turn, model, "chat.completion.chunk") | ({"usage": None} if request.include_usage else {})

        def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
            return _event({**head, "choices": [choice]})

        yield chunk({"role": "assistant", "content": ""})
        if turn.reasoning is not None:
            yield chunk({"reasoning_content": turn.reasoning})
        if turn.content or request.logprobs:
            yield chunk({"content": turn.content or ""}, logprobs=_logprobs(turn) if request.logprobs else None)
        for index, call in enumerate(_calls(turn)):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, turn.finish_reason)
        if request.include_usage:
            yield _event({**head, "choices": [], "usage": _usage(turn)})
        yield b"data: [DONE]\n\n"


class Completions(_OpenAI):
    """Implement ``POST /v1/completions``."""

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        ignored = check_fields(body, _COMPLETION, _REFUSED)
        _check_shared(body)
        if flag(body, "echo") or body.get("suffix") or body.get("best_of") not in (None, 1):
            raise invalid("echo, suffix and best_of are not supported: remove them.")
        if (logprobs := body.get("logprobs")) is not None and (type(logprobs) is not int or logprobs != 0):
            raise invalid("logprobs must be 0: only the logprobs of generated tokens are recorded.")
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise invalid("prompt is invalid: send one string.")
        return TurnRequest(
            prompt=prompt,
            max_tokens=token_limit(body, "max_tokens"),
            stop=stops(body, "stop"),
            stream=flag(body, "stream"),
            include_usage=_include_usage(body),
            logprobs=logprobs is not None,
            ignored=ignored,
        )

    def answer(self, turn: Turn, request: TurnRequest, model: str) -> dict[str, Any]:
        return {**self._chunk(turn, request, model), "usage": _usage(turn)}

    def events(self, turn: Turn, request: TurnRequest, model: str) -> Iterator[bytes]:
        yield _event(self._chunk(turn, request, model))
        if request.include_usage:
            yield _event({**_head(turn, model, "text_completion"), "choices": [], "usage": _usage(turn)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, turn: Turn, request: TurnRequest, model: str) -> dict[str, Any]:
        logprobs = {
            "tokens": turn.token_names,
            "token_logprobs": turn.logprobs,
            "top_logprobs": None,
            "text_offset": [],
        }
        choice = {
            "index": 0,
            "text": turn.content or "",
            "finish_reason": turn.finish_reason,
            "logprobs": logprobs if request.logprobs else None,
        }
        return {**_head(turn, model, "text_completion"), "choices": [choice]}


def models(model: str) -> dict[str, Any]:
    """Return the answer to ``GET /v1/models``, with the fields of OpenAI's and Anthropic's APIs."""
    one = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": "penstock",
        "type": "model",
        "display_name": model,
        "created_at": "1970-01-01T00:00:00Z",
    }
    return {"object": "list", "data": [one], "has_more": False, "first_id": model, "last_id": model}


def _check_shared(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise invalid("n must be 1: the run decides how many samples a prompt gets.")
    if body.get("logit_bias"):
        raise invalid("logit_bias is not supported: remove it.")
    kind = body.get("response_format")
    if kind is not None and (not isinstance(kind, dict) or kind.get("type") != "text"):
        raise invalid("response_format must be {'type': 'text'}: answers are not constrained.")


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid("stream_options is invalid: send an object.")
    return flag(options, "include_usage")


def _check_choice(choice: Any) -> tuple[str, ...]:
    """Return tool_choice if it is ignored; raise ApiError if it would constrain the answer to a tool."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return ("tool_choice required",)
    raise invalid("tool_choice must be auto, none or required: answers are not constrained to a tool.")


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = maps(body.get("tools"), "tools")
    for index, tool in enumerate(found):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise invalid(f"tools.{index} is invalid: only tools of type function are supported.")
        text_at(tool["function"], "name", f"tools.{index}.function")
    return found


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message reduced to the fields that a chat template may use."""
    content = message.get("content")
    match message.get("role"):
        case "system" | "developer":
            return {"role": "system", "content": text_of(content, f"{where}.content")}
        case "user":
            named = {"name": text_at(message, "name", where)} if message.get("name") is not None else {}
            return {"role": "user", "content": text_of(content, f"{where}.content"), **named}
        case "tool":
            answered = text_at(message, "tool_call_id", where)
            return {"role": "tool", "tool_call_id": answered, "content": text_of(content, f"{where}.content")}
        case "assistant":
            return _assistant(message, where)
        case role:
            raise invalid(f"{where}.role is {safe_repr(role)}: send system, developer, user, assistant or tool.")


def _assistant(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if message.get("function_call") is not None or message.get("audio") is not None:
        raise invalid(f"{where} has a function_call or audio, which is not supported: use tool_calls and text.")
    content = message.get("content")
    found: dict[str, Any] = {
        "role": "assistant",
        "content": None if content is None else text_of(content, f"{where}.content"),
    }
    if message.get("reasoning_content") is not None:
        found["reasoning_content"] = text_at(message, "reasoning_content", where)
    if calls := maps(message.get("tool_calls"), f"{where}.tool_calls"):
        found["tool_calls"] = [_call(one, f"{where}.tool_calls.{index}") for index, one in enumerate(calls)]
    return found


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise invalid(f"{where} is invalid: only calls of type function are supported.")
    name, arguments = (text_at(function, one, f"{where}.function") for one in ("name", "arguments"))
    return {
        "id": text_at(call, "id", where),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _calls(turn: Turn) -> list[dict[str, Any]]:
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in turn.tool_calls
    ]


def _logprobs(turn: Turn) -> dict[str, Any]:
    named = zip(turn.token_names, turn.logprobs, strict=True)
    return {
        "content": [{"token": name, "logprob": value, "bytes": None, "top_logprobs": []} for name, value in named],
        "refusal": None,
    }


def _head(turn: Turn, model: str, kind: str) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {
        "id": f"{prefix}-{turn.turn}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"version-{turn.version}",
    }


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }
