"""Linear layer: matrix product and bias, with GELU or a residual stream on top where wanted.

    y = x · w + bias                                       w [K, N]
    y = x · wᵀ + bias                                      w [N, K], transpose_w
    pre_gelu = x · w + bias,  y = GELU(pre_gelu)           where pre_gelu is given
    y = x · w + bias + residual                            where residual is given

Weights are stored [in, out]. The transposed form is the output head, whose weights are the token
table [Vp, d]. The layer that follows a GELU gets pre_gelu back in its backward pass, and goes
through the GELU on the way.

Derivative of the linear part:

    dx     = dy · wᵀ              or  dy · w     transposed
    dx     = (dy · wᵀ) ∘ GELU'(pre_gelu)         where pre_gelu is given, and x = GELU(pre_gelu)
    dw    += xᵀ · dy              or  dyᵀ · x    transposed
    dbias += sum of dy over the rows, in a fixed order

With pre_gelu, dx is thus the gradient of pre_gelu: the dy of the layer before. That of residual is
dy itself.

Shapes      x, dx [M, K]; y, residual, dy [M, N]; w, dw [K, N] or [N, K]; bias, dbias [N];
            pre_gelu [M, N] in forward, [M, K] in backward.
            pre_gelu, residual, bias, dx and dbias may be None: not wanted, or not there. pre_gelu
            and residual exclude each other.
Write rule  y, pre_gelu and dx are overwritten; dw and dbias are added to.
Precision   x, w, dy, dx and pre_gelu are float32, or all bfloat16 on a GPU or a CPU that has
            avx512_bf16: then products are of bfloat16 numbers and sums in float32. bias, residual,
            dw and dbias are float32; y is as x, but float32 with a residual.
Cost        forward: 2*M*N*K operations; backward: twice that. s*(M*K + K*N + M*N) bytes in
            forward for elements of s = 4 or 2 bytes; bound by arithmetic for the sizes of a model,
            by the bytes of w for few rows. GELU, residual and GELU' cost one more array each.

Source: the gradient of a product is in every text; Goodfellow, Bengio and Courville, "Deep
Learning" (2016), section 6.5.6. GELU: see kernels.gelu. Tensor cores: see gpu_tensor.py.
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
