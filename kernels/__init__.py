"""Every operation of a GPT as plain functions on arrays, of NumPy or on a GPU.

    import numpy as np, kernels
    y = np.empty_like(x)
    kernels.gelu.forward(y, x)

Outputs come first and the caller allocates them. Activation gradients and forward outputs are
overwritten, parameter gradients are added to. Arrays are C-contiguous float32, token ids int32.
Each op is a subpackage whose docstring is its textbook page: ``help(kernels.layernorm)``.

Importing this package loads neither NumPy nor Numba and changes no setting; an op is imported
when it is first named, and its compiled code when it is first called.
"""

import importlib
from types import ModuleType

from .registry import OPS

__version__ = "0.1.0"

# A different project named `kernels` exists on PyPI: whoever imports us can tell by this constant.
IDENTITY = "andrea-numba"

__all__ = ["IDENTITY", "OPS", "__version__", *OPS]


def __getattr__(name: str) -> ModuleType:
    if name in OPS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no {name!r}; its ops: {', '.join(OPS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *OPS])
