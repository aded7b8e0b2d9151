"""At which temperature samples were drawn, and of what their logprobs are: without both nothing can be compared (T6).

An engine reports log_softmax(logits / T) of the token it drew (kind ``scaled``) or log_softmax(logits) (kind
``original``). A trainer compares the first with its own log_softmax(logits / T). From the second the first cannot be
had, since the logits of all other tokens would be needed, unless T is 1, where both are the same number.

Nothing here blocks. Only samples that bear loss count.
"""

import math
from collections.abc import Iterable
from typing import get_args

from penstock.config import Config
from penstock.config.sampling import temperature_of as asked_temperature
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol.records.manifest import Row
from penstock.protocol.records.sample import LogprobKind

KINDS = get_args(LogprobKind)
#: Environment variable by which SGLang is asked for logprobs from before temperature.
SERVERS_SWITCH = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def same(one: float, other: float) -> bool:
    """Whether two temperatures are one: a number may have been float32 on its way."""
    return math.isclose(one, other, rel_tol=1e-6)


def check_kinds(rows: Iterable[Row], what: str) -> None:
    """Raise ProtocolError for a row whose logprobs are of a kind that is not known."""
    for row in rows:
        if row.logprob_kind not in KINDS:
            raise ProtocolError(
                f"{what}: the logprobs of sample {row.sample} are of kind {row.logprob_kind!r}; known are "
                f"{' and '.join(KINDS)}. Use the same version of penstock everywhere."
            )


def check_comparable(rows: Iterable[Row], what: str) -> None:
    """Raise ConfigError where logprobs that bear loss are from before temperature, and that was not 1."""
    for row in rows:
        if row.num_loss and row.logprob_kind == "original" and not same(row.temperature, 1.0):
            raise ConfigError(
                f"{what}: sample {row.sample} was drawn at temperature {row.temperature:g}, but its logprobs are from "
                "before temperature (logprob_kind original), so what it was drawn with is not known: draw with "
                "logprob_kind scaled, or at temperature 1."
            )


def temperature_of(rows: Iterable[Row], what: str) -> float:
    """The one temperature of all samples that bear loss; 1 where none does. Raises ConfigError where they differ."""
    first: Row | None = None
    for row in rows:
        if not row.num_loss:
            continue
        first = first or row
        if not same(row.temperature, first.temperature):
            raise ConfigError(
                f"{what}: sample {first.sample} was drawn at temperature {first.temperature:g} and {row.sample} at "
                f"{row.temperature:g}, but this trainer divides all logits by one: give all datasets, and answers that "
                "are given, the same one."
            )
    return first.temperature if first is not None else 1.0


def check_temperature(rows: Iterable[Row], wanted: float, what: str, whose: str) -> None:
    """Raise ConfigError where a sample that bears loss was drawn at another temperature than ``wanted``.

    Args:
        whose: who divides logits by ``wanted``, in words.
    """
    for row in rows:
        if row.num_loss and not same(row.temperature, wanted):
            raise ConfigError(
                f"{what}: sample {row.sample} was drawn at temperature {row.temperature:g}, but {whose} is "
                f"{wanted:g}: every ratio would be wrong. Make them the same."
            )


def run_temperature(config: Config) -> float:
    """The one temperature that the run's train datasets are drawn at. Raises ConfigError where they differ."""
    found: dict[float, str] = {}
    for dataset in config.data.train:
        value = asked_temperature(config.rollout.sampling | dataset.sampling)
        found.setdefault(value, dataset.name)
    if len(found) > 1:
        words = ", ".join(f"{name} at {value:g}" for value, name in found.items())
        raise ConfigError(
            f"The datasets of data.train are drawn at several temperatures ({words}), but this trainer divides all "
            "logits by one: give them the same."
        )
    return next(iter(found), 1.0)


def check_config(config: Config) -> None:
    """Raise ConfigError where nothing that the run draws could be trained on: before anything is drawn."""
    asked = config.engine.env.get(SERVERS_SWITCH, "").strip().lower() in ("1", "true")
    if (config.engine.logprob_kind or ("original" if asked else "scaled")) != "original":
        return
    for dataset in config.data.train:
        value = asked_temperature(config.rollout.sampling | dataset.sampling)
        if not same(value, 1.0):
            raise ConfigError(
                f"The engine is asked for logprobs of kind original, and dataset {dataset.name} is drawn at "
                f"temperature {value:g}: from logprobs before temperature what was drawn with cannot be had. Leave "
                f"engine.logprob_kind, or {SERVERS_SWITCH} in engine.env, away, or set the temperature to 1."
            )
