"""Residual addition: the stream plus what a sublayer adds to it.

    out = x + delta

Derivative: the stream x is used twice, once straight on and once as the sublayer's input, so its
gradient is the sum of what comes back along both ways:

    dx = dout + dbranch

dout, the gradient of the sum, also is the gradient of delta and goes into the sublayer's
backward; dbranch is what comes out of it.

Shapes      all [N, d]
Write rule  out and dx are overwritten; out may be x, dx may be dout or dbranch.
Cost        N*d additions and 12*N*d bytes each way; bound by memory.

Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2015); the
gradient's straight path in their "Identity Mappings in Deep Residual Networks" (2016).
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
