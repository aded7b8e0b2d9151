"""Sections ``reward.jail`` and ``reward.code``: where answers' programs run, and what they are worth."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.section import Positive, Seconds, Section


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"it should be an absolute path, not {path!r}")
    return path


class JailConfig(Section):
    """Where programs run that a model wrote."""

    #: auto: the first of bwrap, namespaces and filters (docs/rewards.md) that holds on this machine, which is tried
    #: before it is used; where none holds the start is refused. One of them: that one, or the start is refused.
    #: none: no jail; answers may do what the worker's user may.
    kind: Literal["auto", "bwrap", "namespaces", "filters", "none"] = "auto"
    #: Address space of a process in bytes; where a cgroup may be made, also the memory of all of them together.
    memory_bytes: Annotated[int, Field(ge=64 * 1024**2)] = 1024**3
    #: Most processes and threads.
    processes: Positive = 16
    #: Most bytes in its temporary folder.
    files_bytes: Positive = 16 * 1024**2
    #: Most bytes that a program prints.
    output_bytes: Annotated[int, Field(ge=1024, le=64 * 1024**2)] = 4 * 1024**2
    #: Folders that programs may read, beside the system's libraries and the interpreter: absolute paths.
    readable: list[Annotated[str, AfterValidator(_absolute)]] = Field(default_factory=list)


class CodeConfig(Section):
    """The reward ``code``: an answer's program against the tests in its label."""

    #: all: 1 where all tests pass, else 0. share: the share of tests that pass.
    score: Literal["all", "share"] = "all"
    #: Time of one test, the wait for a free core left out.
    test_s: Seconds = 4.0
    #: Time of an answer's tests together; those that are left then count as failed.
    total_s: Seconds = 20.0
    #: Only so many tests of a label are run, from its first on; null: all of them.
    max_tests: Positive | None = None
    #: Largest difference of two numbers that still counts as none, relative to the larger or to 1.
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    #: Interpreter of answers: a path; what is installed there can be imported. null: penstock's own, with Python's
    #: library alone.
    python: str | None = None
