"""The side array ``step_rewards`` of a sample, [steps, 2]: index of a step's last token in the response, and reward."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def are_step_rewards(array: NDArray[Any], length: int) -> bool:
    """Return whether an array is valid for a response of ``length`` tokens: rising integer indices, finite rewards."""
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        return False
    ends = array[:, 0].astype(np.float64)
    return bool(((ends >= 0) & (ends < length) & (ends % 1 == 0)).all() and (np.diff(ends) > 0).all())
