"""Arrays in host memory that begin where vectors and cache lines do."""

import numpy as np

ALIGNMENT = 256  # bytes; the widest transaction of a GPU, and whole cache lines


def aligned_zeros(size: int, dtype: type = np.float32) -> np.ndarray:
    """Zeros [size] whose first element lies at a multiple of ALIGNMENT."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGNMENT // itemsize, dtype)
    skip = -raw.ctypes.data % ALIGNMENT // itemsize
    return raw[skip:skip + size]
