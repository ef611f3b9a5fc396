"""ANDREA's forward and backward pass, straight down the block equations.

    x = wte[ids] + wpe[positions]
    repeat n_layer:   x = x + Attention(LayerNorm(x));   x = x + MLP(LayerNorm(x))
    logits = LayerNorm(x) · headᵀ                          (head is wte when tied)

The code is written once for every backend and precision: `ops` is a table of kernels (float64
oracle, CPU, GPU), `p` and `g` are named views of weights and gradients, `a` the named buffers.
Shapes: B sequences of T tokens are N = B·T rows; d is d_model, V the padded vocabulary.
"""

from __future__ import annotations

EPSILON = 1e-5  # under the root of every LayerNorm


def forward(ops, p, a, ids, start=None, cache=None) -> None:
    """Token ids [B, T] to the final norm's rows `a.ln_f` [N, d].

    With a key-value `cache` (one `.k`, `.v` pair a block) the keys and values are kept in it.
    `start` [1] is the position of one new token, T = 1, that reads all earlier ones from the
    cache; without it the sequences begin at position 0.
    """
    ops.embedding.forward(a.x, ids, p.wte, p.wpe, start)                             # [N, d]
    x = a.x
    for layer, (w, b) in enumerate(zip(p.blocks, a.blocks, strict=True)):
        # x = x + Attention(LayerNorm(x))
        ops.layernorm.forward(b.ln_1, b.ln_1_mean, b.ln_1_rstd, x,
                              w.ln_1_gamma, w.ln_1_beta, EPSILON)                    # [N, d]
        ops.matmul.forward(b.qkv, None, b.ln_1, w.w_qkv, w.b_qkv, None, False)       # [N, 3d]
        if cache is not None:
            ops.attention.append(cache[layer].k, cache[layer].v, b.qkv, start)
        if start is None:
            ops.attention.forward(b.attn, b.lse, b.qkv)                              # [N, d]
        else:
            ops.attention.decode(b.attn, b.qkv, cache[layer].k, cache[layer].v, start)
        ops.matmul.forward(b.x_mid, None, b.attn, w.w_o, w.b_o, x, False)            # [N, d]
        # x = x + MLP(LayerNorm(x))
        ops.layernorm.forward(b.ln_2, b.ln_2_mean, b.ln_2_rstd, b.x_mid,
                              w.ln_2_gamma, w.ln_2_beta, EPSILON)                    # [N, d]
        ops.matmul.forward(b.fc_gelu, b.fc, b.ln_2, w.w_1, w.b_1, None, False)       # [N, 4d]
        ops.matmul.forward(b.x_out, None, b.fc_gelu, w.w_2, w.b_2, b.x_mid, False)   # [N, d]
        x = b.x_out
    ops.layernorm.forward(a.ln_f, a.ln_f_mean, a.ln_f_rstd, x,
                          p.ln_f_gamma, p.ln_f_beta, EPSILON)                        # [N, d]


def head(ops, p, logits, rows) -> None:
    """Rows of the final norm [M, d] to logits [M, V] over the padded vocabulary."""
    ops.matmul.forward(logits, None, rows, p.head, None, None, True)


def losses(ops, p, a, ids, targets, vocab_size: int) -> None:
    """Cross-entropy of each target [N] into `a.losses` [N], in nats; nothing else is kept."""
    forward(ops, p, a, ids)
    head(ops, p, a.logits, a.ln_f)                                                   # [N, V]
    ops.cross_entropy.forward(a.losses, a.logits, targets, vocab_size)               # [N]


def forward_backward(ops, p, g, a, ids, targets, vocab_size: int, scale: float) -> None:
    """`a.losses` [N] as above, and the gradient of scale · Σ losses added to `g`."""
    forward(ops, p, a, ids)
    head(ops, p, a.logits, a.ln_f)
    # One pass gives the losses and turns the logits into their own gradient.
    ops.cross_entropy.backward(a.losses, a.logits, a.logits, targets, vocab_size, scale)
    backward(ops, p, g, a, ids)


def backward(ops, p, g, a, ids) -> None:
    """The mirror of `forward`: from dlogits (in `a.logits`) to every parameter gradient in `g`.

    `a.dx` carries the gradient of the residual stream downwards. A block's input is used twice,
    straight on and through a sublayer, whose last step, the norm's gradient, adds the two.
    """
    ops.matmul.backward(a.dln, g.head, None, a.logits, a.ln_f, p.head, None, True)   # [N, d]
    inputs = [a.x, *(b.x_out for b in a.blocks)]
    ops.layernorm.backward(a.dx, a.dx_bf16, g.ln_f_gamma, g.ln_f_beta, a.dln, inputs[-1],
                           a.ln_f_mean, a.ln_f_rstd, p.ln_f_gamma, None)             # [N, d]
    for w, dw, b, x in reversed(list(zip(p.blocks, g.blocks, a.blocks, inputs[:-1], strict=True))):
        # x = x + MLP(LayerNorm(x)); the GELU's derivative is in the product before it
        ops.matmul.backward(a.dfc, dw.w_2, dw.b_2, a.dx_operand, b.fc_gelu, w.w_2, b.fc,
                            False)                                                   # [N, 4d]
        ops.matmul.backward(a.dln, dw.w_1, dw.b_1, a.dfc, b.ln_2, w.w_1, None, False)
        ops.layernorm.backward(a.dx, a.dx_bf16, dw.ln_2_gamma, dw.ln_2_beta, a.dln, b.x_mid,
                               b.ln_2_mean, b.ln_2_rstd, w.ln_2_gamma, a.dx)         # [N, d]
        # x = x + Attention(LayerNorm(x))
        ops.matmul.backward(a.dattn, dw.w_o, dw.b_o, a.dx_operand, b.attn, w.w_o, None, False)
        ops.attention.backward(a.dqkv, a.dattn, b.attn, b.lse, b.qkv)                # [N, 3d]
        ops.matmul.backward(a.dln, dw.w_qkv, dw.b_qkv, a.dqkv, b.ln_1, w.w_qkv, None, False)
        ops.layernorm.backward(a.dx, a.dx_bf16, dw.ln_1_gamma, dw.ln_1_beta, a.dln, x,
                               b.ln_1_mean, b.ln_1_rstd, w.ln_1_gamma, a.dx)         # [N, d]
    ops.embedding.backward(g.wte, g.wpe, a.dx, ids)
