"""Interface of a tracker, and the description of a run that it gets."""

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.names import new_token
from penstock.system.disk import put

log = logging.getLogger(__name__)

#: Keys of a row of ``steps.jsonl`` -> other names than ``train/KEY``; '' are not shown.
NAMES = {
    "step": "",
    "total_steps": "",
    "time_s": "",
    "wait_s": "perf/train_wait_time",
    "step_s": "perf/train_time",
    "publish_s": "perf/update_weights_time",
    "reward_mean": "rollout/raw_reward",
    **{
        key: f"rollout/{key}"
        for key in (
            "version",
            "batch",
            "staleness_max",
            "staleness_mean",
            "samples",
            "tokens",
            "generated_tokens",
            "loss_tokens",
        )
    },
}

#: Characters not allowed in names at some tracker, except the slash.
_UNNAMED = re.compile(r"[^\w.() -]", re.ASCII)


def of_row(row: Mapping[str, Any]) -> dict[str, float]:
    """Return figures of a row of ``steps.jsonl`` by their names; a key with a slash is a name already."""
    named = {key if "/" in key else NAMES.get(key, f"train/{key}"): value for key, value in row.items()}
    return numbers({name: value for name, value in named.items() if name})


#: Fields of a row of ``eval.jsonl`` that are shown as ``eval/DATASET-FIELD``.
EVAL_FIELDS = ("truncated_ratio", "mean_version", "oldest", "newest", "asked_share")


def of_evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    """Return figures of an ``eval.jsonl`` row: accuracy as ``eval/DATASET``, ``eval/DATASET/CATEGORY`` a category's."""
    name = f"eval/{row['dataset']}"
    categories = row.get("categories")
    named = categories.items() if isinstance(categories, Mapping) else ()
    return numbers(
        {name: row["accuracy"], **{f"{name}-{key}": row.get(key) for key in EVAL_FIELDS}, **_rates(name, row)}
    ) | {
        key: value
        for category, scores in named
        if isinstance(scores, Mapping)
        for key, value in _of_category(f"{name}/{_UNNAMED.sub('_', str(category))}", scores).items()
    }


def _of_category(name: str, scores: Mapping[str, Any]) -> dict[str, float]:
    return numbers({name: scores.get("accuracy"), **_rates(name, scores)})


def _rates(name: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}-{key}": value for key, value in scores.items() if key.startswith(("pass@", "maj@"))}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers, as floats: trackers differ in their handling of others."""
    found = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
        if not isinstance(value, str) and math.isfinite(number):
            found[str(name)] = number
    return found


#: Most bytes of a position's file.
MAX_BYTES = 4096

#: Numeric fields of a position.
_COUNTS = ("step", "version", "entries")


class Tracker(Protocol):
    """One run at one tracker. Made and used in a separate thread: every method may block, and may raise anything."""

    @property
    def replaces(self) -> bool:
        """Return whether a repeated step replaces the earlier values of it and of all later ones."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Report figures of one step of the trainer."""

    def evaluation(self, version: float, values: Mapping[str, float]) -> None:
        """Report figures of one evaluation; ``version``: the mean version of its tokens, which may be fractional."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Report the final figures of the run: numbers and texts."""

    def close(self) -> None:
        """Flush everything and close."""


@dataclass(slots=True)
class Position:
    """Last entries of a run at a tracker; stored in the run's folder, so that the next start continues there."""

    path: Path
    #: Name of the run at the tracker; starting over makes a new one.
    id: str
    #: Last reported step; -1 before the first.
    step: int = -1
    #: Last version with a reported evaluation; -1 before the first.
    version: int = -1
    #: Number of reported entries, if the tracker numbers them.
    entries: int = 0

    def save(self) -> None:
        """Write it to its file. Blocks for the file system; raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        put(self.path, json.dumps({"id": self.id, **{name: getattr(self, name) for name in _COUNTS}}) + "\n")

    @classmethod
    def at(cls, path: Path) -> "Position":
        """Load the position from a file; make a new one if it is missing or, with a warning, unreadable."""
        new = cls(path, f"{time.strftime('%Y%m%d-%H%M%S')}-{new_token()[:6]}")
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(MAX_BYTES))
            position = cls(path, found["id"], **{name: found[name] for name in _COUNTS})
        except FileNotFoundError:
            return new
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as exc:
            log.warning("%s cannot be read (%s); reporting continues as a new run", path, exc)
            return new
        if type(position.id) is not str or any(type(getattr(position, name)) is not int for name in _COUNTS):
            log.warning("%s holds no position; reporting continues as a new run", path)
            return new
        return position


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Description of a run for a tracker."""

    name: str
    #: The run's folder, ``runs/NAME``.
    folder: Path
    #: The resolved configuration, secrets masked.
    config: dict[str, Any]
    position: Position
