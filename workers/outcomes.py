"""What a reward comes to: a number with what was said beside it, or a named outcome (T11)."""

import math
import numbers
from typing import Any

from penstock.errors import RewardError

RAISED = "reward_raised"
TIMEOUT = "reward_timeout"
NOT_A_NUMBER = "reward_not_a_number"
#: More bytes than the verifier pool takes.
TOO_LARGE = "reward_too_large"


class Raised(Exception):
    """A reward raised in a verifier, or the verifier died under it. The text goes on after "reward NAME"."""


def number_of(value: Any, sample: str, name: str, key: str) -> tuple[float, dict[str, Any]]:
    """The number that a reward gave, and the rest of its dict as plain values.

    Raises:
        RewardError: reward_not_a_number.
    """
    info: dict[str, Any] = {}
    if isinstance(value, dict):
        if key not in value:
            raise RewardError(
                NOT_A_NUMBER,
                f"sample {sample}: reward {name} gave a dict without {key!r}, with {sorted(map(str, value))}; set "
                "reward.key.",
            )
        info = {str(name): plain(entry) for name, entry in value.items() if name != key}
        value = value[key]
    # numpy's bool is no number.
    if type(value).__name__ == "bool":
        value = bool(value)
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(NOT_A_NUMBER, f"sample {sample}: reward {name} gave {value!r:.80}, not a finite number.")
    return float(value), info


def too_long(sample: str, name: str, limit_s: float) -> str:
    return f"sample {sample}: reward {name} took longer than {limit_s:g} s."


def words(exc: Exception) -> str:
    """What became of a reward that raised, here or in a verifier, as it goes on after "reward NAME"."""
    return str(exc) if isinstance(exc, Raised) else f"raised {type(exc).__name__}: {exc}"


def plain(value: Any) -> Any:
    """``value`` as something that msgpack carries: arrays as lists, what is unknown as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if callable(tolist := getattr(value, "tolist", None)):
        return plain(tolist())
    return repr(value)[:1000]
