"""Run ``penstock serve``, a stateless gateway for agents; a run may have any number of gateways.

    agent ──> gateway ──> worker with the lease of the episode's job

SIGTERM closes a gateway at once: clients repeat their requests at another gateway or after the restart.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator

import uvloop
from redis.exceptions import RedisError

from penstock.config import Config
from penstock.config.serving import cannot_listen, host_in_url
from penstock.errors import ConfigError, PenstockError
from penstock.metrics.server import serve
from penstock.protocol import scripts
from penstock.protocol.presence import Attendance
from penstock.records.keys import Keys
from penstock.redis.connect import connect
from penstock.redis.control import Control
from penstock.text import MASK, know, redact
from penstock.weights.serving import server_context, token_of
from penstock.workers.agents.gateway.metrics import Tally
from penstock.workers.agents.gateway.routing import Routing
from penstock.workers.agents.gateway.server import MAX_CONNECTIONS, GatewayServer

log = logging.getLogger(__name__)

#: Seconds without a read by the client before its connection is closed.
STALL_S = 60.0
#: Most connections waiting to be accepted.
BACKLOG = 1024
#: Seconds between heartbeats of the presence record.
PRESENCE_S = 1.0
#: Longest wait for Redis to accept that record, in seconds.
REDIS_S = 2.0
#: Longest wait for open requests on exit, in seconds.
END_S = 1.0
#: File handles needed besides two per connection.
SPARE_FILES = 256


class Gateway:
    """Run one gateway process.

    Raises:
        ConfigError: the token or the TLS settings are invalid.
    """

    def __init__(self, config: Config) -> None:
        if config.redis.url is None:
            raise ConfigError("The gateway needs redis.url: the address of the run's Redis.")
        self._config = config
        self._token = token_of(config)
        if MASK in config.agents.clients.values():
            raise ConfigError("agents.clients is masked in this file: set PENSTOCK_AGENTS__CLIENTS.")
        for token in config.agents.clients.values():
            know(token)
        self._tls = server_context(config.agents)
        with contextlib.closing(Control(config.redis.url)) as control:
            control.call(scripts.check_schema(Keys(config.run)))
        self._tally = Tally()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve inside the ``async with``; yield the address of the API.

        Raises:
            ConfigError: listening on the address failed.
        """
        config, tls = self._config, self._tls
        listening = _listen(config.agents.host, config.agents.port)
        routing = Routing(config, self._token, self._tally)
        server = GatewayServer(config, self._token, routing, self._tally)
        accepting = asyncio.create_task(server.connections.accept(listening, tls))
        metrics = serve(config, "gateway", "", self._tally)
        showing = asyncio.create_task(self._show(metrics.url if metrics else ""))
        host = host_in_url(config.agents.host, config.reached_at)
        url = f"{'https' if tls else 'http'}://{host}:{listening.getsockname()[1]}/v1"
        log.info("serving agents at %s", url)
        try:
            yield url
        finally:
            accepting.cancel()
            await server.connections.shutdown(END_S)
            showing.cancel()
            await asyncio.gather(accepting, showing, return_exceptions=True)
            await routing.close()
            if metrics is not None:
                metrics.close()

    async def _show(self, metrics_url: str) -> None:
        """Publish heartbeats of the presence record until cancelled."""
        config = self._config
        assert config.redis.url is not None
        client = connect(config.redis.url, timeout_s=REDIS_S, check=False)
        attendance = Attendance(client, Keys(config.run), "gateway", metrics=metrics_url)
        try:
            while True:
                try:
                    await asyncio.to_thread(attendance.confirm)
                except (PenstockError, RedisError) as exc:
                    log.warning("failed to publish presence: %s", redact(str(exc)))
                await asyncio.sleep(PRESENCE_S)
        finally:
            with contextlib.suppress(PenstockError, RedisError):
                attendance.end()  # blocks for REDIS_S at most, at the end of the process
            client.close()


def _listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listening = socket.create_server(found[0][4][:2], family=found[0][0], backlog=BACKLOG)
    except OSError as exc:
        raise cannot_listen("agents", host, port, exc) from exc
    listening.setblocking(False)
    # Accepted connections inherit this option.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
    return listening


def allow_files(wanted: int) -> None:
    """Raise this process's limit of open files as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning("the gateway needs up to %d open files, but only %d are allowed: raise ulimit -n", wanted, most)


async def _run(config: Config) -> None:
    gateway, stop = Gateway(config), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with gateway.serving():
        await stop.wait()


def main(config: Config) -> int:
    """Serve agents until SIGTERM or SIGINT. Blocks."""
    allow_files(3 * MAX_CONNECTIONS + SPARE_FILES)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config))
    return 0
