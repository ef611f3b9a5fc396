"""Causal multi-head self-attention, and the two functions of a key-value cache.

For each sequence and head, with q, k, v [T, D] cut out of the rows of qkv:

    s   = q · kᵀ / sqrt(D), and -infinity where the key is later than the query
    lse = log(sum(exp(s)))            over the keys, per query
    p   = exp(s - lse)
    out = p · v

Derivative: backward recomputes p from the stored lse instead of keeping a [T, T] matrix.

    dv    = pᵀ · dout
    dp    = dout · vᵀ
    delta = sum(dout * out)           per query; equals sum(p * dp)
    ds    = p * (dp - delta)
    dq    = ds · k / sqrt(D)          dk = dsᵀ · q / sqrt(D)

`append` copies the keys and values of new tokens into the cache at positions start..start+T-1
(start [1], or None for 0); `decode` attends from one new query per sequence, at `position` [1], to
cache rows 0..position. The row of the new token must have been appended before. Both numbers are
int32 in memory, so that a recorded step can be repeated at the next position.

Shapes      qkv, dqkv [B*T, 3*H*D], a row being q | k | v, each [H, D] inside; out, dout
            [B*T, H*D]; lse [B, H, T], natural logarithm; caches [B, H, context, D].
            decode: out [B, H*D], qkv [B, 3*H*D].
Precision   qkv, out, their gradients and the caches may be bfloat16, on a GPU or a CPU that can.
            Scores, softmax, lse and all sums are float32 then too; p and ds are rounded to bfloat16
            for the products.
Write rule  out, lse and dqkv are overwritten; append changes only the rows it names.
Cost        forward: 2*B*H*T*(T+1)*D operations, two products over half of the square;
            backward: 2.5 times that, five products. Memory traffic
            4*B*T*(4*H*D + H) bytes in forward: no [T, T] array need leave the chip. Backward in
            bfloat16 on a GPU computes seven products, so that none of its sums needs atomics.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2; kept lse and recomputed
p: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness"
(2022), and Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from ..common.dispatch import by_array_type

__all__ = ["append", "backward", "decode", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
append = by_array_type(__name__, "append")
decode = by_array_type(__name__, "decode")
