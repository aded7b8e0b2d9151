"""Run sglang-router as a child process, and manage its list of engines. Independent of Redis.

Tested with sglang-router 0.3.2. Its retries are disabled, because a repeated request would be another sample under
another version. It serves /generate; controls go to each engine.
"""

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from penstock.config.fleet import MemberConfig, RouterConfig
from penstock.errors import ConfigError, EngineDied, EngineError
from penstock.system.processes import free_port
from penstock.system.restarts import Restarts
from penstock.workers.sglang.args import check_python, flags_of, refuse_set, with_underscores
from penstock.workers.sglang.http import open_session
from penstock.workers.sglang.server import Server, supervise
from penstock.workers.sglang.stream import MAX_EVENT_BYTES, read_body

log = logging.getLogger(__name__)

_PROCESS = Path(__file__).with_name("child.py")

#: Health checks: two failures, two seconds apart, remove an engine; the defaults need three minutes.
_DEFAULTS: dict[str, Any] = {
    "health_check_interval_secs": 2,
    "health_failure_threshold": 2,
    "health_check_timeout_secs": 5,
    "log_level": "warn",
}

#: Fields of /generate and of sampling_params that reach the engine; the router silently drops others.
PASSED = frozenset({
    "input_ids", "text", "image_data", "modalities", "sampling_params", "rid", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "return_hidden_states", "stream", "priority",
    "extra_key", "log_metrics", "session_params", "custom_logit_processor", "data_parallel_rank",
})  # fmt: skip
PASSED_SAMPLING = frozenset({
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "no_stop_trim", "n", "sampling_seed", "json_schema", "regex", "ebnf",
})  # fmt: skip
#: Values that may be dropped, because they are the engine's defaults.
_DEFAULT_SAMPLING = {"spaces_between_special_tokens": True}

#: Longest wait for an administrative answer of the router, in seconds.
_ADMIN_TIMEOUT_S = 10.0
#: Longest wait until an added engine is healthy or a removed engine is gone, in seconds.
_CHANGE_TIMEOUT_S = 30.0
#: First and longest wait before a router is restarted (waits double), and uptime after which the wait resets.
_BACKOFF_S, _MAX_BACKOFF_S, _QUIET_S = 0.5, 10.0, 60.0
_POLL_S = 0.05
#: Longest start of a router, in seconds.
START_S = 60.0

#: Arguments that penstock sets -> what to set instead.
_SET_BY_PENSTOCK = {
    "host": "nothing; the worker chooses it",
    "port": "fleet.ports",
    "prometheus_host": "nothing",
    "prometheus_port": "fleet.ports",
    "policy": "router.policy",
    "worker_urls": "server_groups, or router.engines",
    "pd_disaggregation": "worker_type prefill and decode",
    "prefill": "worker_type prefill",
    "decode": "worker_type decode",
    "disable_retries": "nothing; a repeated request would be another sample",
    "retry_max_retries": "nothing; a repeated request would be another sample",
}


def build_router_command(config: RouterConfig, python: str, *, port: int = 0, metrics_port: int = 0) -> list[str]:
    """Build the command line of a router without engines, which are added once they have the weights.

    Args:
        python: interpreter of the engines' environment.
        port, metrics_port: defaults if ``config`` does not set them.

    Raises:
        ConfigError: ``args`` has an argument that penstock sets.
    """
    given = with_underscores(config.args)
    refuse_set("router.args.", given, _SET_BY_PENSTOCK)
    pd = any(engine.worker_type == "prefill" for engine in config.engines)
    arguments: dict[str, Any] = {
        "host": config.host,
        "port": config.port or port,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": metrics_port,
        "policy": config.policy,
        "disable_retries": True,
        "pd_disaggregation": pd,
    }
    # Do not resolve the link: Python finds its virtual environment by the path of the interpreter.
    program = str(Path(python).absolute()) if os.sep in python else python
    return [program, "-I", str(_PROCESS), *flags_of(arguments | _DEFAULTS | given)]


def dropped_fields(body: dict[str, Any]) -> list[str]:
    """Return the fields of a /generate body that the router would drop."""
    sampling = body.get("sampling_params") or {}
    fields = [name for name, value in body.items() if value is not None and name not in PASSED]
    fields += [
        f"sampling_params.{name}"
        for name, value in sampling.items()
        if value is not None and name not in PASSED_SAMPLING and _DEFAULT_SAMPLING.get(name, ...) != value
    ]
    return fields


@dataclass(frozen=True, slots=True)
class Registered:
    """Describe an engine as listed by the router."""

    id: str
    url: str
    worker_type: str
    healthy: bool


