"""Layer normalization over the features of each row.

    mean = sum(x) / d      var = sum((x - mean)^2) / d      rstd = 1 / sqrt(var + eps)
    xhat = (x - mean) * rstd
    y    = gamma * xhat + beta

Without parameters (gamma and beta None) y = xhat.

Derivative, with g = gamma * dy (g = dy without parameters) and sums over the row:

    dx      = rstd * (g - sum(g) / d - xhat * sum(g * xhat) / d)
    dgamma += sum of dy * xhat over the rows
    dbeta  += sum of dy over the rows

The two subtracted terms are the gradient through mean and through rstd: every feature of a row
depends on every other. Backward recomputes xhat from x, mean and rstd instead of storing it.

Before a sublayer the stream x also goes straight on, past the norm, and its gradient is the sum of
what comes back along both ways. `residual` is what comes back straight, and dx becomes

    dx = residual + (dx from above)

in the same pass. dx_bf16, if given, gets dx rounded, for the products of the layer below.

Shapes      x, y, dx, dx_bf16, dy, residual [N, d]; mean, rstd [N]; gamma, beta, dgamma, dbeta
            [d] or all None
Dtypes      y and dy are operands: float32 or bfloat16; dx_bf16 is bfloat16; all else, and every
            sum, is float32
Write rule  y, mean, rstd, dx and dx_bf16 are overwritten; dgamma and dbeta are added to. dx may be
            residual itself; residual and dx_bf16 may be None.
Cost        forward: about 8*N*d operations; reads 4*N*d bytes, writes 4*N*d, or 2*N*d in bfloat16.
            Backward: about 15*N*d operations; 16*N*d bytes, 12*N*d without residual; in bfloat16,
            with dx_bf16, 16*N*d. Each row is read from memory once; bound by memory.

Source: Ba, Kiros and Hinton, "Layer Normalization" (2016); placed before each sublayer as in
Xiong et al., "On Layer Normalization in the Transformer Architecture" (2020).
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
