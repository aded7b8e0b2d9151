"""Check the temperature and the kind of logprobs of samples, on which correct ratios depend (T6).

An engine reports log_softmax(logits / T) of the sampled token (kind ``scaled``) or log_softmax(logits) (kind
``original``). A trainer compares scaled logprobs with its own log_softmax(logits / T). Original logprobs cannot be
converted without the logits of all other tokens, except for T = 1, where both kinds are equal.

Only samples that bear loss are checked. Nothing blocks.
"""

import math
from collections.abc import Iterable
from typing import get_args

from penstock.config import Config
from penstock.config.sampling import temperature_of as asked_temperature
from penstock.errors import ConfigError, ProtocolError
from penstock.records.manifest import Row
from penstock.records.sample import LogprobKind

KINDS = get_args(LogprobKind)
#: Environment variable that makes SGLang return logprobs before temperature.
SERVERS_SWITCH = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def same(one: float, other: float) -> bool:
    """Return whether two temperatures are equal up to a conversion to float32."""
    return math.isclose(one, other, rel_tol=1e-6)


def check_kinds(rows: Iterable[Row], what: str) -> None:
    """Raise ProtocolError if a row has an unknown kind of logprobs."""
    for row in rows:
        if row.logprob_kind not in KINDS:
            raise ProtocolError(
                f"{what}: the logprobs of sample {row.sample} have unknown kind {row.logprob_kind!r}; known kinds are "
                f"{' and '.join(KINDS)}. Use the same penstock version everywhere."
            )


def check_comparable(rows: Iterable[Row], what: str) -> None:
    """Raise ConfigError if a row that bears loss has ``original`` logprobs at a temperature other than 1."""
    for row in rows:
        if row.num_loss and row.logprob_kind == "original" and not same(row.temperature, 1.0):
            raise ConfigError(
                f"{what}: sample {row.sample} was sampled at temperature {row.temperature:g}, but its logprobs were "
                "computed before temperature (logprob_kind original) and cannot be converted: set logprob_kind to "
                "scaled, or sample at temperature 1."
            )


def temperature_of(rows: Iterable[Row], what: str) -> float:
    """Return the common temperature of samples that bear loss, 1 if none does. Raises ConfigError if they differ."""
    first: Row | None = None
    for row in rows:
        if not row.num_loss:
            continue
        first = first or row
        if not same(row.temperature, first.temperature):
            raise ConfigError(
                f"{what}: sample {first.sample} was sampled at temperature {first.temperature:g} and {row.sample} at "
                f"{row.temperature:g}, but this trainer divides all logits by one temperature: use the same "
                "temperature for all datasets and given answers."
            )
    return first.temperature if first is not None else 1.0


def check_temperature(rows: Iterable[Row], wanted: float, what: str, whose: str) -> None:
    """Raise ConfigError if a sample that bears loss has another temperature than ``wanted``.

    Args:
        whose: description of the setting ``wanted`` for the message.
    """
    for row in rows:
        if row.num_loss and not same(row.temperature, wanted):
            raise ConfigError(
                f"{what}: sample {row.sample} was sampled at temperature {row.temperature:g}, but {whose} is "
                f"{wanted:g}, which makes every ratio wrong: use the same temperature."
            )


def run_temperature(config: Config) -> float:
    """Return the common temperature of the run's train datasets. Raises ConfigError if they differ."""
    found: dict[float, str] = {}
    for dataset in config.data.train:
        value = asked_temperature(config.rollout.sampling | dataset.sampling)
        found.setdefault(value, dataset.name)
    if len(found) > 1:
        words = ", ".join(f"{name} at {value:g}" for value, name in found.items())
        raise ConfigError(
            f"The datasets of data.train have different temperatures ({words}), but this trainer divides all logits by "
            "one temperature: use the same for all."
        )
    return next(iter(found), 1.0)


def check_config(config: Config) -> None:
    """Raise ConfigError if the configuration yields untrainable logprobs."""
    asked = config.engine.env.get(SERVERS_SWITCH, "").strip().lower() in ("1", "true")
    if (config.engine.logprob_kind or ("original" if asked else "scaled")) != "original":
        return
    for dataset in config.data.train:
        value = asked_temperature(config.rollout.sampling | dataset.sampling)
        if not same(value, 1.0):
            raise ConfigError(
                f"The engine reports logprobs of kind original, but dataset {dataset.name} is sampled at temperature "
                f"{value:g}, so they cannot be trained on: remove engine.logprob_kind, or {SERVERS_SWITCH} in "
                "engine.env, or set the temperature to 1."
            )
