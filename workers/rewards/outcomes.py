"""Convert the result of a reward: to a number with more entries, or to a named failure (T11)."""

import math
import numbers
from typing import Any

from penstock.errors import RewardError
from penstock.records.codec import pack
from penstock.records.job import JobFailure
from penstock.system.user_code import Raised
from penstock.text import TooMuch, format_exc, safe_repr, to_plain, utf8_safe

__all__ = ["Raised", "keyed", "number_of", "too_long", "words"]

#: Most bytes of a reward's other entries, which are stored in the sample's record.
MAX_INFO_BYTES = 256 * 1024
#: Largest reward: trainers compute in float32.
MAX_REWARD = 3.4e38


def number_of(value: Any, sample: str, name: str, key: str) -> tuple[float, dict[str, Any]]:
    """Return the number that a reward gave, and the rest of its dict as plain values.

    Raises:
        RewardError: reward_not_a_number, also if reading the value raises; reward_too_large if the other entries have
            more than ``MAX_INFO_BYTES``.
    """
    info: dict[str, Any] = {}
    try:
        if isinstance(value, dict):
            if key not in value:
                raise RewardError(
                    JobFailure.REWARD_NOT_A_NUMBER,
                    f"sample {sample}: reward {name} gave a dict without {key!r}, with "
                    f"{safe_repr(list(value), 400)}; set "
                    "reward.key.",
                )
            info = to_plain({name: entry for name, entry in value.items() if name != key}, MAX_INFO_BYTES)
            value = value[key]
        number = _number(value)
    except RewardError:
        raise
    except TooMuch as exc:
        raise _too_large(sample, name, str(exc)) from exc
    # Reading a value of a user's type runs user code.
    except BaseException as exc:
        raise RewardError(
            JobFailure.REWARD_NOT_A_NUMBER,
            f"sample {sample}: what reward {name} gave, {safe_repr(value)}, cannot be read: {format_exc(exc)}.",
        ) from exc
    if number is None or not isinstance(info, dict):
        raise RewardError(
            JobFailure.REWARD_NOT_A_NUMBER,
            f"sample {sample}: reward {name} gave {safe_repr(value)}, not a finite number.",
        )
    if (num_bytes := len(pack(info))) > MAX_INFO_BYTES:
        raise _too_large(sample, name, f"{num_bytes:,} bytes")
    return number, info


def keyed(value: Any, key: str) -> Any:
    """Rename ``score`` in the result of a built-in reward to ``key``, unless it has an entry of that name."""
    if isinstance(value, dict) and key not in value:
        return {key if name == "score" else name: entry for name, entry in value.items()}
    return value


def _too_large(sample: str, name: str, what: str) -> RewardError:
    return RewardError(
        JobFailure.REWARD_TOO_LARGE,
        f"sample {sample}: reward {name} gave {what} beside its number, and a sample's record holds {MAX_INFO_BYTES:,} "
        "bytes: keep what is long elsewhere.",
    )


def _number(value: Any) -> float | None:
    """Return ``value`` as a finite number; None if it is not one."""
    # numpy's bool is not a number.
    if type(value).__name__ == "bool":
        value = bool(value)
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= MAX_REWARD else None


def too_long(what: str, name: str, limit_s: float) -> str:
    return f"{what}: reward {name} took longer than {limit_s:g} s."


def words(exc: BaseException) -> str:
    """Describe the exception of a reward, here or in a verifier, to follow "reward NAME"."""
    return utf8_safe(str(exc)) if isinstance(exc, Raised) else f"raised {format_exc(exc)}"
