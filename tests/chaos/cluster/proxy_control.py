"""Starts the proxy of a run, and tells it what to break."""

import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson

from tests.chaos.cluster.proxy import DOWN, HOST, UP
from tests.chaos.places import ROOT


class ProxyControl:
    """The proxy before the server at ``host:port``; ``names`` of a call are ways, none for all of them.

    Thread-safe. Every call blocks until the proxy has done as told.

    Raises:
        RuntimeError: the proxy could not do as told, or has ended.
    """

    def __init__(self, folder: Path, host: str, port: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "proxy.log"
        self._lock = threading.Lock()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.cluster.proxy", host, str(port)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def stop(self) -> None:
        """End it, with all connections."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, *words: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                self._process.stdin.write(orjson.dumps(words) + b"\n")
                self._process.stdin.flush()
            except OSError as exc:
                raise RuntimeError(f"The proxy has ended; its log is {self._log}.") from exc
            said = self._process.stdout.readline()
        if not said:
            raise RuntimeError(f"The proxy has ended; its log is {self._log}.")
        answer = orjson.loads(said)
        if "error" in answer:
            raise RuntimeError(f"The proxy could not {words[0]}: {answer['error']}")
        return answer["ok"]

    # --- ways -----------------------------------------------------------------------------------------------------

    def way(self, name: str, port: int = 0) -> int:
        """The port by which part ``name`` reaches the server; made at the first asking, and the same ever after."""
        return int(self._tell("way", name, port))

    def url(self, name: str) -> str:
        """The same as a URL of Redis."""
        return f"redis://{HOST}:{self.way(name)}/0"

    def retarget(self, host: str, port: int) -> None:
        """New connections go to another server."""
        self._tell("retarget", host, port)

    def lines(self, names: Collection[str] = ()) -> int:
        """Connections that are open now."""
        return int(self._tell("lines", list(names)))

    # --- faults ---------------------------------------------------------------------------------------------------

    def refuse(self, names: Collection[str] = ()) -> None:
        """End every connection, and each new one at once, until ``open``."""
        self._tell("refuse", list(names))

    def hold(self, directions: Collection[str] = (UP, DOWN), names: Collection[str] = ()) -> None:
        """Pass nothing on in these directions until ``open``; what was sent meanwhile arrives then."""
        self._tell("hold", list(directions), list(names))

    def delay(self, seconds: float, names: Collection[str] = ()) -> None:
        """Each chunk takes so much longer in each direction, until ``open``."""
        self._tell("delay", seconds, list(names))

    def trap(self, where: str, match: str = "", count: int = 1, names: Collection[str] = ()) -> int:
        """End the connection of the next ``count`` requests on each way that hold ``match``; the trap's number.

        Args:
            where: ``request``: before it is passed on; ``reply``: before its reply; ``mid_reply``: in the middle of it.
        """
        return int(self._tell("trap", where, match, count, list(names)))

    def sprung(self, trap: int) -> int:
        """How many connections a trap has ended."""
        return int(self._tell("sprung", trap))

    def open(self, names: Collection[str] = ()) -> None:
        """Nothing is broken any more."""
        self._tell("open", list(names))
