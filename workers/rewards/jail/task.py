"""What is run in a jail, within which limits, and how it ended."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.config.verifying.jail import JailConfig


@dataclass(frozen=True, slots=True)
class Limits:
    #: Time in seconds, the wait for a free core left out.
    test_s: float
    #: Address space of each process; with a cgroup the memory of all of them.
    memory_bytes: int
    #: Processes and threads.
    processes: int
    #: The temporary folder, and each file.
    files_bytes: int
    #: What is printed, errors included.
    output_bytes: int

    @classmethod
    def of(cls, config: JailConfig, test_s: float) -> "Limits":
        return cls(test_s, config.memory_bytes, config.processes, config.files_bytes, config.output_bytes)


@dataclass(frozen=True, slots=True)
class Task:
    """A program in Python, run by itself on an input, or as definitions of which one function is called."""

    code: str
    stdin: str = ""
    #: Name of the function that is called; what it returns is the output, as JSON. None: the program runs by itself.
    function: str | None = None
    arguments: tuple[Any, ...] = ()


class End(StrEnum):
    """How a program ended."""

    DONE = "done"
    #: It raised, or ended with another code than 0.
    FAILED = "failed"
    OUT_OF_TIME = "out_of_time"
    TOO_MUCH_OUTPUT = "too_much_output"
    #: By a signal: over its CPU time or memory, say.
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Ended:
    how: End
    #: Exit code; 128 and more: a signal.
    code: int
    output: bytes
    #: The last of what it wrote as errors.
    errors: str
    #: Seconds that it took, the wait for a free core left out.
    took_s: float
