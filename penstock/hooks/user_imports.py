"""Import all of the user's own code that a configuration names, in a separate process, before anything starts.

``python -m penstock.hooks.user_imports`` reads a JSON list of (what, name) from stdin; exit code 2 and a sentence
on stderr if one cannot be imported. In a separate process because imports are permanent, and may do anything.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

from penstock.config import Config
from penstock.config.reading.dataset_path import code_name
from penstock.errors import ConfigError
from penstock.hooks.signatures import FORMS, check_hook
from penstock.system.processes import python_command, python_environment
from penstock.system.user_code import find
from penstock.text import format_exc, printable

#: Longest import of all of it.
IMPORT_S = 300.0


def named(config: Config) -> list[tuple[str, str]]:
    """Return (key, import path) of all of the user's own code that processes of this run import."""
    datasets = [(f"data.{kind}.{at.name}", at) for kind in ("train", "eval") for at in getattr(config.data, kind)]
    found = [("reward.function", config.reward.function)]
    found += [("reward.parts", name) for name in config.reward.parts]
    found += [("reward.group", config.reward.group)] if config.reward.group else []
    found += [("worker.rewards", name) for name in config.worker.rewards]
    found += [("worker.environments", name) for name in config.worker.environments]
    found += [(f"{key}.reward", at.reward) for key, at in datasets if at.reward]
    found += [(f"{key}.environment", at.environment) for key, at in datasets if at.environment]
    found += [(f"{key}.path", name) for key, at in datasets if (name := code_name(at.path))]
    found += [("trainer.filter.functions", name) for name in config.trainer.filter.functions]
    found += [("buffer.filters", name) for name in config.buffer.filters]
    found += [("trainer.transport", config.trainer.transport)]
    found += [(f"hooks.{key}", name) for key in FORMS for name in _many(getattr(config.hooks, key))]
    return [pair for pair in dict.fromkeys(found) if ":" in pair[1]]


def _many(named: list[str] | str | None) -> list[str]:
    return [named] if isinstance(named, str) else named or []


def check_user_code(config: Config) -> None:
    """Raise ConfigError for code that cannot be imported. Blocks for the imports."""
    names = named(config)
    if not names:
        return
    try:
        refusal = ask_apart("penstock.hooks.user_imports", json.dumps(names), IMPORT_S, f"importing {names}")
    except TimeoutError:
        raise ConfigError(f"{names[0][0]}: importing {names[0][1]} took longer than {IMPORT_S:g} s.") from None
    if refusal:
        raise ConfigError(refusal)


def ask_apart(module: str, question: str, limit_s: float, what: str) -> str:
    """Run a module that imports the user's code in a separate process (see ``answer_apart``). Blocks.

    Args:
        question: its stdin.
        what: what it does, for the error if it ends silently.

    Returns:
        '' or the error by which it refused.

    Raises:
        TimeoutError: it took longer than ``limit_s``.
    """
    try:
        done = subprocess.run(
            python_command(module),
            env=python_environment(os.environ),
            input=question,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise TimeoutError from exc
    lines = done.stderr.strip().splitlines() or [f"{what} ended with exit code {done.returncode}."]
    return lines[-1] if done.returncode else ""


def answer_apart(look: Callable[[], None]) -> NoReturn:
    """Run ``look`` as the main function of such a process: if it raises, exit code 2, and the error on stderr."""
    # Last, as in other processes, so that it hides none of our modules.
    sys.path.append(os.getcwd())
    code = 0
    try:
        look()
    except BaseException as exc:
        told = str(exc) if isinstance(exc, ConfigError) else format_exc(exc)
        print(printable(" ".join(told.split())), file=sys.stderr)
        code = 2
    # Threads that a module left running must not delay the end of this process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def import_named() -> None:
    """Import the names in stdin. Raises ConfigError if one fails, or is not valid for its key."""
    for what, name in json.load(sys.stdin):
        found = find(name, what)
        if not callable(found):
            raise ConfigError(f"{what} {name} is not a function.")
        check_hook(what, name, found)


if __name__ == "__main__":
    answer_apart(import_named)
