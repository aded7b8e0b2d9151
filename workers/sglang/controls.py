"""Control weights, memory and health of an engine over SGLang's HTTP interface.

The same calls control one server (``engine.py``) or several behind a router (``workers/router``). No use of Redis.
"""

import asyncio
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import EngineDied, EngineError, EngineRefused, PublishError
from penstock.records.publication import Publication
from penstock.text import MAX_SAID, safe_repr, utf8_safe
from penstock.weights.safetensors_files import Tensors, has_tied_embeddings, read_folder
from penstock.workers.engine import Engine, NotBegun, Receive
from penstock.workers.sglang.http import EngineHttp, Sessions
from penstock.workers.sglang.routed_experts import Routing
from penstock.workers.sglang.server_info import ServerInfo
from penstock.workers.sglang.stream import MAX_EVENT_BYTES, most_tokens
from penstock.workers.weights.verify import verify_publication

#: A request counts as hanging after this many seconds without tokens, and if its age is this many times the expected
#: duration of a complete answer at the current rate.
SHORTEST_S, TIMES = 10.0, 3.0
#: Age in seconds at which a request counts as hanging before the first measured answer.
UNMEASURED_S = 120.0
#: Weight of the latest answer in the rate.
_NEW_WEIGHT = 0.2


@dataclass(slots=True)
class _Sent:
    """Record a request in flight: times (monotonic) of sending and of the last tokens, and its token limit."""

    sent: float
    last_tokens: float
    most: int | None


