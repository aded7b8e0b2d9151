"""The interface of a fleet to its launchers: this machine (local.py), or Ray (ray_fleet.py)."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one process of an engine."""

    host: str
    gpus: tuple[int, ...] = ()
    #: Its CUDA_VISIBLE_DEVICES; empty: without GPUs, or set where it starts.
    visible: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """Specification of a process. Sent to other nodes: plain values only."""

    name: str
    kind: Literal["worker", "engine", "encoder", "router"]
    host: str
    log_path: str
    #: A server and its arguments; its descendants end with it.
    command: tuple[str, ...] = ()
    #: Without ``command``: module of penstock and arguments, under the node's own interpreter.
    arguments: tuple[str, ...] = ()
    #: Added to the node's environment; contains secrets.
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    gpus: tuple[int, ...] = ()
    #: Engine whose slot it runs in, and the index of that slot. Servers of one engine start and end together.
    engine: str = ""
    rank: int = 0
    #: ``logs.max_bytes``.
    max_log_bytes: int = 64 * 1024**2


class ProcessState(StrEnum):
    """State of a process of a fleet."""

    #: Not started before its encoders answer.
    WAITING = "waiting for encoders"
    RUNNING = "running"
    RESTARTING = "restarting"
    CRASH_LOOP = "crash loop"
    #: It was asked to end, or ended by itself with exit code 0.
    ENDED = "ended"
    #: Its node or actor is unreachable.
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Status:
    """State of a process, with details."""

    state: ProcessState
    pid: int = 0
    starts: int = 0
    #: How it last ended, with its last log lines.
    why: str = ""
    host: str = ""


class Places(Protocol):
    """Assign GPUs and ports to the engines of a plan."""

    @property
    def hosts(self) -> list[str]:
        """Return all nodes, by the addresses at which they reach each other."""

    def take(self, engine: str, num_gpus: int, host: str | None, gpus: tuple[int, ...] | None) -> list[Slot]:
        """Assign GPUs to an engine: on one node, or all of several nodes if it needs more than one has.

        Raises:
            ConfigError: not enough are free.
        """

    def ports(self, owner: str, host: str) -> int:
        """Assign a block of ports to a process; return the first. Raises ConfigError if none is left."""

    def release(self, owner: str) -> None:
        """Release the GPUs and ports of an engine."""


class Process(Protocol):
    """A process that is kept running. Methods block only if they say so."""

    def look(self) -> Status:
        """Return its status; restart it if due. Call it often."""

    def bounce(self) -> None:
        """Kill it and restart it at once."""

    def terminate(self) -> None:
        """Send SIGTERM, and do not restart; a worker drains."""

    def kill(self) -> None:
        """Kill what is left of it. Blocks until it has ended."""


class Launcher(Places, Protocol):
    """Start processes on the fleet's nodes."""

    def start(self, spec: Spec) -> Process:
        """Start a process and keep it running."""

    def close(self) -> None:
        """Leave the nodes, once all processes are killed."""
