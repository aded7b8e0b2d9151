"""The configuration of a run that goes on, by the name of the run."""

import os
from pathlib import Path

from penstock.config import Config
from penstock.errors import ConfigError


def config_of(run: str | None, who: str) -> Config:
    """The resolved configuration in the folder of ``run``, under ``runs/`` or PENSTOCK_DIRECTORY, with its Redis.

    Raises:
        ConfigError: no name, no such folder, or no Redis known; ``who`` names what needs it.
    """
    from penstock.load_config import load_config
    from penstock.redis_server import with_url

    if run is None:
        raise ConfigError(f"{who} needs a config, or the name of a run.")
    folder = Path(os.environ.get("PENSTOCK_DIRECTORY", "runs")) / run
    return with_url(load_config(folder / "config.yaml", []))
