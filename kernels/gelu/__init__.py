"""GELU, the Gaussian error linear unit, in its tanh form.

    u(x)    = sqrt(2/pi) * (x + 0.044715 * x^3)
    GELU(x) = x/2 * (1 + tanh u)

Derivative:

    GELU'(x) = 1/2 * (1 + tanh u) + x/2 * (1 - tanh^2 u) * sqrt(2/pi) * (1 + 3*0.044715 * x^2)
    dx       = dy * GELU'(x)

Beyond |x| = 10 no float32 can tell the function from x or 0 and its derivative from 1 or 0, and
exactly these are given: also where x^3 would overflow, and GELU(inf) = inf, GELU(-inf) = 0. NaN
stays NaN.

Shapes      any shape, the same for all arrays
Write rule  y and dx are overwritten; dx may be dy itself.
Cost        n elements: forward about 10*n operations (and a tanh each), 8*n bytes; backward
            about 18*n, 12*n bytes (8*n in place).

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)" (2016), section 2.
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
