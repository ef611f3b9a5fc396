"""Values of many lanes."""

import numpy as np

Lanes = np.ndarray | None  # ascending; None: every lane of the chunk
Value = np.ndarray | np.generic  # one element for each of the lanes, or the same for all


def is_scalar(value) -> bool:
    """Whether a value is the same for all lanes."""
    return not isinstance(value, np.ndarray)
