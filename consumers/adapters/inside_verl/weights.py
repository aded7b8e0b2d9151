"""Manage files of weights in transit from verl's actor to its server; remove those that killed processes left."""

import logging
import uuid
from pathlib import Path

from penstock.text import format_exc

log = logging.getLogger(__name__)

#: The part of a name made by ``uuid``.
_HEX = "[0-9a-f]" * 32


def new_file(folder: Path, name: str) -> Path:
    """Return an unused path in ``folder`` for weights of the subscription ``name``."""
    return folder / f"verl-{name}-{uuid.uuid4().hex}.safetensors"


def remove_left(folder: Path, name: str) -> None:
    """Remove leftover files of subscription ``name``; the caller must hold it at the buffer.

    A file that cannot be removed is logged and kept.
    """
    for left in folder.glob(f"verl-{name}-{_HEX}.safetensors"):
        try:
            left.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("weights that a killed process left cannot be removed: %s", format_exc(exc))
