"""Run a spawned SGLang server from its start until all its processes have exited."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError, EngineDied, EngineError
from penstock.records.worker_causes import EngineStarting
from penstock.system.out_of_memory import engine_advice
from penstock.system.processes import Child, free_port
from penstock.workers.sglang.args import build_command, build_environment, check_python, lacks_sglang

log = logging.getLogger(__name__)

#: Log text that marks the start of a phase -> phase.
_BEGINS: Final = (
    ("server_args=", EngineStarting("processes")),
    ("Load weight begin", EngineStarting("weights")),
    ("Load weight end", EngineStarting("kv_cache")),
    ("Memory pool end", EngineStarting("setup")),
    ("Capture cuda graph begin", EngineStarting("cuda_graphs")),
    ("Capture cuda graph end", EngineStarting("setup")),
    ("Started server process", EngineStarting("port")),
)
#: Progress bars of shard loading and graph capture.
_SHARE = re.compile(r"\b([0-9]{1,3})% ?(?:Completed)? ?\|")


def phase_of(written: str) -> EngineStarting:
    """Return the start phase of a server from its log since the start."""
    at, phase = max(((written.rfind(begins), phase) for begins, phase in _BEGINS), key=lambda found: found[0])
    if at < 0:
        return EngineStarting("imports")
    share = next(reversed(_SHARE.findall(written, at)), "100")
    return replace(phase, percent=min(int(share), 100))


#: Longest wait for the processes of a killed server to exit.
_KILL_TIMEOUT_S = 30.0
_HEALTH_S = 5.0
_LOG_LINES = 48
#: Most log lines searched for the start phase.
_PHASE_LINES = 4_000
_PORT_TAKEN = ("address already in use", "is not available")


class Server:
    """Control an SGLang server process under its keeper. Created by :func:`spawn`."""

    def __init__(self, child: Child, *, url: str) -> None:
        self.url = url
        self.log = child.log_path
        self._child = child

    @property
    def pid(self) -> int:
        """Pid of launch_server, the oldest child of its keeper; 0 if it is not running."""
        keeper = self._child.pid
        try:
            return int((Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split() or ["0"])[0])
        except OSError:
            return 0

    def exit_reason(self) -> str | None:
        """Return how the server exited, or None while it runs. Does not block."""
        if self._child.alive():
            return None
        self._child.ended()
        return f"ended with {self._child.how()}"

    async def died(self) -> str:
        """Wait until the server exits; return how it exited."""
        await self._child.wait()
        return self.exit_reason() or ""

    def log_tail(self) -> str:
        """Return the last log lines of this process."""
        try:
            text = self._child.last_words(_LOG_LINES)
        except OSError as exc:
            return f"(cannot read {self.log}: {exc})"
        return "\n".join(line for line in text.splitlines() if line.strip()) or "(empty)"

    def phase(self) -> EngineStarting:
        """Return the start phase, read from the log."""
        try:
            return phase_of(self._child.last_words(_PHASE_LINES))
        except OSError:
            return EngineStarting()

    async def ready(
        self,
        what: str,
        is_up: Callable[[], Awaitable[bool]],
        timeout_s: float,
        limit: str,
        explain: Callable[[str], ConfigError | None],
    ) -> None:
        """Wait until the server responds.

        Args:
            what: kind of server in errors.
            limit: ``timeout_s`` as text for errors.
            explain: returns the configuration error that the last log lines report, if any.

        Raises:
            ConfigError: result of ``explain``.
            EngineDied: the server exited during the start; the message has its last log lines.
            EngineError: the server did not respond within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        died = asyncio.create_task(self.died())
        try:
            while not await is_up():
                await asyncio.wait({died}, timeout=0.1)
                if died.done():
                    tail = self.log_tail()
                    if (mistake := explain(tail)) is not None:
                        raise mistake
                    if advice := engine_advice(tail):
                        why = f", because it {advice}; its log is {self.log}"
                    else:
                        why = f"; the end of {self.log}:\n{tail}"
                    raise EngineDied(f"the {what} {died.result()} during its start{why}")
                if time.monotonic() > deadline:
                    raise EngineError(f"the {what} did not answer within {limit}; see {self.log}:\n{self.log_tail()}")
        finally:
            died.cancel()

    def port_taken(self) -> bool:
        """Return whether the server exited because its port was taken."""
        tail = self.log_tail().lower()
        return self.exit_reason() is not None and any(text in tail for text in _PORT_TAKEN)

    def kill(self) -> None:
        """Kill all processes of the server. Returns at once; may be called repeatedly."""
        self._child.hang_up()

    async def stop(self) -> None:
        """Kill all processes of the server and wait until they have exited.

        Raises:
            EngineError: a process still runs after 30 s.
        """
        self.kill()
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await self.died()
        except TimeoutError:
            raise EngineError(
                f"processes of the engine (pid {self.pid}) still run {_KILL_TIMEOUT_S:g} s after SIGKILL: "
                "the kernel blocks them; check for a hung device."
            ) from None


