"""Use several SGLang servers as one engine: tokens through sglang-router, controls to each server.

                      ┌─ /generate ──> router ──> servers that serve
    worker ── engine ─┤
                      └─ abort, pause, continue, update, ... ──> each of them

A server serves only with the current weights (I9): it is added to the router after loading them, and removed at once
if it dies, hangs, or reports other weights. Servers may join and leave at any time while the others continue.

| event                                | effect on samples                                                   |
|--------------------------------------|---------------------------------------------------------------------|
| a server dies during a request       | MemberDied: charged as a crash; retried elsewhere once the lost      |
|                                      | server is known                                                      |
| the router dies                      | an abort: samples resume from their tokens after the restart         |
| no server is available               | the same; the engine counts as lost until one is                     |
| one server refuses an update         | it is removed; its requests are aborted and resume elsewhere         |
| a server is removed                  | its requests may finish for a minute, then they are aborted          |
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.errors import EngineDied, EngineError, EngineRefused, MemberDied, PublishError
from penstock.protocol.presence import EngineState
from penstock.records.publication import Publication
from penstock.workers.engine import OnTokens, Receive
from penstock.workers.router.process import dropped_fields
from penstock.workers.router.supervised_engines import SupervisedEngines
from penstock.workers.sglang.client import PARSE_CALLS, SEPARATE_REASONING
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.http import ConnectionClosed
from penstock.workers.sglang.stream import ANSWER_LOST

log = logging.getLogger(__name__)

#: Router errors: no engine was reached; the engine was lost during the request.
_UNREACHED = ("no_available_", "prefill_unavailable")
_LOST = ("call_upstream", '"prefill_', '"decode_')
#: Seconds that a start waits for the first engine before it fails and is retried.
_FIRST_S = 30.0
_POLL_S = 0.2


class RoutedEngine(SupervisedEngines):
    """Combine the servers of ``engine.router`` into one engine (workers/engine.py), and run the router."""

    async def start(self, publication: Publication | None = None) -> None:
        """Start the router and wait until servers with the weights of ``publication`` serve.

        Raises:
            ConfigError: the router cannot be started.
            PublishError: the publication cannot be loaded; nothing was started.
            EngineDied, EngineError: no server joined within ``engine.start_timeout_s``; the router is stopped.
        """
        if publication is not None:
            await self.verify(publication)
        self._publication = publication
        self._set_version(*((publication.version, publication.rev) if publication else (-1, 0)))
        self.abandoned = publication.abandoned if publication else []
        self.http.open()
        try:
            await self._router.start()
            self.http.url = self._router.url
            self._seen_starts = self._router.starts
            self._supervisor = asyncio.create_task(self._supervise(), name="tend engines")
            await self._first_engines()
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def _first_engines(self) -> None:
        deadline = time.monotonic() + min(_FIRST_S, self.config.start_timeout_s)
        routable = asyncio.create_task(self.routable.wait())
        try:
            while not routable.done():
                assert self._supervisor is not None
                await asyncio.wait({routable, self._supervisor}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                if self._supervisor.done():
                    self._supervisor.result()
                # Loading weights has its own time limit.
                loading = any(one.is_loading for one in self._members.values())
                if not self._quorum and not loading and time.monotonic() > deadline:
                    self.is_away = True
                    raise EngineError(f"no engine serves behind the router: {self.missing}")
        finally:
            routable.cancel()
        self.is_away = False

    async def stop(self) -> None:
        """Stop the router but leave the servers running; running requests return as aborted or raise EngineDied."""
        tender, self._supervisor = self._supervisor, None
        tasks = [one.task for one in self._members.values() if one.task is not None]
        if tender is not None:
            tasks.append(tender)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.routable.clear()
        self._members = {url: one for url, one in self._members.items() if one.state is not EngineState.LEAVING}
        self._create_members()
        for member in self._members.values():
            member.state, member.task, member.failures, member.retry_at = EngineState.JOINING, None, 0, 0.0
            await member.engine.stop()
        await self._router.stop()
        await super().stop()

    async def watch(self) -> str:
        """Wait until no server can answer; return the reason."""
        bare_since = 0.0
        while True:
            assert self._supervisor is not None
            await asyncio.wait({self._supervisor}, timeout=_POLL_S)
            if self._supervisor.done():
                self._supervisor.result()
            if self._quorum:
                bare_since = 0.0
                continue
            bare_since = bare_since or time.monotonic()
            # Let running requests finish first (on decode servers, for instance).
            if not self.num_running or time.monotonic() - bare_since > self.config.health_timeout_s:
                self.is_away = True
                return f"no engine behind the router can answer: {self.missing}"

    async def load(self, publication: Publication, receive: Receive | None = None) -> float:
        """Load weights from disk into every serving server (see :meth:`SglangClient.load`); remove servers that fail.

        Args:
            receive: always None, because transfers go to a single engine.

        Raises:
            PublishError: all servers refused and keep the old weights.
            EngineDied: no server loaded the new weights.
        """
        async with self._change:
            members = self._serving()
            self.newest = publication.version
            self.loading = True
            try:
                results = await asyncio.gather(
                    *(one.engine.load(publication) for one in members), return_exceptions=True
                )
            finally:
                self.loading = False
            failed = [(one, r) for one, r in zip(members, results, strict=True) if isinstance(r, BaseException)]
            for _, failure in failed:
                if not isinstance(failure, EngineError | PublishError):
                    raise failure
            refusals = [failure for _, failure in failed if isinstance(failure, PublishError)]
            if members and len(refusals) == len(members):
                self.newest = self.version
                raise refusals[0]
            if len(failed) == len(members):
                raise EngineDied(f"no engine loaded version {publication.version}: {[str(f) for _, f in failed]}")
            self._publication = publication
            self._set_version(publication.version, publication.rev)
            self.abandoned = publication.abandoned
            for member, failure in failed:
                await self._lose(member, f"failed to load version {publication.version}: {failure}")
            return max(result for result in results if isinstance(result, float))

    async def adopt(self, publication: Publication) -> None:
        """Adopt a version on every serving server like :meth:`SglangControls.adopt`; remove servers that fail before
        any request is sent under the new version.

        Raises:
            EngineDied: no server has these weights.
        """
        async with self._change:
            members = self._serving()
            self._record_same(publication.version)
            results = await asyncio.gather(*(one.engine.adopt(publication) for one in members), return_exceptions=True)
            failed = [(one, r) for one, r in zip(members, results, strict=True) if isinstance(r, BaseException)]
            for _, failure in failed:
                if not isinstance(failure, EngineError):
                    raise failure
            if len(failed) == len(members):
                raise EngineDied(f"no engine adopted version {publication.version}: {[str(f) for _, f in failed]}")
            self._publication = publication
            for member, failure in failed:
                await self._lose(member, f"failed to adopt version {publication.version}: {failure}")
            self.version, self.rev, self.abandoned = publication.version, publication.rev, publication.abandoned

    # -- requests

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None, **options: Any
    ) -> Any:
        """Send generate requests through the router, parse requests to any server, other requests to all servers."""
        if path == "/generate":
            calling = super().call
            return await self._guarded(body or {}, lambda: calling(method, path, body, timeout_s, **options))

        def send(one: SglangEngine) -> Awaitable[Any]:
            return one.call(method, path, body, timeout_s, **options)

        return await (self._call_any if path in (PARSE_CALLS, SEPARATE_REASONING) else self._call_each)(path, send)

    async def _call_any(self, path: str, call_member: Callable[[SglangEngine], Awaitable[Any]]) -> Any:
        """Call one serving server, or the next if it dies; wait until one serves. Raises like ``_call_each``."""
        while True:
            for member in self._serving():
                try:
                    return await call_member(member.engine)
                except EngineDied as exc:
                    await self._lose(member, f"was lost during {path}: {exc}")
            await self._until_routable()
            if not self.routable.is_set():
                raise EngineDied(f"engine {self.name} was stopped during {path}.")

    async def _call_each(self, path: str, call_member: Callable[[SglangEngine], Awaitable[Any]]) -> Any:
        """Call every server and return the first answer; remove servers that fail.

        Raises:
            EngineRefused: a server refused the call; it is not removed.
            EngineError: all servers failed.
        """
        members = self._controlled()
        if not members:
            raise EngineDied(f"no engine is available behind the router for {path}: {self.missing}")
        results = await asyncio.gather(*(call_member(one.engine) for one in members), return_exceptions=True)
        if refusal := next((result for result in results if isinstance(result, EngineRefused)), None):
            raise refusal
        answers = [result for result in results if not isinstance(result, BaseException)]
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineError):
                if not answers:
                    raise result
                await self._lose(member, f"failed {path}: {result}")
            elif isinstance(result, BaseException):
                raise result
        return answers[0]

    async def _stream(
        self, body: dict[str, Any], sent: int, rid: str, on_tokens: OnTokens, keep: bool
    ) -> dict[str, Any]:
        # The router drops stream_interval, so every token arrives separately.
        sampling = {name: value for name, value in body["sampling_params"].items() if name != "stream_interval"}
        passed = body | {"sampling_params": sampling}
        streaming = super()._stream
        answer: dict[str, Any] = await self._guarded(passed, lambda: streaming(passed, sent, rid, on_tokens, keep))
        return answer

    async def _guarded(self, body: dict[str, Any], call_member: Callable[[], Awaitable[Any]]) -> Any:
        """Send a request through the router and map its errors according to the table above."""
        if dropped := dropped_fields(body):
            raise EngineRefused(
                f"sglang-router would silently drop {', '.join(dropped)}: remove it, or use an engine without a router."
            )
        if not self.routable.is_set():
            return await self._aborted("no engine could be reached")
        starts = self._router.starts
        try:
            return await call_member()
        except ConnectionClosed:
            raise
        except EngineDied as exc:
            if not self.http.is_open or _is_other_weights(exc):
                raise
            self._suspect()
            if self._router.starts == starts and await self._router.healthy():
                raise MemberDied(f"an engine was lost during the request: {exc}") from exc
            self.routable.clear()
            return await self._aborted(f"the router was lost ({exc})") | {ANSWER_LOST: True}
        except EngineRefused:
            raise
        except EngineError as exc:
            text = str(exc)
            if any(code in text for code in _UNREACHED):
                self.routable.clear()
                self._wake.set()
                return await self._aborted("no engine could be reached")
            if any(code in text for code in _LOST):
                await self._remove_dead(text)
                raise MemberDied(f"an engine was lost during the request: {text}") from exc
            raise

    async def _remove_dead(self, text: str) -> None:
        """Remove the server named in an error; other requests wait until the router has removed it."""
        named = [member for member in self._serving() if member.config.url in text]
        for member in named:
            await self._lose(member, "was lost during a request")
        if named:
            self._wake.set()
        else:
            self._suspect()

    async def _aborted(self, message: str) -> Any:
        """Wait until an engine serves, then return an aborted answer, after which the sample resumes."""
        await self._until_routable()
        return {
            "output_ids": [],
            "meta_info": {"finish_reason": {"type": "abort", "message": message}, "output_token_logprobs": []},
        }

    async def _until_routable(self) -> None:
        """Wait until a server serves, or the engine is stopped."""
        if self._supervisor is not None:
            routable = asyncio.create_task(self.routable.wait())
            try:
                await asyncio.wait({routable, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                routable.cancel()


def _is_other_weights(exc: EngineDied) -> bool:
    # The answer reported it, so the server is unknown.
    return "answered with weights" in str(exc)
