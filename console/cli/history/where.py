"""Translate ``--where`` conditions on samples to filters, which a history finds by its indices."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.console.cli.lists import parts_of
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.history.filters import Filters

#: Conditions that ``--where`` supports for samples: field and relation -> filter.
_ASKED: Mapping[tuple[str, str], str] = {
    **{(name, "="): name for name in ("job", "version", "batch", "fate", "dataset", "lane", "status")},
    ("sub", "="): "subscription",
    ("prompt", "~"): "prompt",
    ("answer", "~"): "text",
    **{("reward", relation): "" for relation in ("=", ">=", "<=", ">", "<")},
}


def with_where(filters: "Filters", where: Iterable[str]) -> "Filters":
    """Add conditions of ``--where`` to ``filters``. Raises ConfigError for conditions that samples do not support."""
    for text in where:
        name, relation, value = parts_of(text)
        if (name, relation) not in _ASKED:
            raise ConfigError(
                f"--where {text!r}: samples are looked for by {', '.join(f'{one}{how}' for one, how in _ASKED)}."
            )
        if name == "reward":
            filters = _by_reward(filters, text, relation, value)
            continue
        field = _ASKED[name, relation]
        if getattr(filters, field) not in (None, ""):
            raise ConfigError(f"--where {text!r}: {name} is asked for already; give it once.")
        given: Any = _as_number(text, value) if field in ("version", "batch") else value
        filters = replace(filters, **{field: given})
    if filters.fate and filters.fate not in _fates():
        raise ConfigError(f"invalid --where fate={filters.fate}: choose from {', '.join(_fates())}.")
    return filters


def _fates() -> list[str]:
    from penstock.history.row import Fate

    return list(Fate)


def _as_number(text: str, value: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", value):
        raise ConfigError(f"--where {text!r}: give a number from 0.")
    return int(value)


def _by_reward(filters: "Filters", text: str, relation: str, value: str) -> "Filters":
    """Add a bound on the reward."""
    try:
        bound = float(value)
    except ValueError:
        raise ConfigError(f"--where {text!r}: give a number.") from None
    at = {">": math.nextafter(bound, math.inf), "<": math.nextafter(bound, -math.inf)}.get(relation, bound)
    least, most = filters.least_reward, filters.most_reward
    if relation in ("=", ">", ">="):
        least = at if least is None else max(least, at)
    if relation in ("=", "<", "<="):
        most = at if most is None else min(most, at)
    return replace(filters, least_reward=least, most_reward=most)
