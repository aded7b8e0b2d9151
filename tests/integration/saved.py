"""A configuration as the file that a process is started with."""

from pathlib import Path

import yaml

from penstock.config import Config


def saved(config: Config, path: Path) -> Path:
    """Write to ``path`` what is not as it is anyway."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    return path
