"""Manage the run's own Redis server: supervised beside other processes, or alone (``penstock redis``)."""

import logging
import time

from penstock.config import Config
from penstock.errors import ConfigError, QueueUnavailable
from penstock.redis.server import RedisServer, kept_password, write_address
from penstock.system import log_files
from penstock.system.disk import has_room
from penstock.system.processes import MAX_DEATHS
from penstock.system.run_folder import RunFolder
from penstock.system.stop import Stop

#: Seconds between two checks of the server.
TICK_S = 0.1

#: If the server dies ``MAX_DEATHS`` times within this many seconds, the run ends.
DEATHS_WINDOW_S = 60.0

log = logging.getLogger(__name__)


class OwnRedis:
    """The server of one run: call ``start`` once, ``keep_up`` repeatedly, ``stop`` at the end.

    Args:
        stop: ends the wait for a server that is starting.
    """

    def __init__(self, config: Config, folder: RunFolder, stop: Stop) -> None:
        self._server = _server(config, folder)
        self._stop = stop
        self._deaths: list[float] = []
        #: True while the server is down because its disk is full.
        self._waits_for_room = False

    def start(self) -> str:
        """Start it and return its URL. Blocks until it answers.

        Raises:
            ConfigError: the port is in use.
            QueueUnavailable: it died, did not answer in time, or ``stop`` was pressed.
        """
        return self._server.start(stopped=lambda: bool(self._stop))

    def keep_up(self) -> str | None:
        """Restart the server if it died; return why that is impossible. Blocks until it answers."""
        server = self._server
        if server.alive():
            return None
        if not has_room(server.folder):
            # With appendfsync always it exits rather than lose a write. The parts wait for it meanwhile.
            if not self._waits_for_room:
                log.warning("Redis exited: disk of %s is full; it restarts when space is available", server.folder)
            self._waits_for_room = True
            return None
        self._waits_for_room = False
        now = time.monotonic()
        self._deaths = [*(death for death in self._deaths if death > now - DEATHS_WINDOW_S), now]
        if len(self._deaths) >= MAX_DEATHS:
            return f"Redis died {MAX_DEATHS} times in {DEATHS_WINDOW_S:g} s; see its log {server.log_path}"
        log.warning("Redis died, restarting on port %d", server.port)
        try:
            self.start()
        except (ConfigError, QueueUnavailable) as exc:
            return None if self._stop else f"Redis died and could not be started again: {exc}"
        return None

    def stop(self) -> None:
        """Shut it down with all data on disk. Blocks."""
        self._server.stop()


def serve_redis(config: Config) -> int:
    """Run the server until SIGTERM or Ctrl-C; write its address to the run's folder. Returns 0. Blocks.

    Raises:
        ConfigError: ``redis.url`` names another one, or the port is in use.
        QueueUnavailable: the server died.
    """
    if config.redis.url is not None:
        raise ConfigError("redis.url names a Redis that runs elsewhere: remove the key to run one here.")
    stop, server, next_look = Stop(), _server(config, RunFolder(config.run_dir)), 0.0
    with stop.installed():
        try:
            write_address(config.run_dir, server.start(stopped=lambda: bool(stop)))
            log.info("Redis answers at %s; its data are in %s", server.url, server.folder)
            while not stop:
                if not server.alive():
                    raise QueueUnavailable(
                        f"The Redis server died; its log {server.log_path} ends with:\n{server.last_words(5)}"
                    )
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + log_files.LOOK_EVERY_S
                    log_files.bound([server.log_path], config.logs.max_bytes)
                time.sleep(TICK_S)
        finally:
            server.stop()
    return 0


def _server(config: Config, folder: RunFolder) -> RedisServer:
    return RedisServer(
        folder.redis,
        port=config.redis.port,
        password=kept_password(folder.redis),
        appendfsync=config.redis.appendfsync,
    )
