"""One spawned SGLang server process, from its start until all its processes have ended."""

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

#: Text in the log that begins a phase -> the phase.
_BEGINS: Final = (
    ("server_args=", EngineStarting("processes")),
    ("Load weight begin", EngineStarting("weights")),
    ("Load weight end", EngineStarting("kv_cache")),
    ("Memory pool end", EngineStarting("setup")),
    ("Capture cuda graph begin", EngineStarting("cuda_graphs")),
    ("Capture cuda graph end", EngineStarting("setup")),
    ("Started server process", EngineStarting("port")),
)
#: Progress bars of loading shards and capturing graphs.
_SHARE = re.compile(r"\b([0-9]{1,3})% ?(?:Completed)? ?\|")


def phase_of(written: str) -> EngineStarting:
    """Return the phase of a server that has written this since it was started."""
    at, phase = max(((written.rfind(begins), phase) for begins, phase in _BEGINS), key=lambda found: found[0])
    if at < 0:
        return EngineStarting("imports")
    share = next(reversed(_SHARE.findall(written, at)), "100")
    return replace(phase, percent=min(int(share), 100))


#: Longest wait for the processes of a killed server to end.
_KILL_TIMEOUT_S = 30.0
_HEALTH_S = 5.0
_LOG_LINES = 48
#: Lines of the log that are searched for the phase of a start; the maximum that is read.
_PHASE_LINES = 4_000
_PORT_TAKEN = ("address already in use", "is not available")


class Server:
    """An SGLang server process under its keeper. Created by :func:`spawn`."""

    def __init__(self, child: Child, *, url: str) -> None:
        self.url = url
        self.log = child.log_path
        self._child = child

    @property
    def pid(self) -> int:
        """Pid of launch_server, the oldest child of its keeper; 0 if it does not run."""
        keeper = self._child.pid
        try:
            return int((Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split() or ["0"])[0])
        except OSError:
            return 0

    def exit_reason(self) -> str | None:
        """Return how the server ended, or None while it runs. Does not block."""
        if self._child.alive():
            return None
        self._child.ended()
        return f"ended with {self._child.how()}"

    async def died(self) -> str:
        """Wait until the server has ended; return how."""
        await self._child.wait()
        return self.exit_reason() or ""

    def log_tail(self) -> str:
        """Return the last lines this process logged."""
        try:
            text = self._child.last_words(_LOG_LINES)
        except OSError as exc:
            return f"(cannot read {self.log}: {exc})"
        return "\n".join(line for line in text.splitlines() if line.strip()) or "(empty)"

    def phase(self) -> EngineStarting:
        """Return the phase of its start. Reads its log."""
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
        """Wait until the server answers.

        Args:
            what: kind of the server, for errors.
            limit: ``timeout_s`` in words, for errors.
            explain: returns the mistake in the configuration that the last lines of the log tell.

        Raises:
            ConfigError: as ``explain`` returns it.
            EngineDied: it ended during the start; the message has the last lines of its log.
            EngineError: it did not answer within ``timeout_s``.
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
                    raise EngineDied(f"the {what} {died.result()} while it started{why}")
                if time.monotonic() > deadline:
                    raise EngineError(f"the {what} did not answer within {limit}; see {self.log}:\n{self.log_tail()}")
        finally:
            died.cancel()

    def port_taken(self) -> bool:
        """Return whether it ended because another process took its port."""
        tail = self.log_tail().lower()
        return self.exit_reason() is not None and any(text in tail for text in _PORT_TAKEN)

    def kill(self) -> None:
        """Kill every process of the server. Returns at once; may be called again."""
        self._child.hang_up()

    async def stop(self) -> None:
        """Kill every process of the server and wait until they have ended.

        Raises:
            EngineError: some still run after 30 s.
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
    """Return the log files of servers started under this name: an engine's, and a router's."""
    return tuple((log_dir / f"{kind}-{name}.log").absolute() for kind in ("engine", "router"))


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether the server at ``url`` reports that it is healthy; waits for a few seconds."""
    try:
        async with asyncio.timeout(_HEALTH_S), session.get(url + "/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def spawn(
    config: EngineConfig, model: ModelConfig, *, name: str, log_dir: Path, path: str | None = None, version: int = -1
) -> Server:
    """Start a server process and return at once; :meth:`Server.ready` waits for it. Blocks for about 30 ms.

    Args:
        path: folder of the weights; None: ``model.path``.
        version: publication number of these weights; -1: none.

    Raises:
        ConfigError: no interpreter, or an argument that cannot be set.
    """
    check_python(config.python)
    port = config.port or free_port()
    command = build_command(config, model, path=path or model.path, version=version, port=port)
    # Not resolved: the interpreter of a virtual environment is a link, and is recognised by its own path.
    command[0] = str(Path(config.python).absolute())
    log = (log_dir / f"engine-{name}.log").absolute()
    return supervise(command, build_environment(config), log, url=f"http://{config.host}:{port}")


def supervise(command: list[str], environment: dict[str, str], log: Path, *, url: str) -> Server:
    """Start a server process that never outlives this one. Blocks for about 30 ms.

    Args:
        url: its future address.
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
    """Spawn with ``make`` and wait until the server answers; retry on another port if its port was taken meanwhile.

    Raises:
        ConfigError, EngineDied, EngineError: as :meth:`Server.ready`; nothing is left running.
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
    """Exclude the server's current objects from later passes of Python's cycle collector.

    A pass over SGLang's imports, 700,000 objects, blocks every answer and every control call for 0.35 s. 0.5.17 does
    not do this itself. If it fails, the server is slower, but not wrong.
    """
    try:
        async with asyncio.timeout(_HEALTH_S), session.post(url + "/freeze_gc") as response:
            if response.status == 200:
                return
            said = f"it answered {response.status}"
    except (aiohttp.ClientError, TimeoutError) as exc:
        said = repr(exc)
    log.warning("%s refused /freeze_gc (%s): its garbage collector will block it now and then", url, said)
