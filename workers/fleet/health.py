"""Check the servers that a fleet starts itself: engines that hang, and routers that lack engines."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import orjson

from penstock.config import EngineConfig
from penstock.config.fleet import MemberConfig
from penstock.errors import EngineError
from penstock.protocol.engine_http import ask, fetch
from penstock.workers.fleet.plan import EngineProcess, RouterProcess

#: Servers checked at the same time.
THREADS = 16


@dataclass(slots=True)
class _Seen:
    #: Its process; a new one has the time of a start.
    pid: int
    answered_at: float
    limit_s: float
    next_at: float = 0.0
    check: "Future[bool] | None" = None


class ServerHealth:
    """Checks servers in threads. A scheduler may be silent for as long as a load of weights may take."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._seen: dict[str, _Seen] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="health")

    def hangs(self, server: EngineProcess | RouterProcess, pid: int) -> bool:
        """Return whether a server has not answered for too long, and check it if due. Does not block."""
        config, now = self._config, time.monotonic()
        seen = self._seen.get(server.name)
        if seen is None or seen.pid != pid:
            seen = self._seen[server.name] = _Seen(pid, now, config.start_timeout_s)
        if seen.check is not None and seen.check.done():
            if seen.check.result():
                seen.answered_at = now
                seen.limit_s = max(config.load_timeout_s, config.health_timeout_s * config.health_failures)
            seen.check = None
        if seen.check is None and now >= seen.next_at:
            seen.next_at = now + config.health_interval_s
            seen.check = self._threads.submit(self._check_of(server))
        return now - seen.answered_at > seen.limit_s

    def _check_of(self, server: EngineProcess | RouterProcess) -> Callable[[], bool]:
        timeout_s = self._config.health_timeout_s
        if isinstance(server, RouterProcess):
            return partial(add_engines, server.url, server.router.engines, timeout_s)
        # Encoders have no /server_info.
        path = "/health" if server.worker_type == "encoder" else "/server_info"
        return partial(answers, server.url, path, timeout_s)


def answers(url: str, path: str = "/health", timeout_s: float = 2.0) -> bool:
    """Return whether the server at ``url`` is healthy. Blocks for seconds at most."""
    try:
        return ask(url + path, timeout_s=timeout_s).status == 200
    except EngineError:
        return False


def add_engines(router: str, members: Iterable[MemberConfig], timeout_s: float) -> bool:
    """Add the engines that answer and that a router lacks; return whether the router answers. Blocks for seconds.

    They are of frozen models: there are no weights to wait for.
    """
    try:
        known = orjson.loads(fetch(router + "/workers", timeout_s=timeout_s))["workers"]
        urls = {str(one["url"]).rstrip("/") for one in known}
        for member in members:
            if member.url not in urls and answers(member.url):
                fetch(router + "/workers", orjson.dumps(member.model_dump(exclude_none=True)), timeout_s=timeout_s)
        return True
    except (EngineError, ValueError, KeyError, TypeError):
        return False
