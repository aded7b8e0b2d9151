"""The configuration of a run in its folder: processes store it there, for the user's trainers and for commands.

``config.yaml`` (mode 600) holds the resolved configuration, secrets masked; ``redis.json`` (mode 600) the addresses of
Redis, passwords included. Neither is ever written to Redis.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import Config

#: The resolved configuration in a run's folder.
CONFIG_FILE = "config.yaml"


def config_of(config: "Config | str | Path | None", run: str | None, who: str) -> "Config":
    """Return the configuration given to ``who``, with the address of a Redis.

    A Config is returned as it is. A path is read as by ``penstock``. Without either, ``run`` names a run
    under ``runs/``, or under PENSTOCK_DIRECTORY, whose folder holds the stored configuration. Blocks, in the last two
    cases, until the run's Redis answers.

    Raises:
        ConfigError: nothing was given, the file or folder does not exist, or it is not a configuration.
        QueueRefused: Redis refuses the password.
    """
    from penstock.config import Config
    from penstock.config.load import load_config
    from penstock.redis.await_redis import await_redis

    if isinstance(config, Config):
        return config
    if config is not None:
        return await_redis(load_config(Path(config), []))
    if run is None:
        raise ConfigError(f"{who} needs a configuration, config='run.yaml', or the name of a run, run='NAME'.")
    folder = Path(os.environ.get("PENSTOCK_DIRECTORY", "runs")) / run
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            f"No part of run {run!r} was started under {folder.parent.absolute()}, for there is no {path}: start its "
            f"parts, name their folder by PENSTOCK_DIRECTORY, or give {who} config='run.yaml'."
        )
    return await_redis(load_saved(folder))


def load_saved(folder: Path) -> "Config":
    """Load the configuration in a run's folder, with the addresses of Redis beside it.

    Raises:
        ConfigError: it does not exist, or cannot be read.
    """
    from penstock.config.load import load_config

    return load_config(folder / CONFIG_FILE, [], {**_addresses(folder), **os.environ})


def keep_config(config: "Config", source: Path, *, replace: bool) -> None:
    """Store the resolved configuration of a manually started process in the run's folder; blocks for room on the disk.

    A configuration is not replaced while a launcher runs, nor if this process was started with it.

    Args:
        source: the file that the process was started with.
        replace: also if another process has stored one.

    Raises:
        ConfigError: the folder cannot be written.
    """
    from penstock.config.load import save_resolved
    from penstock.redis.server import write_address
    from penstock.system.disk import until_room
    from penstock.system.run_folder import RunFolder

    folder = config.run_dir
    path = folder / CONFIG_FILE
    if folder.absolute() in source.absolute().parents or (path.exists() and not replace):
        return
    if RunFolder(folder).is_held():
        return

    def keep() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_resolved(config, path)
        if config.redis.url is not None:
            write_address(folder, config.redis.url, config.redis.payload_servers)

    try:
        until_room(keep)
    except OSError as exc:
        raise ConfigError(f"The run's folder {folder} cannot be written ({exc.strerror}): set directory.") from exc


def _addresses(folder: Path) -> dict[str, str]:
    """Return settings that restore the passwords of Redis which ``config.yaml`` masks."""
    from penstock.config.reading.yaml_file import read_yaml
    from penstock.redis.server import read_addresses
    from penstock.text import redact

    if "PENSTOCK_REDIS" in os.environ:
        return {}
    saved = _section(read_yaml(folder / CONFIG_FILE), "redis")
    known, stores = read_addresses(folder), _section(saved, "payload_servers")
    found: dict[str, str] = {}
    if known.url and redact(known.url) == saved.get("url"):
        found["PENSTOCK_REDIS__URL"] = known.url
    kept = {name: url for name, url in known.payload_servers.items() if redact(url) == stores.get(name)}
    if kept:
        found["PENSTOCK_REDIS__PAYLOAD_SERVERS"] = json.dumps(kept)
    return found


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a map in a map; {} for an invalid value, which is refused when the complete file is read."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}
