"""What may follow a product before it is written, in one word for the kernel."""

from ..gelu.gpu import gelu_slope, gelu_value

__all__ = ["GELU", "PLAIN", "RESIDUAL", "SLOPE", "epilogue_of", "gelu_slope", "gelu_value"]

PLAIN = 0
GELU = 1  # keep the sum in pre_gelu, return its GELU
RESIDUAL = 2  # add another array to it
SLOPE = 3  # multiply it by GELU'(pre_gelu)


def epilogue_of(pre_gelu, residual) -> int:
    """The epilogue of forward."""
    if pre_gelu is not None:
        return GELU
    return PLAIN if residual is None else RESIDUAL
