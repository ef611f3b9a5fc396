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

Shapes      x, y, dx, dy [N, d]; mean, rstd [N]; gamma, beta, dgamma, dbeta [d] or all None
Write rule  y, mean, rstd and dx are overwritten; dgamma and dbeta are added to.
Cost        forward: about 8*N*d operations, 8*N*d bytes. Backward: about 14*N*d operations,
            12*N*d bytes. Both are bound by memory.

Source: Ba, Kiros and Hinton, "Layer Normalization" (2016); placed before each sublayer as in
Xiong et al., "On Layer Normalization in the Transformer Architecture" (2020).
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
