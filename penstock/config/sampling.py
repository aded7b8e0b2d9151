"""Sampling parameters as SGLang reads them, where a record must agree with what was drawn."""

import sys
from collections.abc import Mapping
from typing import Any

#: Below it SGLang draws the likeliest token and reports logprobs at temperature 1.
GREEDY_BELOW = 1e-6
#: The variable with which SGLang returns logprobs of before temperature; penstock sets it for every server it starts.
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
#: Where none is given.
TEMPERATURE = 1.0


def is_temperature(value: Any) -> bool:
    """Whether ``value`` is one that an engine can draw at: a finite number, 0 (greedy) or above."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def temperature_of(sampling: Mapping[str, Any]) -> float:
    """Temperature that a map of sampling parameters draws at; null is as if it were left out.

    Raises:
        TypeError, ValueError: it names one that is not a number.
    """
    value = sampling.get("temperature")
    return TEMPERATURE if value is None else float(value)


def logprob_temperature(temperature: float) -> float:
    """Temperature of the logprobs that an engine reports for what it draws at ``temperature``."""
    return temperature if temperature >= GREEDY_BELOW else 1.0
