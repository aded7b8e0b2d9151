"""Files of weights on their way from verl's actor to its server: who is killed leaves one, the next removes it."""

import logging
import uuid
from pathlib import Path

from penstock.words import said

log = logging.getLogger(__name__)

#: Of a name that ``uuid`` gives.
_HEX = "[0-9a-f]" * 32


def new_file(folder: Path, name: str) -> Path:
    """A path in ``folder`` that nothing has, for weights of the subscription ``name``."""
    return folder / f"verl-{name}-{uuid.uuid4().hex}.safetensors"


def remove_left(folder: Path, name: str) -> None:
    """Remove files that were on their way for subscription ``name``; whoever calls it holds its place at the buffer.

    One that cannot be removed stays, and is told of in the log.
    """
    for left in folder.glob(f"verl-{name}-{_HEX}.safetensors"):
        try:
            left.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("weights that a killed process left cannot be removed: %s", said(exc))
