"""Sampling parameters of SGLang: their names and values, and how records read them.

Parameters that it would ignore or refuse are refused here.
"""

import difflib
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

#: Below it SGLang samples greedily and reports logprobs at temperature 1.
GREEDY_BELOW = 1e-6
#: The variable with which SGLang returns logprobs before temperature; penstock sets it for every server it starts.
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
#: Default temperature.
TEMPERATURE = 1.0

#: Parameters that do not change the distribution that the logprobs describe.
HONEST = frozenset({
    "max_new_tokens", "temperature", "stop", "stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim", "sampling_seed",
})  # fmt: skip
#: Parameters that change it, with the values at which they do not. Sent with every request for training, because a
#: server may have been started with other defaults.
NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
#: top_k at which all tokens are kept, beside -1.
TOP_K_ALL = 1 << 30
#: All others.
_OTHERS = frozenset({
    "n", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params", "beam_width",
    "stream_interval",
})  # fmt: skip
NAMES = HONEST | NEUTRAL.keys() | _OTHERS

#: Names in other libraries.
_CALLED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_length": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "do_sample": "temperature",
    "seed": "sampling_seed",
    "stop_words": "stop",
    "stop_strings": "stop",
    "num_return_sequences": "rollout.n",
    "num_generations": "rollout.n",
}
#: Name -> (least value, most value); None: no limit.
_RANGE: dict[str, tuple[float | None, float | None]] = {
    "temperature": (0, None),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, None),
    "max_new_tokens": (1, None),
    "min_new_tokens": (0, None),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0, 2),
    "sampling_seed": (0, None),
}
_WHOLE = frozenset({"top_k", "max_new_tokens", "min_new_tokens", "sampling_seed"})
_SWITCHES = frozenset({"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})


def is_temperature(value: Any) -> bool:
    """Return whether ``value`` is a temperature that an engine accepts: a finite number, 0 (greedy) or above."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def temperature_of(sampling: Mapping[str, Any]) -> float:
    """Return the temperature of a map of sampling parameters; null counts as left out.

    Raises:
        TypeError, ValueError: it is not a number.
    """
    value = sampling.get("temperature")
    return TEMPERATURE if value is None else float(value)


def logprob_temperature(temperature: float) -> float:
    """Return the temperature of the logprobs that an engine reports if it samples at ``temperature``."""
    return temperature if temperature >= GREEDY_BELOW else 1.0


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise ValueError for a name or a value that no engine accepts. null leaves a parameter out."""
    for name, value in sampling.items():
        if name not in NAMES:
            raise ValueError(f"{name} is not a sampling parameter of SGLang; {_hint(name)}")
        if value is None:
            continue
        if name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{name} is true or false, not {value!r}")
        if name in _RANGE:
            _check_number(name, value)


def _checked(sampling: dict[str, Any]) -> dict[str, Any]:
    check_sampling(sampling)
    return sampling


#: Sampling parameters of a configuration.
Sampling = Annotated[dict[str, Any], AfterValidator(_checked)]


def _check_number(name: str, value: Any) -> None:
    least, most = _RANGE[name]
    kind = int if name in _WHOLE else int | float
    what = "a whole number" if name in _WHOLE else "a number"
    limits = f"from {least:g} to {most:g}" if most is not None else f"of at least {least:g}"
    fine = isinstance(value, kind) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not fine or (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} is {what} {limits}, not {value!r}")


def hidden_by(sampling: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first parameter that changes the sampled distribution but not the logprobs (T7), with its value."""
    for name, value in sampling.items():
        neutral = value is None or value == NEUTRAL.get(name) or (name == "top_k" and value == TOP_K_ALL)
        greedy = name == "temperature" and value is not None and value < GREEDY_BELOW
        if greedy or (name not in HONEST and not neutral and (name, value) != ("n", 1)):
            return name, value
    return None


def _hint(name: str) -> str:
    near = _CALLED.get(name) or next(iter(difflib.get_close_matches(name[:64], sorted(NAMES), n=1)), None)
    return f"did you mean {near}?" if near else "remove it"
