"""Supervise the servers behind a worker's router: add them once they have the current weights, remove them when lost.

joining ── up, weights loaded, added to the router ──> serving ── no longer wanted ──> leaving ── idle ──> forgotten
   ^                                                     │
   └────── died, hangs, shows other weights, refused ────┘
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import EngineConfig, ModelConfig
from penstock.config.fleet import MemberConfig
from penstock.config.sampling import ORIGINAL_LOGPROB
from penstock.errors import ConfigError, EngineDied, EngineError, PublishError
from penstock.protocol.presence import EnginePresence, EngineState
from penstock.records.publication import Publication
from penstock.workers.router.process import Router
from penstock.workers.sglang import server as servers
from penstock.workers.sglang.client import SglangClient
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.server_info import merge

log = logging.getLogger(__name__)

#: Wait before joining a server is retried.
_RETRY_S = 1.0
#: Longest wait for the running requests of a server that leaves.
_DRAIN_S = 60.0
_LOOK_S = 0.05


@dataclass(slots=True)
class Member:
    """One server behind the router."""

    config: MemberConfig
    engine: SglangEngine
    state: EngineState = EngineState.JOINING
    failures: int = 0
    #: Why it does not serve.
    why: str = ""
    retry_at: float = 0.0
    #: True while it loads its weights.
    is_loading: bool = False
    task: "asyncio.Task[None] | None" = None


class TendedEngines(SglangClient):
    """The servers and their router; :class:`penstock.workers.router.engine.RoutedEngine` makes one engine of them."""

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path) -> None:
        if config.router is None:
            raise ConfigError("engine.router is missing.")
        super().__init__(config, model, name=name, log_dir=log_dir)
        self._router = Router(config.router, config.python, name=name, log_dir=log_dir)
        #: Configured servers, by address.
        self._wanted = {one.url: one for one in config.router.engines}
        self._members: dict[str, Member] = {}
        self._create_members()
        self._publication: Publication | None = None
        #: Held while the weights of serving servers change, and while one starts to serve.
        self._change = asyncio.Lock()
        #: Set while requests can be sent.
        self.routable = asyncio.Event()
        self._wake = asyncio.Event()
        self._tender: asyncio.Task[None] | None = None
        self._seen_starts = 0
        #: Lost servers to which the router may still send requests.
        self._evicting: set[str] = set()
        #: Number of losses of an unknown server, and how many of them were followed by a check of all servers.
        self._suspicions = 0
        self._checked = 0

    def _make(self, config: MemberConfig) -> Member:
        engine = SglangEngine(
            self.config.model_copy(update={"router": None, "url": config.url}),
            self.model,
            name=f"{self.name}@{config.url}",
            log_dir=self.log_dir,
            answers_alone=config.worker_type == "regular",
        )
        return Member(config, engine)

    @property
    def router_pid(self) -> int:
        """Pid of the router; 0 while it has none."""
        return self._router.pid

    def describe(self) -> list[EnginePresence]:
        return [
            EnginePresence(
                url=url,
                worker_type=one.config.worker_type,
                bootstrap_port=one.config.bootstrap_port,
                state=one.state,
                version=one.engine.version,
                why=one.why,
            )
            for url, one in self._members.items()
        ]

    def set_members(self, members: Sequence[MemberConfig]) -> None:
        self._wanted = {one.url: one for one in members}
        self._create_members()
        for url, member in self._members.items():
            if url not in self._wanted and member.state is not EngineState.LEAVING:
                log.info("engine %s leaves", url)
                self._cancel(member)
                was_serving, member.state = member.state is EngineState.SERVING, EngineState.LEAVING
                member.task = asyncio.create_task(self._leave(member, was_serving), name=f"leave {url}")
        self._wake.set()

    def _create_members(self) -> None:
        """Create a member for every configured server; one that is leaving is created again after it has left."""
        for url, config in self._wanted.items():
            if url not in self._members:
                log.info("engine %s joins", url)
                self._members[url] = self._make(config)

    def _serving(self) -> list[Member]:
        return [one for one in self._members.values() if one.state is EngineState.SERVING]

    def _controlled(self) -> list[Member]:
        return [one for one in self._members.values() if one.state is not EngineState.JOINING]

    @property
    def _quorum(self) -> bool:
        """Whether a request can be answered: a regular server, or prefill and decode."""
        kinds = {one.config.worker_type for one in self._serving()}
        return "regular" in kinds or {"prefill", "decode"} <= kinds

    @property
    def missing(self) -> str:
        """Servers that do not serve and why, in words; empty when all serve."""
        return "; ".join(
            f"{url}: {one.why or one.state}" for url, one in self._members.items() if one.state is EngineState.JOINING
        )

    async def _tend(self) -> None:
        """Supervise router and servers until cancelled."""
        while True:
            self._wake.clear()
            suspicions = self._suspicions
            await self._tend_router()
            await asyncio.gather(*(self.check_member(one) for one in self._serving()))
            self._checked = suspicions
            for member in list(self._members.values()):
                idle = member.task is None or member.task.done()
                is_due = member.state is EngineState.JOINING and time.monotonic() >= member.retry_at
                if is_due and idle and not self.offloaded:
                    member.task = asyncio.create_task(self._join(member), name=f"join {member.config.url}")
            with contextlib.suppress(EngineError):
                await self._reconcile()
            self._note_quorum()
            wait_s = min(self.config.health_interval_s, _RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    def _suspect(self) -> None:
        """Stop sending requests until all servers were checked: an unknown one was lost."""
        self._suspicions += 1
        self.routable.clear()
        self._wake.set()

    def _note_quorum(self) -> None:
        is_known = not self._evicting and self._checked == self._suspicions
        if self._quorum and is_known and self._router.alive and self._router.starts == self._seen_starts:
            self.routable.set()
        else:
            self.routable.clear()

    async def _tend_router(self) -> None:
        if await self._router.healthy() and self._router.starts == self._seen_starts:
            return
        self.routable.clear()
        while not await self._router.healthy():
            log.error("router lost, restarting it")
            try:
                await self._router.restart(self._router.starts)
            except EngineError as exc:
                log.error("router failed to start, retrying: %s", exc)
        # It has no engines now; requests wait until it does.
        await self._reconcile()
        self._seen_starts = self._router.starts

    async def _reconcile(self) -> None:
        """Make the router's engines match the serving servers: it adds one back itself when it answers again."""
        known = await self._router.engines()
        wanted = {one.config.url: one for one in self._serving()}
        for url in known.keys() - wanted.keys():
            member = self._members.get(url)
            # A joining server is listed a moment before it counts as serving.
            if member is None or member.task is None or member.task.done():
                await self._router.remove(url)
        for url in wanted.keys() - known.keys():
            await self._router.add(wanted[url].config)

    async def check_member(self, member: Member) -> None:
        """Make one health check; not while weights load: a server does not answer then, and loads have a time limit."""
        if self._change.locked() or self.is_busy:
            return
        version = self.version
        try:
            # The first asks the scheduler; the second has the version loaded last.
            await member.engine.call("GET", "/server_info", timeout_s=self.config.health_timeout_s)
            info = await member.engine.call("GET", "/model_info", timeout_s=self.config.health_timeout_s)
        except EngineDied as exc:
            await self._lose(member, str(exc))
            return
        except EngineError as exc:
            member.failures += 1
            if member.failures >= self.config.health_failures and not (self._change.locked() or self.is_busy):
                await self._lose(member, f"failed {member.failures} health checks in a row: {exc}")
            return
        member.failures = 0
        shown = info.get("weight_version")
        if self.version == version >= 0 and not self._change.locked() and shown not in (None, str(version)):
            await self._lose(member, f"has weights {shown!r}, but {version} was loaded: it was restarted")

    async def _join(self, member: Member) -> None:
        """Load weights first (I9), then add it to the router."""
        url = member.config.url
        try:
            await member.engine.stop()
            if not await servers.answers(self.http.session, url):
                raise EngineError("does not answer")
            member.is_loading = True
            await member.engine.start(self._publication)
            async with self._change:
                if (member.engine.version, member.engine.rev) != (self.version, self.rev):
                    assert self._publication is not None
                    await member.engine.load_first(self._publication)
                self._refuse_unlike(member)
                await self._router.add(member.config)
                member.state, member.why, member.failures = EngineState.SERVING, "", 0
                self.info = merge([one.engine.info for one in self._serving()])
        except (EngineError, ConfigError, PublishError) as exc:
            if member.why != str(exc):
                log.warning("engine %s does not serve: %s", url, exc)
            member.why = str(exc)
            member.retry_at = time.monotonic() + _RETRY_S
            return
        finally:
            member.is_loading = False
        log.info("engine %s serves version %d", url, self.version)
        self._note_quorum()

    def _refuse_unlike(self, member: Member) -> None:
        """Refuse a server whose stream or logprobs differ: a request does not show which server answers it."""
        first = not self._serving()
        if member.engine.answers_alone:
            if not first and member.engine.logprob_kind != self.logprob_kind:
                raise ConfigError(
                    f"it returns {member.engine.logprob_kind} logprobs, and those that serve {self.logprob_kind} "
                    f"ones: start all engines with {ORIGINAL_LOGPROB}=0"
                )
            self.logprob_kind = member.engine.logprob_kind
        if not first and member.engine.info.streams_increments != self.info.streams_increments:
            raise ConfigError(
                "it streams differently from those that serve: give all engines incremental-streaming-output, or none"
            )

    async def _lose(self, member: Member, why: str) -> None:
        """Remove a server at once; its requests return as aborted, if it can still be reached."""
        if member.state is not EngineState.SERVING:
            return
        log.error("engine %s is lost: %s", member.config.url, why)
        member.state, member.why, member.retry_at = EngineState.JOINING, why, time.monotonic() + _RETRY_S
        url = member.config.url
        self._evicting.add(url)
        self._note_quorum()
        member.task = asyncio.create_task(self._evict(member), name=f"evict {url}")
        member.task.add_done_callback(lambda _: self._end_eviction(url))

    def _end_eviction(self, url: str) -> None:
        self._evicting.discard(url)
        self._note_quorum()

    async def _evict(self, member: Member) -> None:
        url, starts = member.config.url, self._router.starts
        try:
            await self._router.remove(url)
        except EngineError as exc:
            log.warning("failed to remove %s from the router: %s", url, exc)
        self._end_eviction(url)
        try:
            await member.engine.call("POST", "/continue_generation", {})
            await member.engine.abort_all()
        except EngineDied:
            pass  # its requests ended with it
        except EngineError as exc:
            # It hangs, and so do its requests, which cannot be named: only the router can end them.
            log.warning("engine %s did not abort its requests (%s): restarting the router", url, exc)
            with contextlib.suppress(EngineError):
                await self._router.restart(starts)
        await member.engine.stop()

    def _cancel(self, member: Member) -> None:
        if member.task is not None and not member.task.done():
            member.task.cancel()

    async def _leave(self, member: Member, was_serving: bool) -> None:
        """Drain a server: no new requests, running ones finish or are aborted, then it is forgotten."""
        url = member.config.url
        self._note_quorum()
        try:
            if was_serving:
                await self._router.remove(url)
                # Loads are reported late, so they are read several times; remaining requests are then aborted.
                deadline, idle = time.monotonic() + _DRAIN_S, 0
                while idle < 3:
                    idle = 0 if await self._running_at(member) else idle + 1
                    if time.monotonic() > deadline or idle:
                        await member.engine.abort_all()
                    await asyncio.sleep(_LOOK_S)
        except EngineError as exc:
            log.warning("engine %s left without an answer: %s", url, exc)
        await member.engine.stop()
        self._members.pop(url, None)
        log.info("engine %s has left", url)
        self._create_members()

    async def _running_at(self, member: Member) -> int:
        answer = await member.engine.call("GET", "/v1/loads?include=core")
        try:
            return sum(int(one["num_running_reqs"]) + int(one["num_waiting_reqs"]) for one in answer["loads"])
        except (KeyError, TypeError, ValueError) as exc:
            raise EngineError(f"its loads cannot be read ({exc!r})") from exc
