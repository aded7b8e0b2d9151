"""Options of benchmarks that serve a random model, and what they come to."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from benchmarks.engine import RunningEngine, default_python, running_engine
from benchmarks.gpu_model import SHAPES
from benchmarks.random_model import Shape

JsonFile: TypeAlias = Annotated[Path | None, typer.Option("--json", help="Write the figures there.")]
Device: TypeAlias = Annotated[str, typer.Option(help="cpu or cuda, of trainer and server.")]
ShapeName: TypeAlias = Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")]
Concurrency: TypeAlias = Annotated[int, typer.Option(help="Answers at once; a multiple of 8, the answers of a prompt.")]
PromptTokens: TypeAlias = Annotated[int, typer.Option(help="Of each prompt.")]
MeanTokens: TypeAlias = Annotated[int, typer.Option(help="Mean length of an answer.")]
FixedTokens: TypeAlias = Annotated[int, typer.Option(help="Length of every answer.")]
EnginePython: TypeAlias = Annotated[str | None, typer.Option(help="Interpreter that has sglang; None: by device.")]
EngineArgs: TypeAlias = Annotated[
    list[str] | None, typer.Option("--engine-arg", help="NAME=VALUE of sglang.launch_server; repeat.")
]
EngineEnv: TypeAlias = Annotated[
    list[str] | None, typer.Option("--engine-env", help="NAME=VALUE for the server; repeat.")
]


def pairs(arguments: list[str] | None) -> dict[str, str]:
    """NAME=VALUE texts as a map."""
    split = [argument.partition("=") for argument in arguments or []]
    if wrong := [name for name, equals, _ in split if not equals]:
        raise SystemExit(f"{wrong[0]!r} is no NAME=VALUE.")
    return {name: value for name, _, value in split}


def served(
    shape: Shape,
    device: str,
    concurrency: int,
    python: str | None,
    args: list[str] | None,
    env: list[str] | None,
    more: Mapping[str, Any] | None = None,
) -> AbstractContextManager[RunningEngine]:
    """A server of a random model for so many answers at once; see ``running_engine``.

    Args:
        more: arguments of the server; those of the command line come before them.
    """
    return running_engine(
        shape,
        device=device,
        python=python or default_python(device),
        args={"max-running-requests": concurrency} | dict(more or {}) | pairs(args),
        env=pairs(env),
    )
