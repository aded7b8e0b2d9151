"""The configuration of a run, key by key, and the differences between two runs."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.config.reading.yaml_file import read_yaml
from penstock.errors import ConfigError
from penstock.redaction import redact
from penstock.redis.saved_config import CONFIG_FILE
from penstock.system.run_folder import RunFolder


def settings(folder: RunFolder) -> Mapping[str, Any]:
    """Return every key of a run's ``config.yaml`` (``trainer.lr``) with its value; {} without the file.

    Secrets were masked when it was written.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder.path / CONFIG_FILE
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=8)
def _read(path: Path, _: int) -> Mapping[str, Any]:
    return dict(_flat("", read_yaml(path)))


def setting(folder: RunFolder, key: str) -> int | None:
    """Return an integer setting; None if it is not set."""
    try:
        value = settings(folder).get(key)
    except ConfigError:
        return None
    return value if type(value) is int else None


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return keys whose values differ, in order, with both; None if a run has no such key."""
    keys = sorted(one.keys() | other.keys())
    return [(key, one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [found for name, entry in inner for found in _flat(f"{key}.{name}" if key else str(name), entry)]
    if below:
        yield from below
    else:
        yield key, redact(value) if isinstance(value, str) else value
