"""What penstock asks of a tracker, and what a tracker is told of its run."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.system.disk import put
from penstock.system.tokens import new_token

#: Most bytes of the file that keeps a position.
MAX_BYTES = 4096

#: Fields of a position that are numbers.
_COUNTS = ("step", "version", "entries")

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One run at one tracker. Made and used in a thread of its own: every method may block, and may raise anything."""

    @property
    def replaces(self) -> bool:
        """Whether a step that comes again takes the place of what was told of it, and of all later ones."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step of the trainer."""

    def evaluation(self, version: float, values: Mapping[str, float]) -> None:
        """Figures of one evaluation; ``version``: the mean version of its tokens, which may lie between two."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """What the run came to: numbers and texts."""

    def close(self) -> None:
        """Have everything written, and end."""


@dataclass(slots=True)
class Position:
    """How far a run was told at a tracker; kept in the run's folder, so that the next start goes on there."""

    path: Path
    #: Name of the run at the tracker: one that starts over is another.
    id: str
    #: Last step that was told; -1 before the first.
    step: int = -1
    #: Last version whose evaluation was told; -1 before the first.
    version: int = -1
    #: Entries that were told, where the tracker numbers them.
    entries: int = 0

    def save(self) -> None:
        """Write it down. Blocks for the file system; raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        put(self.path, json.dumps({"id": self.id, **{name: getattr(self, name) for name in _COUNTS}}) + "\n")

    @classmethod
    def at(cls, path: Path) -> "Position":
        """The one in a file; a new one where there is none, or none that can be read, which is said."""
        new = cls(path, f"{time.strftime('%Y%m%d-%H%M%S')}-{new_token()[:6]}")
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(MAX_BYTES))
            position = cls(path, found["id"], **{name: found[name] for name in _COUNTS})
        except FileNotFoundError:
            return new
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as exc:
            log.warning("%s cannot be read (%s); the run is told from here on as another one", path, exc)
            return new
        if type(position.id) is not str or any(type(getattr(position, name)) is not int for name in _COUNTS):
            log.warning("%s holds no position; the run is told from here on as another one", path)
            return new
        return position


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is made with."""

    name: str
    #: The run's folder, ``runs/NAME``.
    folder: Path
    #: The resolved configuration, secrets masked.
    config: dict[str, Any]
    position: Position
