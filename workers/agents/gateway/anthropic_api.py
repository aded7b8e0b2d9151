"""Implement Anthropic's messages API; requests are converted to OpenAI's format."""

import json
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

#: Unsupported parameters, which would constrain an answer or change its content.
_REFUSED = frozenset({"container", "mcp_servers", "output_format"})
_HONOURED = ("messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "output_config")

#: HTTP status -> error type.
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "invalid_request_error",
    410: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class Messages(Format):
    """``POST /v1/messages``."""

    ping = _event({"type": "ping"})

    def read(self, body: Mapping[str, Any]) -> TurnRequest:
        ignored = check_fields(body, _HONOURED, _REFUSED) + _check_choice(body.get("tool_choice"))
        output = body.get("output_config")
        if output is not None and (not isinstance(output, dict) or output.keys() - {"effort"}):
            raise invalid("output_config supports only effort: answers are not constrained.")
        messages = maps(body.get("messages"), "messages")
        if not messages:
            raise invalid("messages is empty: send at least one message.")
        limit = token_limit(body, "max_tokens")
        if limit is None:
            raise invalid("max_tokens is missing: send a number of tokens above 0.")
        system = body.get("system")
        found = [] if system is None else [{"role": "system", "content": text_of(system, "system")}]
        for index, message in enumerate(messages):
            found += _converted(message, f"messages.{index}")
        return TurnRequest(
            messages=found,
            tools=[] if (body.get("tool_choice") or {}).get("type") == "none" else _tools(body),
            max_tokens=limit,
            stop=stops(body, "stop_sequences"),
            stream=flag(body, "stream"),
            ignored=ignored,
        )

    def answer(self, turn: Turn, request: TurnRequest, model: str) -> dict[str, Any]:
        return {
            **_head(turn, model),
            "content": _blocks(turn),
            "stop_reason": _STOP_REASONS.get(turn.finish_reason, "end_turn"),
            "usage": _usage(turn, turn.completion_tokens),
        }

    def events(self, turn: Turn, request: TurnRequest, model: str) -> Iterator[bytes]:
        yield _event({"type": "message_start", "message": {**_head(turn, model), "usage": _usage(turn, 0)}})
        for index, block in enumerate(_blocks(turn)):
            empty, deltas = _pieces(block)
            yield _event({"type": "content_block_start", "index": index, "content_block": empty})
            for delta in deltas:
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        ended = {"stop_reason": _STOP_REASONS.get(turn.finish_reason, "end_turn"), "stop_sequence": None}
        yield _event({"type": "message_delta", "delta": ended, "usage": {"output_tokens": turn.completion_tokens}})
        yield _event({"type": "message_stop"})

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = _ERRORS.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def event(self, data: Mapping[str, Any]) -> bytes:
        return _event(data)


def _check_choice(choice: Any) -> tuple[str, ...]:
    """Return tool_choice if it is ignored; raise ApiError if it would constrain the answer to a tool."""
    if choice is None:
        return ()
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "none", "any"):
        raise invalid("tool_choice must have type auto, none or any: answers are not constrained to a tool.")
    if flag(choice, "disable_parallel_tool_use"):
        raise invalid("tool_choice.disable_parallel_tool_use is not supported: remove it.")
    return ("tool_choice any",) if choice["type"] == "any" else ()


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_tool(one, f"tools.{index}") for index, one in enumerate(maps(body.get("tools"), "tools"))]


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise invalid(f"{where} has type {safe_repr(tool.get('type'))}: only client tools are supported.")
    if not isinstance(schema := tool.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema is {safe_repr(schema)}: send a JSON schema.")
    described = {"description": text_at(tool, "description", where)} if tool.get("description") is not None else {}
    return {"type": "function", "function": {"name": text_at(tool, "name", where), **described, "parameters": schema}}


def _converted(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Convert a message to OpenAI's format, with a separate message for each tool result."""
    content = message.get("content")
    match message.get("role"):
        case "user":
            if isinstance(content, str):
                return [{"role": "user", "content": content}]
            return _user(maps(content, f"{where}.content"), f"{where}.content")
        case "assistant":
            if isinstance(content, str):
                return [{"role": "assistant", "content": content}]
            return [_assistant(maps(content, f"{where}.content"), f"{where}.content")]
        case "system":
            return [{"role": "system", "content": text_of(content, f"{where}.content")}]
        case role:
            raise invalid(f"{where}.role is {safe_repr(role)}: send user or assistant.")


def _user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}.{index}"
        match block.get("type"):
            case "text" if found and found[-1]["role"] == "user":
                found[-1]["content"] += text_at(block, "text", at)
            case "text":
                found.append({"role": "user", "content": text_at(block, "text", at)})
            case "tool_result":
                result = block.get("content")
                content = "" if result is None else text_of(result, f"{at}.content")
                found.append({"role": "tool", "tool_call_id": text_at(block, "tool_use_id", at), "content": content})
            case kind:
                raise invalid(f"{at} has type {safe_repr(kind)}: only text and tool_result are supported.")
    return found or [{"role": "user", "content": ""}]


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{where}.{index}"
        match block.get("type"):
            case "text":
                texts.append(text_at(block, "text", at))
            case "thinking":
                thoughts.append(text_at(block, "thinking", at))
            case "tool_use":
                calls.append(_call(block, at))
            case kind:
                raise invalid(f"{at} has type {safe_repr(kind)}: only text, thinking and tool_use are supported.")
    found: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(given := block.get("input"), dict):
        raise invalid(f"{where}.input is {safe_repr(given)}: send an object.")
    function = {"name": text_at(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": text_at(block, "id", where), "type": "function", "function": function}


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    """Return the content blocks of an answer, at least one, as clients expect."""
    found: list[dict[str, Any]] = []
    if turn.reasoning is not None:
        found.append({"type": "thinking", "thinking": turn.reasoning, "signature": str(turn.turn)})
    if turn.content or not turn.tool_calls:
        found.append({"type": "text", "text": turn.content or ""})
    for call in turn.tool_calls:
        given = _input(call["arguments"])
        found.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": given})
    return found


def _input(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call into an object, which this API requires."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split a block into an empty block and the deltas that complete it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return {**block, "thinking": "", "signature": ""}, [thought, signed]
        case _:
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _head(turn: Turn, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{turn.turn}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(turn: Turn, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": turn.prompt_tokens,
        "output_tokens": output_tokens,
    }
