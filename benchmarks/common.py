"""What the benchmarks share: the report, a Redis server of one's own, processes that start together, statistics."""

import contextlib
import functools
import importlib.metadata
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.redis.commands import Client
from penstock.redis.server import RedisServer

#: Longest wait for a process of a benchmark, in seconds.
PROCESS_TIMEOUT_S = 300.0


def execute(main: Callable[..., None]) -> None:
    """Run ``main`` as a command line; an error of a benchmark is a plain traceback."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()


def leave(signum: int, frame: FrameType | None) -> None:
    """Handles SIGTERM: it ends a benchmark as Ctrl-C does, with its processes."""
    raise SystemExit(128 + signum)


def machine() -> dict[str, Any]:
    """Cores, memory, CPU model and kernel of this machine; no name of it."""
    model = "unknown"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kernel = f"{platform.system()} {platform.release()}"
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "memory_gib": round(memory / 2**30, 1), "cpu": model, "kernel": kernel, **_gpus()}


@functools.cache
def _gpus() -> dict[str, Any]:
    """GPUs and their driver; nothing on a machine without."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"gpus": [line.strip() for line in done.stdout.splitlines() if line.strip()]}


def command() -> str:
    """How this benchmark was called."""
    return shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def versions(client: Client | None = None, **more: str) -> dict[str, str]:
    """Versions of what takes part; ``more`` adds what lives in another environment (SGLang, the peers)."""
    found = {"python": platform.python_version()}
    for name in ("penstock", "redis", "hiredis", "torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["redis-py" if name == "redis" else name] = importlib.metadata.version(name)
    if client is not None:
        found["redis-server"] = str(client.info("server")["redis_version"])
    return {**found, **more}


def version_in(python: Path, package: str) -> str | None:
    """Version of ``package`` in the environment of the interpreter ``python``; None where it is not."""
    if not python.exists():
        return None
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(slots=True)
class Report:
    """One table of one benchmark, and the keys of its JSON."""

    title: str
    #: Column -> heading; the rows are maps with these columns.
    columns: Mapping[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    #: Figures by name; they stand at the top of the JSON.
    keys: dict[str, Any] = field(default_factory=dict)
    #: Name -> version, see ``versions``.
    versions: dict[str, str] = field(default_factory=dict)
    #: Further entries of the JSON, too long to be shown.
    more: dict[str, Any] = field(default_factory=dict)
    #: Sentences under the table.
    notes: list[str] = field(default_factory=list)

    def show(self) -> None:
        table = Table()
        for index, heading in enumerate(self.columns.values()):
            table.add_column(heading, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*(format_value(row.get(column)) for column in self.columns))
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(self.title, highlight=False)
        console.print(table)
        for name, value in self.keys.items():
            console.print(f"{name} = {format_value(value)}", highlight=False, markup=False)
        for note in self.notes:
            console.print(note, highlight=False, markup=False)

    def as_map(self) -> dict[str, Any]:
        return {
            **self.keys,
            **self.more,
            "title": self.title,
            "rows": self.rows,
            "notes": self.notes,
            "machine": machine(),
            "versions": self.versions,
            "command": command(),
        }

    def finish(self, json_file: Path | None) -> None:
        """Print the table; write the JSON where a file is asked for."""
        self.show()
        self.write(json_file)

    def write(self, json_file: Path | None) -> None:
        """Write the JSON where a file is asked for; whoever reads it meanwhile finds the old one or the new one."""
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = json_file.with_name(f".{json_file.name}.part")
            unfinished.write_text(json.dumps(self.as_map(), indent=2) + "\n")
            unfinished.replace(json_file)


def format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items())
    return str(value)


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def of_known(function: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    """Return a function, as the median, of the values that are not None; None if there is none."""
    known = [value for value in values if value is not None]
    return float(function(known)) if known else None


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100) by linear interpolation between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median: how much the rounds of one leg disagree."""
    return (max(values) - min(values)) / median(values)


@contextlib.contextmanager
def patched(owner: object, **instead: object) -> Iterator[None]:
    """Other methods of one object in the block, by name: what is measured is not made for being watched."""
    before = {name: vars(owner)[name] for name in instead if name in vars(owner)}
    for name, one in instead.items():
        setattr(owner, name, one)
    try:
        yield
    finally:
        for name in instead:
            delattr(owner, name)
        for name, one in before.items():
            setattr(owner, name, one)


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """A Redis server of our own on a temporary folder, AOF with fsync every second; yields its URL."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            yield server.url
        finally:
            server.stop()


#: A role of a benchmark: called with a barrier, which it passes when it is ready, and returns plain values.
Role = Callable[..., Any]


def run_together(roles: Mapping[str, tuple[Role, dict[str, Any]]]) -> dict[str, Any]:
    """Run each role in a process of its own; returns what each returned.

    A role is ``function(barrier, **arguments)`` at the head of a module; it sets itself up, waits at the barrier, and
    works. So no process measures another one's start. ``time.monotonic()`` is one clock for all of them. Blocks until
    all are done; a role that raises ends the others, and its traceback is the error.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(roles))
    pipes: dict[str, Connection[Any, Any]] = {}
    processes = {}
    for name, (function, arguments) in roles.items():
        pipes[name], child = context.Pipe(duplex=False)
        processes[name] = context.Process(
            target=_run_role, args=(function, barrier, arguments, child), name=name, daemon=True
        )
        processes[name].start()
        child.close()
    try:
        return _collect(pipes)
    finally:
        for process in processes.values():
            process.terminate()
            process.join(timeout=30)


def _run_role(function: Role, barrier: Barrier, arguments: dict[str, Any], pipe: Any) -> None:
    try:
        pipe.send((True, function(barrier, **arguments)))
    except BaseException:
        barrier.abort()
        pipe.send((False, traceback.format_exc()))


def _collect(pipes: "dict[str, Connection[Any, Any]]") -> dict[str, Any]:
    results: dict[str, Any] = {}
    deadline = time.monotonic() + PROCESS_TIMEOUT_S
    failures: list[str] = []
    while len(results) < len(pipes) and not failures:
        waiting = {pipe: name for name, pipe in pipes.items() if name not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{', '.join(waiting.values())} did not finish within {PROCESS_TIMEOUT_S:.0f} s.")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            name = waiting[pipe]
            try:
                fine, value = pipe.recv()
            except EOFError:
                fine, value = False, "the process died"
            if fine:
                results[name] = value
            else:
                failures.append(f"{name}: {value}")
    if failures:
        raise RuntimeError("\n".join(failures))
    return results
