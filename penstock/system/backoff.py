"""How long to wait before something that failed is tried again."""


def pause_s(failures: int, first_s: float, most_s: float) -> float:
    """Seconds to wait after so many failures in a row: twice as long after each, and never more than ``most_s``.

    Args:
        failures: 0 waits for nothing, 1 for ``first_s``.
    """
    # A power of many failures would be no float.
    return min(most_s, first_s * 2.0 ** min(failures - 1, 64)) if failures > 0 else 0.0
