"""The configuration of a Redis server of a run, as penstock's own has it."""

import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path


def redis_conf(binary: Path, port: int, settings: Mapping[str, str]) -> str:
    """The lines of its file; ``settings`` on top."""
    lines = {
        "bind": "127.0.0.1", "port": str(port), "dir": ".", "appendonly": "yes", "appendfsync": "no",
        "save": '""', "maxmemory-policy": "noeviction", "databases": "1", "enable-debug-command": "no", **settings,
    }  # fmt: skip
    if version_of(binary).startswith("6."):
        del lines["enable-debug-command"]
    return "".join(f"{key} {value}\n" for key, value in lines.items())


@cache
def version_of(binary: Path) -> str:
    """Release of a Redis server, such as 6.2.14. Raises CalledProcessError."""
    said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return said.partition("v=")[2].split()[0]
