"""Questions to engines over HTTP, by processes that are not their worker: bounded, and without a proxy."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import ConfigError, EngineError
from penstock.protocol.presence import WorkerPresence

#: Longest answer that is read, and longest wait for one, in seconds.
ANSWER_BYTES, ANSWER_S = 8 * 1024 * 1024, 120.0
#: What SGLang's weights checker does: keep a copy; overwrite with noise; compare with the copy; a checksum.
ACTIONS = ("snapshot", "reset_tensors", "compare", "checksum")

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str, body: bytes | None = None, *, timeout_s: float = ANSWER_S) -> bytes:
    """The body of an answer; POST where there is a body to send, as JSON. Blocks.

    Raises:
        EngineError: it refuses, does not answer, or answers with more than ``ANSWER_BYTES``; no address of HTTP.
    """
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"{url!r:.200} is not the address of an engine.")
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"} if body else {})
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            answer = bytes(response.read(ANSWER_BYTES + 1))
    except urllib.error.HTTPError as exc:
        raise EngineError(f"{url} refused: {exc.read(500).decode(errors='replace')}") from exc
    except (OSError, ValueError) as exc:
        raise EngineError(f"{url} does not answer: {exc}") from exc
    if len(answer) > ANSWER_BYTES:
        raise EngineError(f"{url} answers with more than {ANSWER_BYTES:,} bytes.")
    return answer


def check_weights(workers: Iterable[WorkerPresence], action: str) -> list[dict[str, Any]]:
    """Have each engine check its weights; its answers, with the ``worker`` and its ``version``. Blocks for each.

    Args:
        workers: those that are alive (``presence.live_workers``).
        action: ``snapshot``, ``reset_tensors``, ``compare`` or ``checksum``. Engines that serve a published version are
            not reset: they would draw from noise.

    Raises:
        ConfigError: there is no such action, or nothing may be reset.
        EngineError: an engine refuses (one on CPU cannot), its weights are not those of its snapshot, or checksums of
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
    answers = [_check_one(one, url, action) for one in found for url in one.engine_urls]
    if action == "checksum":
        _compare(answers)
    return answers


def _check_one(worker: WorkerPresence, url: str, action: str) -> dict[str, Any]:
    name = f"The engine of worker {worker.name} at {url}"
    try:
        answer = json.loads(fetch(f"{url}/weights_checker", json.dumps({"action": action}).encode()))
    except (ValueError, RecursionError) as exc:
        raise EngineError(f"{name} answers with something that is not JSON.") from exc
    except EngineError as exc:
        raise EngineError(f"{name} did not {action} its weights: {exc}") from exc
    if not isinstance(answer, dict) or not answer.get("success", False):
        raise EngineError(f"{name} did not {action} its weights: {answer!r:.500}")
    return {"worker": worker.name, "version": worker.version, "url": url, **answer}


def _compare(answers: Iterable[Mapping[str, Any]]) -> None:
    seen: dict[Any, tuple[Any, Any]] = {}
    for one in answers:
        checksum = one.get("per_engine_checksum")
        other, wanted = seen.setdefault(one["version"], (one["worker"], checksum))
        if checksum != wanted:
            raise EngineError(
                f"Workers {other} and {one['worker']} serve different weights as version {one['version']}: restart one."
            )
