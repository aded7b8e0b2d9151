"""One spawned SGLang server process, from its start until all its processes have ended."""

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import aiohttp

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError, EngineDied, EngineError
from penstock.records.causes import EngineStarting
from penstock.system.log_files import Mark, mark
from penstock.system.out_of_memory import engine_advice
from penstock.system.processes import free_port
from penstock.workers.sglang.args import build_command, build_environment, check_python

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


_SUPERVISOR = Path(__file__).with_name("supervisor.py")

#: Longest wait for the processes of a killed server to end.
_KILL_TIMEOUT_S = 30.0
_HEALTH_S = 5.0
_LOG_LINES = 48
#: Lines of the log that are searched for the phase of a start; the maximum that is read.
_PHASE_LINES = 4_000
_PORT_TAKEN = ("address already in use", "is not available")


class Server:
    """An SGLang server process under its supervisor. Created by :func:`spawn`."""

    def __init__(self, *, url: str, log: Mark, lifeline: int, status: int) -> None:
        self.url = url
        self.log = log.path
        #: Pid of launch_server; 0 until the supervisor has reported it.
        self.pid = 0
        self._mark = log
        self._lifeline = lifeline
        self._status = status
        self._unparsed = b""
        self._ended: str | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    def exit_reason(self) -> str | None:
        """Return how the server ended, or None while it runs. Does not block."""
        while self._ended is None:
            try:
                data = os.read(self._status, 4096)
            except BlockingIOError:
                return None
            if not data:
                self._ended = "was killed"
                break
            self._unparsed += data
            *lines, self._unparsed = self._unparsed.split(b"\n")
            for line in lines:
                word, _, number = line.decode().partition(" ")
                if word == "pid":
                    self.pid = int(number)
                else:
                    self._ended = f"ended with {'exit code' if word == 'exit' else 'signal'} {number}"
        return self._ended

    async def died(self) -> str:
        """Wait until the server has ended; return how."""
        while (reason := self.exit_reason()) is None:
            await self._wait_for_status()
        return reason

    async def _wait_for_status(self) -> None:
        """Wait until the supervisor has written something, or has ended."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        self._waiters.add(readable)
        loop.add_reader(self._status, self._wake)
        try:
            await readable
        finally:
            self._waiters.discard(readable)
            # Keep the reader while others wait.
            if not self._waiters and self._status >= 0:
                loop.remove_reader(self._status)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def log_tail(self) -> str:
        """Return the last lines this process logged."""
        try:
            text = self._mark.last_lines(_LOG_LINES)
        except OSError as exc:
            return f"(cannot read {self.log}: {exc})"
        return "\n".join(line for line in text.splitlines() if line.strip()) or "(empty)"

    def phase(self) -> EngineStarting:
        """Return the phase of its start. Reads its log."""
        try:
            return phase_of(self._mark.last_lines(_PHASE_LINES))
        except OSError:
            return EngineStarting()

    async def ready(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Wait until the server answers.

        Raises:
            ConfigError: its environment has no sglang.
            EngineDied: it ended during the start; the message has the last lines of its log.
            EngineError: it did not answer within ``timeout_s``; it was killed.
        """
        deadline = time.monotonic() + timeout_s
        died = asyncio.create_task(self.died())
        try:
            while not await answers(session, self.url):
                await asyncio.wait({died}, timeout=0.1)
                if died.done():
                    raise self._start_error(died.result())
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the engine did not answer within engine.start_timeout_s = {timeout_s:g} s; raise it or "
                        f"see {self.log}:\n{self.log_tail()}"
                    )
        finally:
            died.cancel()

    def _start_error(self, reason: str) -> EngineDied | ConfigError:
        tail = self.log_tail()
        if "No module named 'sglang'" in tail or "No module named sglang" in tail:
            return ConfigError(
                "engine.python has no sglang: run `make engine`, or name the interpreter of an environment that has it."
            )
        if advice := engine_advice(tail):
            return EngineDied(f"the engine {reason} while it started, because it {advice}; its log is {self.log}")
        return EngineDied(f"the engine {reason} while it started; the end of {self.log}:\n{tail}")

    def port_taken(self) -> bool:
        """Return whether it ended because another process took its port."""
        tail = self.log_tail().lower()
        return self.exit_reason() is not None and any(text in tail for text in _PORT_TAKEN)

    def kill(self) -> None:
        """Make the supervisor kill every process of the server. Returns at once; may be called again."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    async def stop(self) -> None:
        """Kill every process of the server and wait until they have ended.

        Raises:
            EngineError: some still run after 30 s.
        """
        self.kill()
        if self._status < 0:
            return
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                while not self._reached_eof():
                    await self._wait_for_status()
        except TimeoutError:
            raise EngineError(
                f"processes of the engine (pid {self.pid}) still run {_KILL_TIMEOUT_S:g} s after SIGKILL: "
                "the kernel blocks them; check for a hung device."
            ) from None
        self._ended = self._ended or "was stopped"
        asyncio.get_running_loop().remove_reader(self._status)
        os.close(self._status)
        self._status = -1
        self._wake()

    def _reached_eof(self) -> bool:
        """Return whether the supervisor has closed its end: no process of the server is left."""
        try:
            while data := os.read(self._status, 4096):
                self._unparsed += data
        except BlockingIOError:
            return False
        return True


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
    check_python(config)
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
    start_mark = mark(log)
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")

    lifeline, our_lifeline = os.pipe()
    our_status, status = os.pipe()
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", str(_SUPERVISOR), str(lifeline), str(status), str(log), *command],
            pass_fds=(lifeline, status),
            env=environment,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except BaseException:
        os.close(our_lifeline)
        os.close(our_status)
        raise
    finally:
        os.close(lifeline)
        os.close(status)
    os.set_blocking(our_status, False)
    return Server(url=url, log=start_mark, lifeline=our_lifeline, status=our_status)


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
            await server.ready(session, timeout_s)
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
