"""Supervise the servers behind a worker's router: add servers with the current weights, remove lost servers.

joining ── up, weights loaded, added to the router ──> serving ── no longer wanted ──> leaving ── idle ──> removed
   ^                                                     │
   └───── died, hangs, reports other weights, refused ───┘
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

#: Seconds before a failed join is retried.
_RETRY_S = 1.0
#: Longest drain of a leaving server, in seconds.
_DRAIN_S = 60.0
_POLL_S = 0.05


@dataclass(slots=True)
class Member:
    """Hold the state of one server behind the router."""

    config: MemberConfig
    engine: SglangEngine
    state: EngineState = EngineState.JOINING
    failures: int = 0
    #: Reason why the server does not serve.
    why: str = ""
    retry_at: float = 0.0
    #: True while the server loads its weights.
    is_loading: bool = False
    task: "asyncio.Task[None] | None" = None


class SupervisedEngines(SglangClient):
    """Supervise the servers and the router that :class:`penstock.workers.router.engine.RoutedEngine` combines."""

    def __init__(self, config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path) -> None:
        if config.router is None:
            raise ConfigError("engine.router is missing: set it to use a router.")
        super().__init__(config, model, name=name, log_dir=log_dir)
        self._router = Router(config.router, config.python, name=name, log_dir=log_dir)
        #: Configured servers by address.
        self._wanted = {one.url: one for one in config.router.engines}
        self._members: dict[str, Member] = {}
        self._create_members()
        self._publication: Publication | None = None
        #: Lock for weight changes of serving servers, and for servers that start to serve.
        self._change = asyncio.Lock()
        #: Set while requests can be sent.
        self.routable = asyncio.Event()
        self._wake = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._seen_starts = 0
        #: Lost servers that the router may still use.
        self._evicting: set[str] = set()
        #: Number of losses of unknown servers, and number of them followed by a check of all servers.
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
        """Pid of the router; 0 while it is not running."""
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
                log.info("engine %s is leaving", url)
                self._cancel(member)
                was_serving, member.state = member.state is EngineState.SERVING, EngineState.LEAVING
                member.task = asyncio.create_task(self._leave(member, was_serving), name=f"leave {url}")
        self._wake.set()

    def _create_members(self) -> None:
        """Create a member for every configured server; a leaving server is created again after it has left."""
        for url, config in self._wanted.items():
            if url not in self._members:
                log.info("engine %s is joining", url)
                self._members[url] = self._make(config)

    def _serving(self) -> list[Member]:
        return [one for one in self._members.values() if one.state is EngineState.SERVING]

    def _controlled(self) -> list[Member]:
        return [one for one in self._members.values() if one.state is not EngineState.JOINING]

    @property
    def _quorum(self) -> bool:
        """Whether requests can be answered, by a regular server or by prefill and decode servers."""
        kinds = {one.config.worker_type for one in self._serving()}
        return "regular" in kinds or {"prefill", "decode"} <= kinds

    @property
    def missing(self) -> str:
        """Text with the servers that do not serve and the reasons; '' if all serve."""
        return "; ".join(
            f"{url}: {one.why or one.state}" for url, one in self._members.items() if one.state is EngineState.JOINING
        )

    async def _supervise(self) -> None:
        """Supervise router and servers until cancelled."""
        while True:
            self._wake.clear()
            suspicions = self._suspicions
            await self._supervise_router()
            await asyncio.gather(*(self.check_member(one) for one in self._serving()))
            self._checked = suspicions
            for member in list(self._members.values()):
                idle = member.task is None or member.task.done()
                is_due = member.state is EngineState.JOINING and time.monotonic() >= member.retry_at
                if is_due and idle and not self.offloaded:
                    member.task = asyncio.create_task(self._join(member), name=f"join {member.config.url}")
            with contextlib.suppress(EngineError):
                await self._reconcile()
            self._update_routable()
            wait_s = min(self.config.health_interval_s, _RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    def _suspect(self) -> None:
        """Block requests until all servers are checked, because an unknown server was lost."""
        self._suspicions += 1
        self.routable.clear()
        self._wake.set()

    def _update_routable(self) -> None:
        is_known = not self._evicting and self._checked == self._suspicions
        if self._quorum and is_known and self._router.alive and self._router.starts == self._seen_starts:
            self.routable.set()
        else:
            self.routable.clear()

    async def _supervise_router(self) -> None:
        if await self._router.healthy() and self._router.starts == self._seen_starts:
            return
        self.routable.clear()
        while not await self._router.healthy():
            log.error("router lost, restarting it")
            try:
                await self._router.restart(self._router.starts)
            except EngineError as exc:
                log.error("router failed to start, retrying: %s", exc)
        # The restarted router has no engines; requests wait until it has.
        await self._reconcile()
        self._seen_starts = self._router.starts

    async def _reconcile(self) -> None:
        """Reconcile the router's engines with the serving servers, as the router re-adds recovered ones itself."""
        known = await self._router.engines()
        wanted = {one.config.url: one for one in self._serving()}
        for url in known.keys() - wanted.keys():
            member = self._members.get(url)
            # A joining server is listed shortly before it counts as serving.
            if member is None or member.task is None or member.task.done():
                await self._router.remove(url)
        for url in wanted.keys() - known.keys():
            await self._router.add(wanted[url].config)

    async def check_member(self, member: Member) -> None:
        """Check the health of a server; skipped during weight loads, when servers do not answer."""
        if self._change.locked() or self.is_busy:
            return
        version = self.version
        try:
            # The first call queries the scheduler, the second returns the version loaded last.
            await member.engine.call("GET", "/server_info", timeout_s=self.config.health_timeout_s)
            info = await member.engine.call("GET", "/model_info", timeout_s=self.config.health_timeout_s)
        except EngineDied as exc:
            await self._lose(member, str(exc))
            return
        except EngineError as exc:
            member.failures += 1
            if member.failures >= self.config.health_failures and not (self._change.locked() or self.is_busy):
                await self._lose(member, f"failed {member.failures} consecutive health checks: {exc}")
            return
        member.failures = 0
        shown = info.get("weight_version")
        if self.version == version >= 0 and not self._change.locked() and shown not in (None, str(version)):
            await self._lose(member, f"has weights {shown!r}, but {version} was loaded: it was restarted")

    async def _join(self, member: Member) -> None:
        """Load the current weights (I9), then add the server to the router."""
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
                log.warning("engine %s failed to join: %s", url, exc)
            member.why = str(exc)
            member.retry_at = time.monotonic() + _RETRY_S
            return
        finally:
            member.is_loading = False
        log.info("engine %s serving version %d", url, self.version)
        self._update_routable()

    def _refuse_unlike(self, member: Member) -> None:
        """Refuse a server whose streams or logprobs differ, because answers do not show their server."""
        first = not self._serving()
        if member.engine.answers_alone:
            if not first and member.engine.logprob_kind != self.logprob_kind:
                raise ConfigError(
                    f"it returns {member.engine.logprob_kind} logprobs, but the serving engines return "
                    f"{self.logprob_kind} logprobs: start all engines with {ORIGINAL_LOGPROB}=0"
                )
            self.logprob_kind = member.engine.logprob_kind
        if not first and member.engine.info.streams_increments != self.info.streams_increments:
            raise ConfigError(
                "its stream format differs from the serving engines': set incremental-streaming-output on all or none"
            )

    async def _lose(self, member: Member, why: str) -> None:
        """Remove a server at once; its requests return as aborted if it is still reachable."""
        if member.state is not EngineState.SERVING:
            return
        log.error("engine %s lost: %s", member.config.url, why)
        member.state, member.why, member.retry_at = EngineState.JOINING, why, time.monotonic() + _RETRY_S
        url = member.config.url
        self._evicting.add(url)
        self._update_routable()
        member.task = asyncio.create_task(self._evict(member), name=f"evict {url}")
        member.task.add_done_callback(lambda _: self._end_eviction(url))

    def _end_eviction(self, url: str) -> None:
        self._evicting.discard(url)
        self._update_routable()

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
            pass  # requests ended with the server
        except EngineError as exc:
            # The server hangs with its requests, whose names are unknown: only a router restart ends them.
            log.warning("engine %s failed to abort its requests (%s); restarting the router", url, exc)
            with contextlib.suppress(EngineError):
                await self._router.restart(starts)
        await member.engine.stop()

    def _cancel(self, member: Member) -> None:
        if member.task is not None and not member.task.done():
            member.task.cancel()

    async def _leave(self, member: Member, was_serving: bool) -> None:
        """Drain a server: stop new requests, let running requests finish or abort them, then remove it."""
        url = member.config.url
        self._update_routable()
        try:
            if was_serving:
                await self._router.remove(url)
                # Loads are reported late, so several reads must be idle; remaining requests are then aborted.
                deadline, idle = time.monotonic() + _DRAIN_S, 0
                while idle < 3:
                    idle = 0 if await self._running_at(member) else idle + 1
                    if time.monotonic() > deadline or idle:
                        await member.engine.abort_all()
                    await asyncio.sleep(_POLL_S)
        except EngineError as exc:
            log.warning("engine %s left without responding: %s", url, exc)
        await member.engine.stop()
        self._members.pop(url, None)
        log.info("engine %s left", url)
        self._create_members()

    async def _running_at(self, member: Member) -> int:
        answer = await member.engine.call("GET", "/v1/loads?include=core")
        try:
            return sum(int(one["num_running_reqs"]) + int(one["num_waiting_reqs"]) for one in answer["loads"])
        except (KeyError, TypeError, ValueError) as exc:
            raise EngineError(f"its loads cannot be read ({exc!r})") from exc
