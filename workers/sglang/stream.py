"""Assemble SGLang's server-sent events of a request into the answer that it would have without streaming.

Each event is a JSON object with the ids and logprobs since the previous event (servers with
``--incremental-streaming-output``), or all so far.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import orjson

from penstock.errors import EngineError, EngineRefused
from penstock.text import safe_repr
from penstock.workers.sglang.segment import are_ids

#: Largest event in bytes, without data other than tokens; an answer of a million tokens is smaller.
MAX_EVENT_BYTES = 64 * 1024 * 1024
#: Most bytes read of an error answer.
MAX_HEAD_BYTES = 64 * 1024
#: Most tokens beyond the limit of a request: the draft of speculative decoding.
MAX_OVER = 256

#: Called with new tokens: version when the request was sent, ids [T] and logprobs [T]. The tokens may have a newer
#: version, which only the final answer reports.
OnTokens = Callable[[int, list[int], list[float]], None]


#: Key that marks the placeholder of a lost answer, with an unknown number of tokens.
ANSWER_LOST = "penstock_unheard"


def number_in(text: str) -> int | None:
    """Parse a version; return None if the text is not a version."""
    return int(text) if text.isdecimal() and len(text) < 20 else None


class Chunks(Protocol):
    """Iterate over the body of an answer as it arrives."""

    def iter_any(self) -> AsyncIterator[bytes]: ...


async def read_body(body: Chunks, max_bytes: int) -> bytes:
    """Read a non-streamed answer. Raises EngineError if it has more than ``max_bytes``."""
    read = bytearray()
    async for chunk in body.iter_any():
        read += chunk
        if len(read) > max_bytes:
            raise EngineError(f"the engine's answer has more than {max_bytes} bytes.")
    return bytes(read)


async def read_head(body: Chunks, max_bytes: int = MAX_HEAD_BYTES) -> bytes:
    """Read the beginning of an error answer."""
    read = bytearray()
    async for chunk in body.iter_any():
        read += chunk
        if len(read) >= max_bytes:
            break
    return bytes(read[:max_bytes])


async def read_events(body: Chunks, max_bytes: int = MAX_EVENT_BYTES) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream until its end mark, or until it ends without one.

    Raises:
        EngineError: an event is not JSON, or larger than ``max_bytes``.
    """
    rest = bytearray()
    async for chunk in body.iter_any():
        rest += chunk
        # A long event arrives in many chunks: split only chunks with an end of line.
        *lines, rest = rest.split(b"\n") if b"\n" in chunk else (rest,)
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield _decode(bytes(data))
        if len(rest) > max_bytes:
            raise EngineError(f"the engine's stream has an event of more than {max_bytes} bytes.")


def _decode(data: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise EngineError(f"the engine streamed an event that is not JSON: {data[:200]!r}.") from exc
    if not isinstance(event, dict):
        raise EngineError(f"the engine streamed an event that is not an object: {data[:200]!r}.")
    return event


def most_tokens(body: dict[str, Any]) -> int | None:
    """Return the token limit of a request; None without a limit."""
    most = body["sampling_params"].get("max_new_tokens")
    return None if most is None else int(most)


def check_length(count: int, most: int | None, rid: str) -> None:
    """Raise EngineError if an answer has far more tokens than the ``most`` requested."""
    if most is not None and count > most + MAX_OVER:
        raise EngineError(f"{rid}: the engine returned {count} tokens, but {most} were requested.")


class Answer:
    """Assemble one answer from its events.

    Args:
        incremental: whether events without a token count contain only new tokens.
        rid: request id, for errors.
        most: token limit of the request; None if unknown.
    """

    def __init__(self, rid: str, *, incremental: bool, most: int | None = None) -> None:
        self._rid = rid
        self._most = most
        self._incremental = incremental
        self._ids: list[int] = []
        self._entries: list[Any] = []
        self._last: dict[str, Any] = {}

    @property
    def is_finished(self) -> bool:
        """Whether an event had a finish reason."""
        return bool(self._meta.get("finish_reason"))

    @property
    def weight_version(self) -> Any:
        """Version in the last event, as reported."""
        return self._meta.get("weight_version")

    @property
    def _meta(self) -> dict[str, Any]:
        meta = self._last.get("meta_info")
        return meta if isinstance(meta, dict) else {}

    def add(self, event: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Add an event; return the new ids [T] and logprobs [T] for which both have arrived.

        Raises:
            EngineRefused, EngineError: see ``extend``; or ids and logprobs do not match.
        """
        known = min(len(self._ids), len(self._entries))
        self.extend(event)
        fresh = min(len(self._ids), len(self._entries))
        try:
            new = [int(token) for token in self._ids[known:fresh]]
            scored = [int(entry[1]) for entry in self._entries[known:fresh]]
            logprobs = [float(entry[0]) for entry in self._entries[known:fresh]]
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as exc:
            raise EngineError(f"{self._rid}: the engine streamed invalid ids or logprobs ({safe_repr(exc)}).") from exc
        if new != scored:
            raise EngineError(f"{self._rid}: the engine streamed logprobs of other ids than it generated.")
        return new, logprobs

    def extend(self, event: dict[str, Any]) -> None:
        """Add an event without checking its logprobs, which are checked when the answer is read.

        Raises:
            EngineRefused, EngineError: the event reports an error, lacks ids, or has more tokens than requested.
        """
        self._raise_error(event)
        self._last = event
        meta, ids = self._meta, event.get("output_ids") or []
        entries = meta.get("output_token_logprobs") or []
        if not are_ids(ids) or not isinstance(entries, list):
            raise EngineError(
                f"{self._rid}: the engine streamed {safe_repr(ids)} and {safe_repr(entries)} instead of ids and "
                "logprobs."
            )
        if self._is_increment(ids):
            self._ids += ids
            self._entries += entries
        else:
            self._ids, self._entries = ids, entries
        check_length(max(len(self._ids), len(self._entries)), self._most, self._rid)

    def _is_increment(self, ids: list[int]) -> bool:
        """Return whether an event contains only new tokens, by its token count or else the server's mode.

        Servers behind a router may have different modes.
        """
        count = self._meta.get("completion_tokens")
        if self._ids and count == len(ids):
            return False
        if count == len(self._ids) + len(ids):
            return True
        return self._incremental

    def _raise_error(self, event: dict[str, Any]) -> None:
        """Raise an error that is reported as an event, like its HTTP status without streaming."""
        error = event.get("error")
        if isinstance(error, dict):
            refused = EngineRefused if error.get("code") == 400 else EngineError
            raise refused(
                f"{self._rid}: the engine answered {safe_repr(error.get('code'))}: {str(error.get('message'))[:500]}"
            )
        meta = event.get("meta_info")
        finish = meta.get("finish_reason") if isinstance(meta, dict) else None
        if isinstance(finish, dict) and (status := finish.get("status_code")):
            refused = EngineRefused if status == 400 else EngineError
            raise refused(
                f"{self._rid}: the engine ended it with {safe_repr(status)}: {str(finish.get('message'))[:500]}"
            )

    def complete(self) -> dict[str, Any]:
        """Return the complete answer, as without streaming."""
        return self._last | {
            "output_ids": self._ids,
            "meta_info": self._meta | {"output_token_logprobs": self._entries},
        }
