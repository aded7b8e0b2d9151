"""Run the configuration's ``prepare`` command, which makes data and the first policy."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.system.processes import Child

#: Seconds between two checks of the command.
TICK_S = 0.1


def prepare(config: Config) -> None:
    """Run the command alone, with our output. Blocks.

    Raises:
        ConfigError: no command is configured, or it failed.
    """
    if config.prepare is None:
        raise ConfigError("prepare: the configuration has no such key, so there is nothing to prepare.")
    folder = Path(config.prepare[0]).parent
    try:
        code = subprocess.run([sys.executable, *config.prepare], cwd=folder, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(f"prepare: there is no folder {folder}; correct the path, or remove the key.") from None
    if code != 0:
        raise ConfigError(f"prepare: {' '.join(config.prepare)} ended with exit code {code}; its output says why.")


def prepare_logged(script: str, arguments: list[str], log_path: Path, meanwhile: Callable[[], None]) -> str:
    """Run the script with its output in a log; return the last line of the log. Blocks.

    Args:
        meanwhile: called repeatedly while it runs; if it raises, the command is killed.

    Raises:
        ConfigError: it failed.
    """
    child = Child("prepare", [sys.executable, script, *arguments], dict(os.environ), log_path, Path(script).parent)
    try:
        child.start()
        while not child.ended():
            meanwhile()
            time.sleep(TICK_S)
    except BaseException:
        child.kill()
        raise
    if child.code != 0:
        raise ConfigError(f"prepare: {script} ended with {child.how()}, its last lines:\n{child.last_words()}")
    return child.last_words(1)
