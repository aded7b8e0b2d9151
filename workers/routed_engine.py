"""Several SGLang servers that stand for one engine: tokens through sglang-router, controls to each server.

                      ┌─ /generate ──> router ──> servers that serve
    worker ── engine ─┤
                      └─ abort, pause, continue, update, ... ──> each of them

A server serves from the moment in which it has the current weights (I9), and no longer than it has them: the router is
told of it after that, and it is taken out at once when it dies, hangs, or shows other weights. Servers come and go at
any time; the others go on.

| what happens                         | what the samples see                                                |
|--------------------------------------|---------------------------------------------------------------------|
| a server dies under a request        | ReplicaDied: charged as a crash, tried again elsewhere               |
| the router dies                      | an abort: they go on from their tokens when it is back               |
| no server is there                   | the same; the engine counts as lost until one is there               |
| a server refuses an update, others   | it is taken out, its requests are aborted and go on elsewhere        |
| a server is taken out                | it ends what it has, for a minute; the rest is aborted               |
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError, EngineDied, EngineError, EngineRefused, PublishError, ReplicaDied
from penstock.fleet_config import MemberConfig, RouterConfig
from penstock.messages import Publication
from workers.engine import Engine
from workers.router import Router, dropped_fields
from workers.stream import Heard

log = logging.getLogger(__name__)

#: Codes of the router: the request reached no engine; the engine was lost under it.
_UNREACHED = ("no_available_", "prefill_unavailable")
_LOST = ("call_upstream", '"prefill_', '"decode_')
#: How long a start waits for a first engine; then it is told, and tried again.
_FIRST_S = 30.0
#: Wait before a server that could not be taken in is tried again.
_RETRY_S = 1.0
#: Longest wait for the running requests of a server that leaves.
_DRAIN_S = 60.0
_LOOK_S = 0.05


@dataclass(slots=True)
class Replica:
    """One server behind the router."""

    member: MemberConfig
    engine: Engine
    #: joining: has no weights yet, or not ours; serving; leaving: ends what it has.
    state: Literal["joining", "serving", "leaving"] = "joining"
    failures: int = 0
    #: Why it does not serve.
    why: str = ""
    retry_at: float = 0.0
    #: True while it is being given its weights.
    is_loading: bool = False
    task: "asyncio.Task[None] | None" = None


class RoutedEngine(Engine):
    """The servers of ``engine.router`` as one engine. See :class:`Engine`; ``start`` starts the router too."""

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path) -> None:
        if config.router is None:
            raise ConfigError("engine.router is missing.")
        super().__init__(config, model, name=name, log_dir=log_dir)
        self.router_config: RouterConfig = config.router
        self._log_dir = log_dir
        self._router = Router(config.router, config.python, name=name, log_dir=log_dir)
        self._replicas = {member.url: self._replica(member) for member in config.router.engines}
        self._publication: Publication | None = None
        #: Held while the weights of serving servers change, and while one begins to serve.
        self._change = asyncio.Lock()
        #: Set while requests can be sent.
        self._routable = asyncio.Event()
        self._wake = asyncio.Event()
        self._tender: asyncio.Task[None] | None = None
        self._seen_starts = 0
        #: Lost servers that the router may still send to.
        self._evicting: set[str] = set()

    def _replica(self, member: MemberConfig) -> Replica:
        config = self.config.model_copy(update={"router": None, "url": member.url})
        return Replica(member, Engine(config, self.model, name=f"{self.name}@{member.url}", log_dir=self._log_dir))

    # -- who is there

    @property
    def router_pid(self) -> int:
        """Pid of the router; 0 while it has none."""
        return self._router.pid

    def describe(self) -> list[dict[str, Any]]:
        """Every server with its state, for presence."""
        return [
            {
                "url": url,
                "type": one.member.worker_type,
                "state": one.state,
                "version": one.engine.version,
                "why": one.why,
            }
            for url, one in self._replicas.items()
        ]

    def set_members(self, members: Sequence[MemberConfig]) -> None:
        """Say which servers there are: new ones join, missing ones leave. Returns at once."""
        wanted = {member.url: member for member in members}
        for url, member in wanted.items():
            known = self._replicas.get(url)
            if known is None:
                log.info("engine %s joins", url)
                self._replicas[url] = self._replica(member)
        for url, replica in self._replicas.items():
            if url not in wanted and replica.state != "leaving":
                log.info("engine %s leaves", url)
                self._cancel(replica)
                was_serving, replica.state = replica.state == "serving", "leaving"
                replica.task = asyncio.create_task(self._leave(replica, was_serving), name=f"leave {url}")
        self._wake.set()

    def _serving(self) -> list[Replica]:
        return [one for one in self._replicas.values() if one.state == "serving"]

    def _controlled(self) -> list[Replica]:
        return [one for one in self._replicas.values() if one.state != "joining"]

    @property
    def _quorum(self) -> bool:
        """Whether a request can be answered: a regular server, or prefill and decode."""
        kinds = {one.member.worker_type for one in self._serving()}
        return "regular" in kinds or {"prefill", "decode"} <= kinds

    @property
    def missing(self) -> str:
        """Who is not there and why, as words; empty when all serve."""
        return "; ".join(
            f"{url}: {one.why or one.state}" for url, one in self._replicas.items() if one.state == "joining"
        )

    # -- life

    async def start(self, publication: Publication | None = None) -> None:
        """Start the router and wait until servers with the weights of ``publication`` stand behind it.

        Raises:
            ConfigError: the router cannot be started.
            PublishError: the publication cannot be loaded; nothing was started.
            EngineDied, EngineError: no server is there within ``engine.start_timeout_s``; the router is stopped.
        """
        if publication is not None:
            await self.verify(publication)
        self._publication = publication
        self._set_version(*((publication.version, publication.rev) if publication else (-1, 0)))
        self.abandoned = publication.abandoned if publication else []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.config.request_timeout_s, sock_connect=10),
        )
        try:
            await self._router.start()
            self.url = self._router.url
            self._seen_starts = self._router.starts
            self._tender = asyncio.create_task(self._tend(), name="tend engines")
            await self._first_engines()
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def _first_engines(self) -> None:
        deadline = time.monotonic() + min(_FIRST_S, self.config.start_timeout_s)
        routable = asyncio.create_task(self._routable.wait())
        try:
            while not routable.done():
                assert self._tender is not None
                await asyncio.wait({routable, self._tender}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                if self._tender.done():
                    self._tender.result()
                # One that loads has a limit of its own.
                loading = any(one.is_loading for one in self._replicas.values())
                if not self._quorum and not loading and time.monotonic() > deadline:
                    self.is_away = True
                    raise EngineError(f"no engine serves behind the router: {self.missing}")
        finally:
            routable.cancel()
        self.is_away = False

    async def stop(self) -> None:
        """Leave the servers alone and end the router; requests still running return as aborted or raise EngineDied."""
        tender, self._tender = self._tender, None
        tasks = [one.task for one in self._replicas.values() if one.task is not None]
        if tender is not None:
            tasks.append(tender)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._routable.clear()
        self._replicas = {url: one for url, one in self._replicas.items() if one.state != "leaving"}
        for replica in self._replicas.values():
            replica.state, replica.task, replica.failures, replica.retry_at = "joining", None, 0, 0.0
            await replica.engine.stop()
        await self._router.stop()
        await super().stop()

    async def watch(self) -> str:
        """Wait until no server can answer any more; returns why."""
        bare_since = 0.0
        while True:
            assert self._tender is not None
            await asyncio.wait({self._tender}, timeout=_LOOK_S * 4)
            if self._tender.done():
                self._tender.result()
            if self._quorum:
                bare_since = 0.0
                continue
            bare_since = bare_since or time.monotonic()
            # What still runs elsewhere (on decode servers, say) may end first.
            if not self.num_running or time.monotonic() - bare_since > self.config.health_timeout_s:
                self.is_away = True
                return f"no engine behind the router can answer: {self.missing}"

    # -- tending

    async def _tend(self) -> None:
        """Keep router and servers as they should be, until cancelled."""
        while True:
            self._wake.clear()
            await self._tend_router()
            await asyncio.gather(*(self._check(one) for one in self._serving()))
            for replica in list(self._replicas.values()):
                idle = replica.task is None or replica.task.done()
                if replica.state == "joining" and idle and not self.offloaded and time.monotonic() >= replica.retry_at:
                    replica.task = asyncio.create_task(self._join(replica), name=f"join {replica.member.url}")
            with contextlib.suppress(EngineError):
                await self._reconcile()
            self._note_quorum()
            wait_s = min(self.config.health_interval_s, _RETRY_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait_s)

    def _note_quorum(self) -> None:
        if self._quorum and self._router.alive and not self._evicting and self._router.starts == self._seen_starts:
            self._routable.set()
        else:
            self._routable.clear()

    async def _tend_router(self) -> None:
        if await self._router.healthy() and self._router.starts == self._seen_starts:
            return
        self._routable.clear()
        while not await self._router.healthy():
            log.error("the router is lost and is started again")
            try:
                await self._router.restart(self._router.starts)
            except EngineError as exc:
                log.error("the router did not start, trying again: %s", exc)
        # It knows no engine now; requests wait until it does.
        await self._reconcile()
        self._seen_starts = self._router.starts

    async def _reconcile(self) -> None:
        """The router knows exactly the servers that serve: it takes one back by itself when it answers again."""
        known = await self._router.engines()
        wanted = {one.member.url: one for one in self._serving()}
        for url in known.keys() - wanted.keys():
            replica = self._replicas.get(url)
            # One that is just being taken in is listed a moment before it counts.
            if replica is None or replica.task is None or replica.task.done():
                await self._router.remove(url)
        for url in wanted.keys() - known.keys():
            await self._router.add(wanted[url].member)

    async def _check(self, replica: Replica) -> None:
        """One health check; not while weights load: nobody answers then, and that has a limit of its own."""
        if self._change.locked() or self.is_busy:
            return
        version = self.version
        try:
            # The first asks the scheduler; the second has the version of what was loaded last.
            await replica.engine._call("GET", "/server_info", timeout_s=self.config.health_timeout_s)
            info = await replica.engine._call("GET", "/model_info", timeout_s=self.config.health_timeout_s)
        except EngineDied as exc:
            await self._lose(replica, str(exc))
            return
        except EngineError as exc:
            replica.failures += 1
            if replica.failures >= self.config.health_failures and not (self._change.locked() or self.is_busy):
                await self._lose(replica, f"failed {replica.failures} health checks in a row: {exc}")
            return
        replica.failures = 0
        shown = info.get("weight_version")
        if self.version == version >= 0 and not self._change.locked() and shown not in (None, str(version)):
            await self._lose(replica, f"has weights {shown!r} where {version} was loaded: it was restarted")

    async def _join(self, replica: Replica) -> None:
        """Weights first (I9), then the router."""
        url = replica.member.url
        try:
            await replica.engine.stop()
            if not await self._is_up(url):
                raise EngineError("does not answer")
            replica.is_loading = True
            await replica.engine.start(self._publication)
            async with self._change:
                if (replica.engine.version, replica.engine.rev) != (self.version, self.rev):
                    assert self._publication is not None
                    await replica.engine._load_first(self._publication)
                self._refuse_unlike(replica)
                await self._router.add(replica.member)
                replica.state, replica.why, replica.failures = "serving", "", 0
                self._merge()
        except (EngineError, ConfigError, PublishError) as exc:
            if replica.why != str(exc):
                log.warning("engine %s does not serve: %s", url, exc)
            replica.why = str(exc)
            replica.retry_at = time.monotonic() + _RETRY_S
            return
        finally:
            replica.is_loading = False
        log.info("engine %s serves version %d", url, self.version)
        self._note_quorum()

    async def _is_up(self, url: str) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _refuse_unlike(self, replica: Replica) -> None:
        """Nobody tells which server answers a stream, so all must send it alike."""
        if self._serving() and replica.engine._incremental != self._incremental:
            raise ConfigError(
                "it streams otherwise than those that serve: give all engines incremental-streaming-output, or none"
            )

    def _merge(self) -> None:
        """What holds for all servers together: the least that one of them can, the most that one of them needs."""
        engines = [one.engine for one in self._serving()]
        self.server_version = min(engine.server_version for engine in engines)
        self.capabilities = min(
            (engine.capabilities for engine in engines if engine.capabilities), key=lambda one: one.since, default=None
        )
        self.reports_spans = all(engine.reports_spans for engine in engines)
        self._incremental = engines[0]._incremental
        self.deterministic = any(engine.deterministic for engine in engines)
        self.max_context = min(engine.max_context for engine in engines)
        self.saves_memory = all(engine.saves_memory for engine in engines)
        self._radix = any(engine._radix for engine in engines)
        self._window = max(engine._window for engine in engines)

    async def _lose(self, replica: Replica, why: str) -> None:
        """Take a server out at once; its requests return as aborted, where it can still be told."""
        if replica.state != "serving":
            return
        log.error("engine %s is lost: %s", replica.member.url, why)
        replica.state, replica.why, replica.retry_at = "joining", why, time.monotonic() + _RETRY_S
        url = replica.member.url
        self._evicting.add(url)
        self._note_quorum()
        replica.task = asyncio.create_task(self._evict(replica), name=f"evict {url}")
        replica.task.add_done_callback(lambda _: self._evicted(url))

    def _evicted(self, url: str) -> None:
        self._evicting.discard(url)
        self._note_quorum()

    async def _evict(self, replica: Replica) -> None:
        url, starts = replica.member.url, self._router.starts
        try:
            await self._router.remove(url)
        except EngineError as exc:
            log.warning("the router is not told of the loss of %s: %s", url, exc)
        self._evicted(url)
        try:
            await replica.engine._call("POST", "/continue_generation", {})
            await replica.engine.abort_all()
        except EngineDied:
            pass  # its requests ended with it
        except EngineError as exc:
            # It hangs, and with it requests that nobody can name: the router is their only end.
            log.warning("engine %s cannot be told to abort (%s): the router is started again", url, exc)
            with contextlib.suppress(EngineError):
                await self._router.restart(starts)
        await replica.engine.stop()

    def _cancel(self, replica: Replica) -> None:
        if replica.task is not None and not replica.task.done():
            replica.task.cancel()

    async def _leave(self, replica: Replica, was_serving: bool) -> None:
        """Drain a server: no new requests, running ones end or are aborted, then it is forgotten."""
        url = replica.member.url
        self._note_quorum()
        try:
            if was_serving:
                await self._router.remove(url)
                # Loads are told late, so it is asked more than once; what is left then returns what it has.
                deadline, idle = time.monotonic() + _DRAIN_S, 0
                while idle < 3:
                    idle = 0 if await self._running_at(replica) else idle + 1
                    if time.monotonic() > deadline or idle:
                        await replica.engine.abort_all()
                    await asyncio.sleep(_LOOK_S)
        except EngineError as exc:
            log.warning("engine %s left without an answer: %s", url, exc)
        await replica.engine.stop()
        self._replicas.pop(url, None)
        log.info("engine %s has left", url)

    async def _running_at(self, replica: Replica) -> int:
        answer = await replica.engine._call("GET", "/v1/loads?include=core")
        try:
            return sum(int(one["num_running_reqs"]) + int(one["num_waiting_reqs"]) for one in answer["loads"])
        except (KeyError, TypeError, ValueError) as exc:
            raise EngineError(f"its loads cannot be read ({exc!r})") from exc

    # -- weights

    async def load(self, publication: Publication, receive: Callable[[], Awaitable[bool]] | None = None) -> float:
        """Load weights from disk into every serving server; see :meth:`Engine.load`. One that fails is taken out.

        Args:
            receive: brings weights to one engine, which these are not: never used.

        Raises:
            PublishError: all refused; they go on with the old weights.
            EngineDied: no server is left that has them.
        """
        if receive is not None:
            await self.verify(publication)
        async with self._change:
            replicas = self._serving()
            self._newest = publication.version
            self.loading = True
            try:
                results = await asyncio.gather(
                    *(one.engine.load(publication) for one in replicas), return_exceptions=True
                )
            finally:
                self.loading = False
            failed = [(one, r) for one, r in zip(replicas, results, strict=True) if isinstance(r, BaseException)]
            for _, failure in failed:
                if not isinstance(failure, EngineError | PublishError):
                    raise failure
            refusals = [failure for _, failure in failed if isinstance(failure, PublishError)]
            if replicas and len(refusals) == len(replicas):
                self._newest = self.version
                raise refusals[0]
            if len(failed) == len(replicas):
                raise EngineDied(f"no engine has loaded version {publication.version}: {[str(f) for _, f in failed]}")
            self._publication = publication
            self._set_version(publication.version, publication.rev)
            self.abandoned = publication.abandoned
            for replica, failure in failed:
                await self._lose(replica, f"did not load version {publication.version}: {failure}")
            return max(result for result in results if isinstance(result, float))

    # -- requests

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        *,
        ok: Iterable[int] = (200,),
        is_json: bool = True,
    ) -> Any:
        """Tokens through the router, everything else to each server."""
        if path == "/generate":
            return await self._generate(body or {}, timeout_s)
        return await self._to_each(path, lambda one: one._call(method, path, body, timeout_s, ok=ok, is_json=is_json))

    async def _to_each(self, path: str, ask: Callable[[Engine], Awaitable[Any]]) -> Any:
        """Ask every server; one that fails is taken out. The first answer.

        Raises:
            EngineRefused: one of them refused, and stays.
            EngineError: all failed.
        """
        replicas = self._controlled()
        if not replicas:
            raise EngineDied(f"no engine is there behind the router for {path}: {self.missing}")
        results = await asyncio.gather(*(ask(one.engine) for one in replicas), return_exceptions=True)
        if refusal := next((result for result in results if isinstance(result, EngineRefused)), None):
            raise refusal
        answers = [result for result in results if not isinstance(result, BaseException)]
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, EngineError):
                if not answers:
                    raise result
                await self._lose(replica, f"failed {path}: {result}")
            elif isinstance(result, BaseException):
                raise result
        return answers[0]

    async def _generate(self, body: dict[str, Any], timeout_s: float | None) -> Any:
        return await self._guarded(body, lambda: super(RoutedEngine, self)._call("POST", "/generate", body, timeout_s))

    async def _stream(self, body: dict[str, Any], sent: int, rid: str, heard: Heard) -> dict[str, Any]:
        # The router drops the interval: every token comes by itself.
        sampling = {name: value for name, value in body["sampling_params"].items() if name != "stream_interval"}
        passed = body | {"sampling_params": sampling}
        streaming = super()._stream
        answer: dict[str, Any] = await self._guarded(passed, lambda: streaming(passed, sent, rid, heard))
        return answer

    async def _guarded(self, body: dict[str, Any], ask: Callable[[], Awaitable[Any]]) -> Any:
        """A request through the router, and what its errors mean; see the table above."""
        if dropped := dropped_fields(body):
            raise EngineRefused(
                f"sglang-router would drop {', '.join(dropped)} without a word: leave it out, or use an engine without "
                "a router."
            )
        if not self._routable.is_set():
            return await self._aborted("no engine could be reached")
        starts = self._router.starts
        try:
            return await ask()
        except EngineDied as exc:
            if self._session is None or _is_other_weights(exc):
                raise
            self._wake.set()
            if self._router.starts == starts and await self._router.healthy():
                raise ReplicaDied(f"an engine was lost under the request: {exc}") from exc
            self._routable.clear()
            return await self._aborted(f"the router was lost ({exc})")
        except EngineRefused:
            raise
        except EngineError as exc:
            text = str(exc)
            if any(code in text for code in _UNREACHED):
                self._routable.clear()
                self._wake.set()
                return await self._aborted("no engine could be reached")
            if any(code in text for code in _LOST):
                await self._found_dead(text)
                raise ReplicaDied(f"an engine was lost under the request: {text}") from exc
            raise

    async def _found_dead(self, text: str) -> None:
        """Take out the server that an error names; other requests wait until the router has let go of it."""
        for replica in self._serving():
            if replica.member.url in text:
                await self._lose(replica, "was lost under a request")
        self._wake.set()

    async def _aborted(self, message: str) -> Any:
        """What a request that reached no engine returns: nothing drawn, go on when there is one."""
        if self._tender is not None:
            routable = asyncio.create_task(self._routable.wait())
            try:
                await asyncio.wait({routable, self._tender}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                routable.cancel()
        return {
            "output_ids": [],
            "meta_info": {"finish_reason": {"type": "abort", "message": message}, "output_token_logprobs": []},
        }


def _is_other_weights(exc: EngineDied) -> bool:
    # Said by the answer, not by the connection: nobody knows which server it was.
    return "answered with weights" in str(exc)