class RequestsInFlight:
    """Track requests in flight of one client. Not thread-safe; methods do not block."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._client = secrets.token_hex(4)
        #: rid -> wire names of its requests, in the order of sending.
        self._live: dict[str, dict[str, None]] = {}
        self._sent: dict[str, _Sent] = {}
        #: Tokens per second of a request, averaged over the latest answers; 0 before the first.
        self._tokens_per_s = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._live.values()))

    def wire_rid(self, rid: str) -> str:
        """Return a request name that is unique over all clients of the server.

        SGLang refuses names in use, and aborts requests with the name of a stream two seconds after the stream ended,
        but a restarted worker requests the same samples again. Aborts match by prefix: the terminator prevents j/1
        from aborting j/10.
        """
        return f"{rid}:{self._client}.{next(self._serial)};"

    @contextmanager
    def sent(self, rid: str, wire_rid: str, *, most: int | None = None) -> Iterator[None]:
        """Track a request of at most ``most`` tokens (None: unlimited) inside the ``with``."""
        live = self._live.setdefault(rid, {})
        live[wire_rid] = None
        now = time.monotonic()
        self._sent[wire_rid] = _Sent(now, now, most)
        try:
            yield
        finally:
            live.pop(wire_rid, None)
            self._sent.pop(wire_rid, None)
            if not live:
                self._live.pop(rid, None)

    def on_tokens(self, wire_rid: str) -> None:
        """Record the arrival of tokens of a request."""
        if (one := self._sent.get(wire_rid)) is not None:
            one.last_tokens = time.monotonic()

    def answered(self, wire_rid: str, tokens: int) -> None:
        """Record an answer with this many tokens and update the rate."""
        one = self._sent.get(wire_rid)
        if one is None or not tokens:
            return
        rate = tokens / max(time.monotonic() - one.sent, 1e-3)
        # Average times instead of rates: one fast answer must not make a slow one look hung.
        mean = _NEW_WEIGHT / rate + (1 - _NEW_WEIGHT) / (self._tokens_per_s or rate)
        self._tokens_per_s = 1 / mean

    def limit_s(self, most: int | None) -> float:
        """Return the age in seconds at which a request of ``most`` tokens counts as hanging."""
        if not self._tokens_per_s or most is None:
            return UNMEASURED_S
        return max(SHORTEST_S, TIMES * most / self._tokens_per_s)

    def named(self, rid: str) -> list[str]:
        """Return the wire names of the requests for ``rid``."""
        return list(self._live.get(rid, ()))

    def silent(self) -> list[tuple[str, float]]:
        """Return (rid, seconds without tokens) of hanging requests, longest first: silent for ``SHORTEST_S``, and older
        than their ``limit_s``."""
        now = time.monotonic()
        hanging = []
        for wire_rid, one in self._sent.items():
            if now - one.sent >= self.limit_s(one.most) and now - one.last_tokens >= SHORTEST_S:
                hanging.append((wire_rid.rpartition(":")[0], now - one.last_tokens))
        return sorted(hanging, key=lambda one: -one[1])


#: Most remembered ranges of versions with the same weights.
MAX_SAME = 64


class SglangControls(Engine):
    """Control an engine of one or several servers.

    Args:
        log_dir: folder of ``engine-NAME.log``, the log of a spawned server.
    """

    info: ServerInfo

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path) -> None:
        super().__init__(config, model, name=name)
        self.log_dir = log_dir
        self.info = ServerInfo()
        #: Shape of the model's routing if answers must include it, else None.
        self.routing: Routing | None = None
        #: True while weights are loaded: the scheduler does not respond, so health checks are suspended.
        self.loading = False
        self.http = EngineHttp(name, config, most_bytes=self._most_bytes, ended=self._how_it_ended)
        self.http.url = (config.url or "").rstrip("/")
        self._unwatched = 0
        self._namespace = ""
        #: Version being loaded or loaded last, which may already have generated tokens.
        self.newest = -1
        #: Ranges (first, last) of versions with the same weights, oldest first.
        self._same: deque[tuple[int, int]] = deque(maxlen=MAX_SAME)
        self.in_flight = RequestsInFlight()
        self._reference: Tensors | None = None

    @property
    def url(self) -> str:
        return self.http.url

    async def stop(self) -> None:
        sessions = self._detach()
        if sessions is not None:
            await sessions.close()

    def _detach(self) -> Sessions | None:
        """Mark the engine as down; return its sessions for the caller to close."""
        self.paused = False
        self.offloaded = set()
        self._set_version(-1)
        return self.http.detach()

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None, **options: Any
    ) -> Any:
        """Send a request; see :meth:`EngineHttp.call`."""
        return await self.http.call(method, path, body, timeout_s, **options)

    def _how_it_ended(self) -> str:
        """Return how the process exited, as the end of a sentence."""
        return ""

    def _set_version(self, version: int, rev: int = 0) -> None:
        self.version, self.rev, self.newest = version, rev, version
        self.is_receiving = False
        # Only requests of the same load may share prefix KV: an in-place load leaves KV of two versions behind, and
        # equal version numbers of another run on the same server mean other weights.
        self._namespace = f"{version}.{secrets.token_hex(4)}"

    async def verify(self, publication: Publication, *, files: bool = True) -> None:
        folder = Path(self.model.path)
        if self._reference is None:
            self._reference = await asyncio.to_thread(read_folder, folder)
        await asyncio.to_thread(
            verify_publication, publication, self._reference, tied=has_tied_embeddings(folder), files=files
        )

    async def load(self, publication: Publication, receive: Receive | None = None) -> float:
        """Implement ``Engine.load``.

        Never lets the server flush its cache, which ends its scheduler if a request is running or its answer is just
        being sent.
        """
        started = time.perf_counter()
        self.newest = publication.version
        self.loading = True
        try:
            if receive is None:
                answer = await self._load_folder(publication)
            else:
                await receive()
                answer = {"success": True}
        except NotBegun:
            self.newest = self.version
            raise
        except EngineDied:
            raise
        except EngineError as exc:
            raise EngineDied(f"the engine failed to load version {publication.version}: {exc}") from exc
        finally:
            self.loading = False
        if not answer.get("success"):
            message = utf8_safe(str(answer.get("message", answer)), MAX_SAID)
            # A rollback would read the folder that just failed.
            if "rolling back" in message.lower():
                raise EngineDied(f"the engine's weights are mixed after a failed load; restart it: {message}")
            self.newest = self.version
            raise PublishError(f"the engine refused version {publication.version} and keeps {self.version}: {message}")
        self._set_version(publication.version, publication.rev)
        self.abandoned = publication.abandoned
        return time.perf_counter() - started

    async def _load_folder(self, publication: Publication) -> dict[str, Any]:
        body = {
            "model_path": _absolute(publication.path),
            "weight_version": str(publication.version),
            "flush_cache": False,
        }
        return await self.post("/update_weights_from_disk", body, timeout_s=self.config.load_timeout_s)

    async def adopt(self, publication: Publication) -> None:
        await self._check_weight_version()
        self._record_same(publication.version)
        await self._rename_weights(publication.version)
        self.version, self.rev, self.abandoned = publication.version, publication.rev, publication.abandoned

    def _record_same(self, version: int) -> None:
        """Record that ``version``, which the server will report next, has the loaded weights."""
        self.newest = version
        joins = bool(self._same) and self._same[-1][1] == self.version
        earliest = self._same.pop()[0] if joins else self.version
        self._same.append((earliest, version))

    async def _check_weight_version(self) -> None:
        """Raise EngineDied if the server reports unexpected weights, EngineError if it reports none."""
        info = await self.call("GET", "/model_info", timeout_s=self.config.health_timeout_s)
        reported = info.get("weight_version") if isinstance(info, dict) else None
        if reported is None:
            raise EngineError(f"engine {self.name} does not report the version of its weights.")
        if reported != str(self.version):
            raise EngineDied(
                f"engine {self.name} has weights {safe_repr(reported)}, but {self.version} was loaded: another process "
                "restarted it or loaded weights; load the current publication."
            )

    async def _rename_weights(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.call("POST", "/update_weight_version", body, self.config.health_timeout_s)

    async def pause(self) -> None:
        self.paused = True
        await self.call("POST", "/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self.call("POST", "/continue_generation", {})
        self.paused = False

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Implement ``Engine.release_memory``. The server must be idle, or it exits."""
        self.offloaded |= set(tags)
        await self.call("POST", "/release_memory_occupation", {"tags": list(tags)}, self.config.load_timeout_s)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        await self.call("POST", "/resume_memory_occupation", {"tags": list(tags)}, self.config.load_timeout_s)
        self.offloaded -= set(tags)

    async def flush_cache(self) -> bool:
        try:
            await self.call("POST", "/flush_cache", {}, is_json=False)
        except EngineRefused:
            return False
        return True

    async def checksum(self) -> str:
        """Return a checksum of the weights, to compare engines. Blocks the scheduler briefly.

        Raises:
            EngineError: the server does not support checksums (on CPU, for example).
        """
        answer = await self.post("/weights_checker", {"action": "checksum"}, timeout_s=self.config.load_timeout_s)
        if not answer.get("success"):
            raise EngineError(f"engine {self.name} does not support weight checksums: {answer.get('message')}")
        return str(answer.get("per_engine_checksum", ""))

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        answer = await self.call("POST", path, body, timeout_s, ok=(200, 400))
        return answer if isinstance(answer, dict) else {}

    async def abort_all(self) -> None:
        await self.call("POST", "/abort_request", {"abort_all": True})

    async def healthy(self) -> bool:
        """Return whether the scheduler responds within ``health_timeout_s``, even while frozen."""
        try:
            await self.call("GET", "/server_info", timeout_s=self.config.health_timeout_s)
        except EngineError:
            return False
        return True

    @property
    def is_busy(self) -> bool:
        """Whether the engine may be unresponsive for a known reason, so that health checks do not count."""
        return self.loading or self._unwatched > 0 or bool(self.offloaded)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        self._unwatched += 1
        try:
            yield
        finally:
            self._unwatched -= 1

    def _most_bytes(self, body: dict[str, Any] | None) -> int:
        """Return the largest accepted answer or event of a request, in bytes."""
        if self.routing is None or body is None or "input_ids" not in body:
            return MAX_EVENT_BYTES
        return MAX_EVENT_BYTES + self.routing.wire_bytes(len(body["input_ids"]) + (most_tokens(body) or 0))


def _absolute(path: str) -> str:
    # The server may have another working directory.
    return os.path.abspath(path)
