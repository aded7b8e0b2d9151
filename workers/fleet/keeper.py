"""Keep one engine, or the router of a frozen model, running: ``python -m penstock.workers.fleet.keeper``.

The variable ``FLEET_KEEPER``, set by the fleet, has the specification as JSON. The keeper exits with the reason when
the engine ends (the fleet restarts it, with back-off), and the engine ends with it, however it ends. SIGTERM: exit
code 0.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from penstock.config import EngineConfig, ModelConfig
from penstock.config.fleet import RouterConfig
from penstock.config.run import LogsConfig
from penstock.errors import ConfigError, EngineError, PenstockError
from penstock.system.log_files import keep_bounded
from penstock.workers.router.process import Router
from penstock.workers.sglang import server as servers
from penstock.workers.sglang.args import check_arguments

VARIABLE = "FLEET_KEEPER"
#: Seconds between two checks of a router.
LOOK_S = 1.0

log = logging.getLogger(__name__)


def engine_spec(
    name: str, engine: EngineConfig, model: ModelConfig, logs: dict[str, Any], *, serves: bool, kind: str
) -> str:
    """Return the value of the variable for an engine.

    Args:
        logs: ``run``, ``log_dir`` and the section ``logs`` of the configuration.
        serves: False on the further nodes of an engine, which do not answer requests.
        kind: its worker_type; encoders support fewer calls.
    """
    values = {"engine": engine.model_dump(mode="json"), "model": model.model_dump(mode="json")}
    return json.dumps(values | logs | {"name": name, "serves": serves, "kind": kind})


def router_spec(name: str, router: RouterConfig, python: str, logs: dict[str, Any]) -> str:
    """Return the value of the variable for a router; ``logs`` as in ``engine_spec``."""
    return json.dumps(logs | {"name": name, "router": router.model_dump(mode="json"), "python": python})


async def keep_engine(spec: dict[str, Any]) -> str:
    """Start an engine and wait until it is lost; return why.

    Raises:
        ConfigError, EngineError: it cannot be started.
    """
    config, model = EngineConfig.model_validate(spec["engine"]), ModelConfig.model_validate(spec["model"])
    await asyncio.to_thread(check_arguments, config)
    server = await asyncio.to_thread(
        servers.spawn, config, model, name=str(spec["name"]), log_dir=Path(spec["log_dir"])
    )
    try:
        if not spec["serves"]:
            return _ended(server, await server.died())
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            await server.ready(session, config.start_timeout_s)
            log.info("engine %s answers at %s", spec["name"], server.url)
            # Encoders have no /server_info.
            path = "/health" if spec["kind"] == "encoder" else "/server_info"
            return await _lost(session, server, server.url + path, config)
    finally:
        await asyncio.shield(server.stop())


async def _lost(session: aiohttp.ClientSession, server: servers.Server, url: str, config: EngineConfig) -> str:
    """Wait until an engine has died or hung; return why. Its scheduler may be silent for as long as a load may take."""
    died = asyncio.create_task(server.died())
    limit = max(config.load_timeout_s, config.health_timeout_s * config.health_failures)
    answered = time.monotonic()
    try:
        while time.monotonic() - answered < limit:
            await asyncio.wait({died}, timeout=config.health_interval_s)
            if died.done():
                return _ended(server, died.result())
            try:
                async with asyncio.timeout(config.health_timeout_s), session.get(url) as response:
                    if response.status == 200:
                        answered = time.monotonic()
            except (aiohttp.ClientError, TimeoutError):
                continue
    finally:
        died.cancel()
    return f"the engine at {server.url} has not answered for {limit:g} s; its log is {server.log}"


def _ended(server: servers.Server, reason: str) -> str:
    return f"the engine process {reason}; the end of {server.log}:\n{server.log_tail()}"


async def keep_router(spec: dict[str, Any]) -> str:
    """Keep a router running and its engines added, until cancelled. They are of frozen models: no weights to wait for.

    Raises:
        ConfigError, EngineError: it cannot be started.
    """
    config = RouterConfig.model_validate(spec["router"])
    router = Router(config, str(spec["python"]), name=str(spec["name"]), log_dir=Path(spec["log_dir"]))
    try:
        await router.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            while True:
                if not await router.healthy():
                    await router.restart(router.starts)
                known = await router.engines()
                for member in config.engines:
                    if member.url not in known and await servers.answers(session, member.url):
                        await router.add(member)
                        log.info("engine %s serves", member.url)
                await asyncio.sleep(LOOK_S)
    finally:
        await asyncio.shield(router.stop())


async def _keep(spec: dict[str, Any]) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    kept = asyncio.create_task(keep_router(spec) if "router" in spec else keep_engine(spec))
    stopped = asyncio.create_task(stop.wait())
    logs = asyncio.create_task(_bound_logs(spec))
    await asyncio.wait({kept, stopped}, return_when=asyncio.FIRST_COMPLETED)
    logs.cancel()
    if not kept.done():
        kept.cancel()
        await asyncio.gather(kept, return_exceptions=True)
        return 0
    stopped.cancel()
    raise EngineError(kept.result())


async def _bound_logs(spec: dict[str, Any]) -> None:
    limits = LogsConfig.model_validate(spec["logs"])
    await keep_bounded(servers.engine_logs(Path(spec["log_dir"]), str(spec["name"])), limits.max_bytes, limits.keep)


def main() -> int:
    """Run the keeper; return 0 if asked to end, 1 if the process was lost, 2 if the configuration is invalid."""
    from penstock.system.logs import say_end, set_up

    spec = json.loads(os.environ.pop(VARIABLE))
    set_up(f"keeper-{spec['name']}", spec["run"], LogsConfig.model_validate(spec["logs"]).format)
    try:
        return asyncio.run(_keep(spec))
    except ConfigError as exc:
        say_end(str(exc))
        return 2
    except PenstockError as exc:
        say_end(str(exc))
        return 1


if __name__ == "__main__":
    sys.exit(main())
