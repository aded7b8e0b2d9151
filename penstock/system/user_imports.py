"""Imports all that a configuration names of the user's own code, in a process of its own, before anything starts.

``python -m penstock.system.user_imports`` reads a JSON list of (what, name) from stdin; exit code 2 and a sentence
on stderr where one cannot be imported. In a process of its own because what is imported stays, and may do anything.
"""

import json
import os
import subprocess
import sys

from penstock.config import Config
from penstock.config.reading.dataset_path import code_name
from penstock.errors import ConfigError
from penstock.hooks.signatures import FORMS, check_hook
from penstock.system.processes import python_command, python_environment
from penstock.system.user_code import find
from penstock.words import printable, said

#: Longest import of all of it.
IMPORT_S = 300.0


def named(config: Config) -> list[tuple[str, str]]:
    """(key, import path) of everything of the user's own that parts of this run import."""
    datasets = [(f"data.{kind}.{at.name}", at) for kind in ("train", "eval") for at in getattr(config.data, kind)]
    found = [("reward.function", config.reward.function)]
    found += [("reward.parts", name) for name in config.reward.parts]
    found += [("reward.group", config.reward.group)] if config.reward.group else []
    found += [("reward.pool.functions", name) for name in config.reward.pool.functions]
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
    """Refuse with ConfigError what cannot be imported. Blocks for as long as the imports take."""
    names = named(config)
    if not names:
        return
    try:
        done = subprocess.run(
            python_command("penstock.system.user_imports"),
            env=python_environment(os.environ),
            input=json.dumps(names),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{names[0][0]}: importing {names[0][1]} took longer than {IMPORT_S:g} s.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"importing {names} ended with exit code {done.returncode}."]
        raise ConfigError(lines[-1])


def main() -> int:
    """See the module."""
    # As parts do: last, so that it hides nothing of ours.
    sys.path.append(os.getcwd())
    try:
        for what, name in json.load(sys.stdin):
            found = find(name, what)
            if not callable(found):
                raise ConfigError(f"{what} {name} is not a function.")
            check_hook(what, name, found)
    except ConfigError as exc:
        print(printable(" ".join(str(exc).split())), file=sys.stderr)
        return 2
    except BaseException as exc:
        print(printable(said(exc)), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # What a module left running must not hold up the launcher.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
