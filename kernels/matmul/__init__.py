"""Linear layer: matrix product, bias, and GELU on the result where it is wanted.

    y = x · w + bias                                       w [K, N]
    y = x · wᵀ + bias                                      w [N, K], transpose_w
    pre_gelu = x · w + bias,  y = GELU(pre_gelu)           where pre_gelu is given

Weights are stored [in, out]. The transposed form is the output head, whose weights are the token
table [Vp, d]. The second result, pre_gelu, is what gelu.backward needs later.

Derivative of the linear part (that of the GELU is gelu.backward's):

    dx     = dy · wᵀ              or  dy · w     transposed
    dw    += xᵀ · dy              or  dyᵀ · x    transposed
    dbias += sum of dy over the rows, in a fixed order

Shapes      x, dx [M, K]; y, pre_gelu, dy [M, N]; w, dw [K, N] or [N, K]; bias, dbias [N]
            pre_gelu, bias, dx and dbias may be None: not wanted, or not there.
Write rule  y, pre_gelu and dx are overwritten; dw and dbias are added to.
Cost        forward: 2*M*N*K operations; backward: twice that. 4*(M*K + K*N + M*N) bytes in
            forward; bound by arithmetic for the sizes of a model.

Source: the gradient of a product is in every text; Goodfellow, Bengio and Courville, "Deep
Learning" (2016), section 6.5.6. GELU epilogue: see kernels.gelu.
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
