"""A program to run in a jail, its limits, and its result."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.config.reward import JailConfig

#: Program that the interpreter in a jail runs.
RUNNER = Path(__file__).with_name("runner.py").read_text(encoding="utf-8")
#: Most processes and threads of a program, and most bytes of its temporary folder.
PROCESSES, FILES_BYTES = 16, 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Limits:
    #: Time in seconds, without the wait for a free core.
    test_s: float
    #: Address space of each process.
    memory_bytes: int
    #: Processes and threads.
    processes: int
    #: Bytes of the temporary folder, and of each file.
    files_bytes: int
    #: Bytes of output, errors included.
    output_bytes: int

    @classmethod
    def of(cls, config: JailConfig, test_s: float) -> "Limits":
        return cls(test_s, config.memory_bytes, PROCESSES, FILES_BYTES, config.output_bytes)


@dataclass(frozen=True, slots=True)
class Task:
    """A program in Python, run by itself on an input, or as definitions of which one function is called."""

    code: str
    stdin: str = ""
    #: Function to call; its return value is the output, as JSON. None: the program runs by itself.
    function: str | None = None
    arguments: tuple[Any, ...] = ()


def to_stdin(task: Task, limits: dict[str, int], user: int | None) -> bytes:
    """Return what the runner reads: the size of a JSON map, the map, and the program's own input."""
    about = {"code": task.code, "function": task.function, "arguments": task.arguments, "limits": limits, "user": user}
    text = json.dumps(about).encode()
    return b"%16d" % len(text) + text + task.stdin.encode(errors="surrogatepass")


class End(StrEnum):
    """How a program ended."""

    DONE = "done"
    #: It raised, or ended with another code than 0.
    FAILED = "failed"
    OUT_OF_TIME = "out_of_time"
    TOO_MUCH_OUTPUT = "too_much_output"
    #: By a signal, for instance after exceeding its CPU time or memory.
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Ended:
    how: End
    #: Exit code; 128 and more: a signal.
    code: int
    output: bytes
    #: The end of its error output.
    errors: str
    #: Seconds it ran, without the wait for a free core.
    took_s: float