class Router:
    """Run a router process and manage its engines. Not thread-safe.

    Args:
        python: interpreter of the engines' environment.
        log_dir: folder of the log ``router-NAME.log``.
    """

    def __init__(self, config: RouterConfig, python: str, *, name: str, log_dir: Path) -> None:
        self.config = config
        self.name = name
        self._python = python
        self._log = (log_dir / f"router-{name}.log").absolute()
        # The address stays the same across restarts.
        self._port = config.port or free_port()
        self._metrics_port = free_port()
        self.url = f"http://{config.host}:{self._port}"
        #: Number of starts.
        self.starts = 0
        self._server: Server | None = None
        self._session: aiohttp.ClientSession | None = None
        self._restarts = Restarts(_BACKOFF_S, _MAX_BACKOFF_S, _QUIET_S)
        self._restarting = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Pid of the router process; 0 while it is not running."""
        return self._server.pid if self._server else 0

    @property
    def alive(self) -> bool:
        return self._server is not None and self._server.exit_reason() is None

    async def start(self) -> None:
        """Start the process without engines and wait until it responds.

        Raises:
            ConfigError: sglang_router is not installed, or an argument is invalid.
            EngineDied, EngineError: the router exited, or did not respond within ``START_S``; no process is left.
        """
        check_python(self._python)
        command = build_router_command(self.config, self._python, port=self._port, metrics_port=self._metrics_port)
        environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
        if self._session is None:
            self._session = open_session()
        self._server = await asyncio.to_thread(supervise, command, environment, self._log, url=self.url)
        self.starts += 1
        try:
            await self._server.ready("router", self._is_live, START_S, f"{START_S:g} s", self._mistake)
        except BaseException:
            await asyncio.shield(self._end())
            raise
        log.info("router %s at %s, pid %d", self.name, self.url, self.pid)

    def _mistake(self, tail: str) -> ConfigError | None:
        if "No module named" in tail and "sglang_router" in tail:
            return ConfigError(f"{self._python} has no sglang_router: install sglang-router==0.3.2 in its environment.")
        if "unrecognized arguments" in tail or "invalid choice" in tail:
            return ConfigError(f"router.args has an unknown or invalid argument; correct it:\n{tail}")
        return None

    async def _is_live(self) -> bool:
        try:
            await self._request("GET", "/liveness")
        except EngineError:
            return False
        return True

    async def healthy(self) -> bool:
        """Return whether the process runs and responds."""
        return self.alive and await self._is_live()

    async def restart(self, seen: int) -> None:
        """Kill the router with all its requests and start it without engines, with exponential backoff.

        Args:
            seen: ``starts`` when the caller found the router broken; if it was restarted since, do nothing.

        Raises:
            ConfigError, EngineDied, EngineError: see :meth:`start`.
        """
        async with self._restarting:
            if self.starts != seen:
                return
            self._restarts.note_failure()
            await self._end()
            await asyncio.sleep(self._restarts.wait_s)
            await self.start()

    async def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    async def stop(self) -> None:
        """Stop the process."""
        session, self._session = self._session, None
        try:
            await self._end()
        finally:
            if session is not None:
                await session.close()

    async def engines(self) -> dict[str, Registered]:
        """Return the router's engines by address. Raises EngineError."""
        answer = await self._request("GET", "/workers")
        found = {}
        try:
            for one in answer["workers"]:
                url = str(one["url"]).rstrip("/")
                found[url] = Registered(str(one["id"]), url, str(one["worker_type"]), bool(one["is_healthy"]))
        except (KeyError, TypeError) as exc:
            raise EngineError(f"the router returned a malformed list of engines ({exc!r}).") from exc
        return found

    async def add(self, member: MemberConfig) -> None:
        """Add an engine and wait until it is healthy.

        Raises:
            EngineError: the engine is not healthy within 30 s.
        """
        body: dict[str, Any] = {"url": member.url, "worker_type": member.worker_type}
        if member.bootstrap_port is not None:
            body["bootstrap_port"] = member.bootstrap_port
        await self._request("POST", "/workers", body)
        await self._until(lambda listed: member.url in listed and listed[member.url].healthy, f"add {member.url}")

    async def remove(self, url: str) -> None:
        """Remove an engine and wait until it is gone; its running requests continue.

        Raises:
            EngineError: the engine is still listed after 30 s.
        """
        listed = await self.engines()
        if url in listed:
            await self._request("DELETE", f"/workers/{listed[url].id}")
            await self._until(lambda listed: url not in listed, f"remove {url}")

    async def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + _CHANGE_TIMEOUT_S
        while not condition(await self.engines()):
            if time.monotonic() > deadline:
                raise EngineError(f"the router did not {what} within {_CHANGE_TIMEOUT_S:g} s; its log is {self._log}")
            await asyncio.sleep(_POLL_S)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        if self._session is None:
            raise EngineDied(f"router {self.name} is not running.")
        try:
            async with (
                asyncio.timeout(_ADMIN_TIMEOUT_S),
                self._session.request(method, self.url + path, json=body) as response,
            ):
                answer, status = await read_body(response.content, MAX_EVENT_BYTES), response.status
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as exc:
            raise EngineDied(f"router {self.name} did not answer {path} ({exc!r}).") from exc
        if status >= 400:
            raise EngineError(f"the router answered {path} with {status}: {answer[:300].decode(errors='replace')}")
        try:
            return orjson.loads(answer) if answer[:1] in (b"{", b"[") else None
        except orjson.JSONDecodeError as exc:
            raise EngineError(f"the router returned invalid JSON for {path}: {answer[:200]!r}.") from exc