def engine_logs(log_dir: Path, name: str) -> tuple[Path, ...]:
    """Return the log files of the engine and the router started under this name."""
    return tuple((log_dir / f"{kind}-{name}.log").absolute() for kind in ("engine", "router"))


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether the server at ``url`` reports healthy; waits a few seconds."""
    try:
        async with asyncio.timeout(_HEALTH_S), session.get(url + "/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def spawn(
    config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path, path: str | None = None, version: int = -1
) -> Server:
    """Start a server process without waiting until it serves (see :meth:`Server.ready`). Blocks for about 30 ms.

    Args:
        path: folder of the weights; None: ``model.path``.
        version: publication number of these weights; -1 if unpublished.

    Raises:
        ConfigError: the interpreter is missing, or an argument cannot be set.
    """
    check_python(config.python)
    port = config.port or free_port()
    command = build_command(config, model, path=path or model.path, version=version, port=port)
    # Do not resolve the link: Python finds its virtual environment by the path of the interpreter.
    command[0] = str(Path(config.python).absolute())
    log = (log_dir / f"engine-{name}.log").absolute()
    return supervise(command, build_environment(config), log, url=f"http://{config.host}:{port}")


def supervise(command: list[str], environment: dict[str, str], log: Path, *, url: str) -> Server:
    """Start a server process that ends with this process. Blocks for about 30 ms.

    Args:
        url: address at which the server will listen.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
    child = Child(log.stem, command, environment, log, kept=True)
    child.start()
    return Server(child, url=url)


async def start(
    make: Callable[[], Server], session: aiohttp.ClientSession, timeout_s: float, *, num_tries: int = 3
) -> Server:
    """Spawn a server with ``make`` and wait until it responds; retry on another port if its port was taken.

    Raises:
        ConfigError, EngineDied, EngineError: see :meth:`Server.ready`; no process is left running.
    """
    for attempt in range(1, num_tries + 1):
        server = make()
        try:
            limit = f"engine.start_timeout_s = {timeout_s:g} s (raise it)"
            await server.ready("engine", partial(answers, session, server.url), timeout_s, limit, lacks_sglang)
            await _freeze_gc(session, server.url)
            return server
        except EngineDied:
            if attempt == num_tries or not server.port_taken():
                await server.stop()
                raise
            await server.stop()
        except BaseException:
            await asyncio.shield(server.stop())
            raise
    raise AssertionError("unreachable")


async def _freeze_gc(session: aiohttp.ClientSession, url: str) -> None:
    """Exclude the server's current objects from Python's garbage collection.

    A collection over the 700,000 objects of SGLang's imports blocks every answer and control call for 0.35 s. 0.5.17
    does not exclude them itself. A failure only slows the server.
    """
    try:
        async with asyncio.timeout(_HEALTH_S), session.post(url + "/freeze_gc") as response:
            if response.status == 200:
                return
            reason = f"status {response.status}"
    except (aiohttp.ClientError, TimeoutError) as exc:
        reason = repr(exc)
    log.warning("%s refused /freeze_gc (%s): garbage collection will block it at times", url, reason)
