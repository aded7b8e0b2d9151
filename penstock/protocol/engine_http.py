"""HTTP requests to engines by processes other than their worker: bounded, and never redirected.

No proxy is used and no redirect is followed: an answer always comes from the server at the address.
"""

import http.client
import io
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import ConfigError, EngineError
from penstock.protocol.presence import WorkerPresence

#: Longest answer that is read, and longest wait for all of one, in seconds.
ANSWER_BYTES, ANSWER_S = 8 * 1024 * 1024, 120.0
#: Actions of SGLang's weights checker: keep a copy; overwrite with noise; compare with the copy; a checksum.
ACTIONS = ("snapshot", "reset_tensors", "compare", "checksum")

_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server, with any status."""

    status: int
    #: Text of the status line.
    reason: str
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


def fetch(url: str, body: bytes | None = None, *, timeout_s: float = ANSWER_S) -> bytes:
    """Return the body of a successful answer; like ``ask``.

    Raises:
        EngineError: as ``ask``, or the answer is an error or a redirect.
    """
    answer = ask(url, body, timeout_s=timeout_s)
    if not answer.ok:
        said = answer.body[:500].decode(errors="replace") or answer.reason
        raise EngineError(f"{url} returned status {answer.status}: {said}")
    return answer.body


class AnswerTooLarge(EngineError):
    """A server answers with more bytes than are read."""


def ask(url: str, body: bytes | None = None, *, timeout_s: float = ANSWER_S, max_bytes: int = ANSWER_BYTES) -> Answer:
    """Return the answer of the server at ``url``; POST if there is a body to send, as JSON. Blocks.

    Args:
        timeout_s: longest wait for each address of the host to connect, and then for the complete answer.

    Raises:
        AnswerTooLarge: it answers with more than ``max_bytes``.
        EngineError: it does not answer in time, or not with HTTP; or the URL is not HTTP.
    """
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"{url!r:.200} is not the address of an engine.")
    try:
        return _exchange(url, body, timeout_s, max_bytes)
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise EngineError(f"{url} does not answer: {exc or type(exc).__name__}") from exc


def _exchange(url: str, body: bytes | None, timeout_s: float, max_bytes: int) -> Answer:
    parts = urlsplit(url)
    with closing(_CONNECTIONS[parts.scheme](parts.hostname or "", parts.port, timeout=timeout_s)) as connection:
        connection.connect()
        connection.response_class = _until(time.monotonic() + timeout_s)
        target = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request("GET" if body is None else "POST", target, body, headers)
        with connection.getresponse() as response:
            read = response.read(max_bytes + 1)
            if len(read) > max_bytes:
                raise AnswerTooLarge(f"{url} answers with more than {max_bytes:,} bytes.")
            if response.length:
                raise http.client.IncompleteRead(read, response.length)
            return Answer(response.status, response.reason, read)


def _until(deadline: float) -> type[http.client.HTTPResponse]:
    """Return a response class that must be complete by ``deadline``, even if the server sends byte by byte."""

    class Response(http.client.HTTPResponse):
        def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
            super().__init__(sock, *args, **options)
            self.fp.close()
            self.fp = io.BufferedReader(_Timed(sock, deadline))

    return Response


class _Timed(io.RawIOBase):
    """Reads of a socket, limited in total by ``deadline``."""

    def __init__(self, sock: Any, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        #: Keeps the socket open when the connection is closed first.
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("its answer did not end in time")
        self._sock.settimeout(left)
        return int(self._raw.readinto(into))

    def close(self) -> None:
        self._raw.close()
        super().close()


def check_weights(workers: Iterable[WorkerPresence], action: str) -> list[dict[str, Any]]:
    """Run a check of weights on each engine; return its answers, with ``worker`` and ``version``. Blocks for each.

    Args:
        workers: the live ones (``presence.live_workers``).
        action: ``snapshot``, ``reset_tensors``, ``compare`` or ``checksum``. Engines that serve a published version
            are
            not reset: they would sample from noise.

    Raises:
        ConfigError: the action does not exist, or an engine must not be reset.
        EngineError: an engine refuses (one on CPU cannot), its weights are not those of its snapshot, or checksums
            of
            one version differ.
    """
    if action not in ACTIONS:
        raise ConfigError(f"There is no check of weights {action!r}: use {', '.join(ACTIONS)}.")
    found = list(workers)
    serving = [one for one in found if one.version >= 0]
    if action == "reset_tensors" and serving:
        raise ConfigError(
            f"Worker {serving[0].name} serves version {serving[0].version}: after reset_tensors it would draw "
            "from noise. Check before the first publication."
        )
    answers = [check_one(one, url, action) for one in found for url in one.engine_urls]
    if action == "checksum":
        _compare(answers)
    return answers


def check_one(worker: WorkerPresence, url: str, action: str) -> dict[str, Any]:
    """Run a check of weights on one engine; return its answer. Blocks; raises EngineError as ``check_weights``."""
    name = f"The engine of worker {worker.name} at {url}"
    try:
        answer = ask(f"{url}/weights_checker", json.dumps({"action": action}).encode())
        said = json.loads(answer.body)
    except (ValueError, RecursionError) as exc:
        raise EngineError(f"{name} answers with status {answer.status} and something that is not JSON.") from exc
    except EngineError as exc:
        raise EngineError(f"{name} did not {action} its weights: {exc}") from exc
    if not (answer.ok and isinstance(said, dict) and said.get("success", False)):
        why = said.get("message") or said if isinstance(said, dict) else said
        last = (str(why).strip().splitlines() or [""])[-1][:500].rstrip(".")
        raise EngineError(f"{name} did not {action} its weights: {last}.")
    return {"worker": worker.name, "version": worker.version, "url": url, **said}


def _compare(answers: Iterable[Mapping[str, Any]]) -> None:
    seen: dict[Any, tuple[Any, Any]] = {}
    for one in answers:
        checksum = one.get("per_engine_checksum")
        other, wanted = seen.setdefault(one["version"], (one["worker"], checksum))
        if checksum != wanted:
            raise EngineError(
                f"Workers {other} and {one['worker']} serve different weights as version {one['version']}: restart one."
            )
