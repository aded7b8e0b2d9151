"""Exponential backoff."""


def pause_s(failures: int, first_s: float, most_s: float) -> float:
    """Return the seconds to wait after so many failures in a row: doubled after each, at most ``most_s``.

    Args:
        failures: 0 returns 0, 1 returns ``first_s``.
    """
    # A larger power would overflow a float.
    return min(most_s, first_s * 2.0 ** min(failures - 1, 64)) if failures > 0 else 0.0
