"""Negative controls: the comparison that the suite uses must refuse each of these wrong kernels.

Every control changes one thing in an oracle. The unchanged oracle passes (see test_all_ops), so
what is refused is the change.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.common.device_array import DeviceArray
from kernels.common.spec import cases_of, is_bf16
from kernels.common.verify import GUARD_WORDS, verify
from kernels.registry import load_op, load_spec

ORACLE = {
    op: load_op(op, "oracle")
    for op in ("embedding", "layernorm", "matmul", "gelu", "attention", "cross_entropy",
               "adamw", "grad_norm")
}


def embedding_ignores_start(x, ids, wte, wpe, start):
    ORACLE["embedding"].forward(x, ids, wte, wpe, None)


def embedding_sets_instead_of_adding(dwte, dwpe, dx, ids):
    dwte[:] = 0
    ORACLE["embedding"].backward(dwte, dwpe, dx, ids)


def embedding_loses_repeated_ids(dwte, dwpe, dx, ids):
    dwte[ids.reshape(-1)] += dx
    dwpe[: ids.shape[1]] += dx.reshape(*ids.shape, -1).sum(axis=0)


def layernorm_swaps_gamma_and_beta(y, mean, rstd, x, gamma, beta, eps):
    ORACLE["layernorm"].forward(y, mean, rstd, x, beta, gamma, eps)


def layernorm_forgets_eps(y, mean, rstd, x, gamma, beta, eps):
    ORACLE["layernorm"].forward(y, mean, rstd, x, gamma, beta, 1e-12)


def layernorm_divides_by_d_minus_1(y, mean, rstd, x, gamma, beta, eps):
    ORACLE["layernorm"].forward(y, mean, rstd, x, gamma, beta, eps)
    d = x.shape[1]
    rstd *= math.sqrt((d - 1) / d)


def layernorm_variance_in_one_pass(y, mean, rstd, x, gamma, beta, eps):
    """E[x^2] - E[x]^2 cancels when the mean is large: float32 leaves nothing of the variance."""
    mean[:] = x.mean(axis=1)
    rstd[:] = 1 / np.sqrt(np.maximum((x * x).mean(axis=1) - mean * mean, 0) + eps)
    y[:] = (x - mean[:, None]) * rstd[:, None]
    if gamma is not None:
        y[:] = gamma * y + beta


def layernorm_drops_the_last_row(y, mean, rstd, x, gamma, beta, eps):
    ORACLE["layernorm"].forward(y[:-1], mean[:-1], rstd[:-1], x[:-1], gamma, beta, eps)


def layernorm_drops_the_last_row_of_dgamma(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma,
                                           residual):
    before = None if gamma is None else (dgamma.copy(), dbeta.copy())
    ORACLE["layernorm"].backward(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual)
    if gamma is not None:
        dgamma[:], dbeta[:] = before
        whole = slice(0, -1)
        ORACLE["layernorm"].backward(dx[whole].copy(), None, dgamma, dbeta, dy[whole], x[whole],
                                     mean[whole], rstd[whole], gamma, None)


def layernorm_forgets_the_path_through_rstd(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma,
                                            residual):
    straight = 0 if residual is None else residual.copy()
    ORACLE["layernorm"].backward(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual)
    g = dy if gamma is None else gamma * dy
    dx[:] = straight + rstd[:, None] * (g - g.mean(axis=1, keepdims=True))


def layernorm_sets_instead_of_adding(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma,
                                     residual):
    if gamma is not None:
        dgamma[:] = 0
        dbeta[:] = 0
    ORACLE["layernorm"].backward(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual)


def layernorm_forgets_the_residual(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, residual):
    ORACLE["layernorm"].backward(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd, gamma, None)


def layernorm_reads_the_residual_after_writing_dx(dx, dx_bf16, dgamma, dbeta, dy, x, mean, rstd,
                                                  gamma, residual):
    ORACLE["layernorm"].backward(dx, None, dgamma, dbeta, dy, x, mean, rstd, gamma, None)
    if residual is not None:
        dx += residual
    if dx_bf16 is not None:
        dx_bf16[:] = dx


def matmul_forgets_the_bias(y, pre_gelu, x, w, bias, *options):
    ORACLE["matmul"].forward(y, pre_gelu, x, w, None, *options)


def matmul_forgets_the_residual(y, pre_gelu, x, w, bias, residual, transpose_w):
    ORACLE["matmul"].forward(y, pre_gelu, x, w, bias, None, transpose_w)


def matmul_stores_gelu_in_pre_gelu(y, pre_gelu, *inputs):
    ORACLE["matmul"].forward(y, pre_gelu, *inputs)
    if pre_gelu is not None:
        pre_gelu[:] = y


def matmul_in_half_precision(y, pre_gelu, x, w, *options):
    x, w = (a.astype(np.float16).astype(np.float32) for a in (x, w))
    ORACLE["matmul"].forward(y, pre_gelu, x, w, *options)


def matmul_adds_to_dx(dx, *others):
    before = None if dx is None else dx.copy()
    ORACLE["matmul"].backward(dx, *others)
    if dx is not None:
        dx += before


def matmul_forgets_the_slope(dx, dw, dbias, dy, x, w, pre_gelu, transpose_w):
    ORACLE["matmul"].backward(dx, dw, dbias, dy, x, w, None, transpose_w)


def matmul_sets_dw(dx, dw, *others):
    dw[:] = 0
    ORACLE["matmul"].backward(dx, dw, *others)


def matmul_writes_past_the_end(y, *others):
    ORACLE["matmul"].forward(y, *others)
    np.lib.stride_tricks.as_strided(y, (y.size + 1,), (4,))[-1] = 0


def matmul_changes_an_input(y, pre_gelu, x, *others):
    ORACLE["matmul"].forward(y, pre_gelu, x, *others)
    x *= 2


def gelu_by_sigmoid(y, x):
    y[...] = x / (1 + np.exp(-1.702 * x))


def gelu_reads_dy_after_writing_dx(dx, dy, x):
    dx[...] = 0
    slope = np.empty_like(x)
    ORACLE["gelu"].backward(slope, np.ones_like(x), x)
    dx[...] = dy * slope


def attention_scaled_by_head_dim(out, lse, qkv):
    """1/D for 1/sqrt(D), by making q smaller."""
    d = out.shape[1]
    D = d // lse.shape[1]
    scaled = qkv.copy()
    scaled[:, :d] /= math.sqrt(D)
    ORACLE["attention"].forward(out, lse, scaled)


def attention_sees_the_future(out, lse, qkv):
    B, H, T = lse.shape
    q, k, v = qkv.reshape(B, T, 3, H, -1).transpose(2, 0, 3, 1, 4)
    s = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1])
    largest = s.max(axis=-1)
    lse[:] = np.log(np.exp(s - largest[..., None]).sum(axis=-1)) + largest
    out[:] = (np.exp(s - lse[..., None]) @ v).transpose(0, 2, 1, 3).reshape(out.shape)


def attention_swaps_heads(out, lse, qkv):
    ORACLE["attention"].forward(out, lse, qkv)
    B, H, T = lse.shape
    heads = out.reshape(B * T, H, -1)
    heads[:] = heads[:, ::-1].copy()


def attention_lse_in_base_2(out, lse, qkv):
    ORACLE["attention"].forward(out, lse, qkv)
    lse /= math.log(2)


def attention_forgets_delta(dqkv, dout, out, lse, qkv):
    ORACLE["attention"].backward(dqkv, dout, np.zeros_like(out), lse, qkv)


def attention_appends_at_the_start(k_cache, v_cache, qkv, start):
    ORACLE["attention"].append(k_cache, v_cache, qkv, None)


def attention_decodes_one_row_short(out, qkv, k_cache, v_cache, position):
    ORACLE["attention"].decode(out, qkv, k_cache, v_cache, np.maximum(position - 1, 0))


def attention_decodes_the_whole_cache(out, qkv, k_cache, v_cache, position):
    ORACLE["attention"].decode(out, qkv, k_cache, v_cache, [k_cache.shape[2] - 1])


def cross_entropy_reads_the_padding(losses, logits, targets, vocab_size):
    ORACLE["cross_entropy"].forward(losses, np.nan_to_num(logits), targets, logits.shape[1])


def cross_entropy_counts_ignored_rows(losses, logits, targets, vocab_size):
    ORACLE["cross_entropy"].forward(losses, logits, np.maximum(targets, 0), vocab_size)


def cross_entropy_without_the_maximum(losses, logits, targets, vocab_size):
    used = logits[:, :vocab_size]
    at_target = used[np.arange(len(targets)), targets]
    with np.errstate(over="ignore"):
        losses[:] = np.log(np.exp(used).sum(axis=1)) - at_target
    losses[targets == -1] = 0


def cross_entropy_forgets_the_scale(losses, dlogits, logits, targets, vocab_size, scale):
    ORACLE["cross_entropy"].backward(losses, dlogits, logits, targets, vocab_size, 1.0)


def cross_entropy_leaves_the_padding(losses, dlogits, logits, targets, vocab_size, scale):
    kept = dlogits[:, vocab_size:].copy()
    ORACLE["cross_entropy"].backward(losses, dlogits, logits, targets, vocab_size, scale)
    dlogits[:, vocab_size:] = kept


def cross_entropy_forgets_the_target(losses, dlogits, logits, targets, vocab_size, scale):
    ORACLE["cross_entropy"].backward(losses, dlogits, logits, targets, vocab_size, scale)
    counted = targets != -1
    dlogits[counted, targets[counted]] += scale


def adamw_without_bias_correction(weights, weights_bf16, m, v, grads, norm, rates, *options):
    ORACLE["adamw"].update(weights, weights_bf16, m, v, grads, norm, [rates[0], 1, 1], *options)


def adamw_decays_everything(weights, weights_bf16, m, v, grads, norm, rates, n_decay, *options):
    ORACLE["adamw"].update(weights, weights_bf16, m, v, grads, norm, rates, len(weights), *options)


def adamw_decays_through_the_gradient(weights, weights_bf16, m, v, grads, norm, rates, n_decay,
                                      beta1, beta2, eps, weight_decay, clip):
    coupled = grads.copy()
    coupled[:n_decay] += weight_decay * weights[:n_decay]
    ORACLE["adamw"].update(weights, weights_bf16, m, v, coupled, norm, rates, n_decay, beta1, beta2,
                           eps, 0.0, clip)


def adamw_decays_after_the_update(weights, weights_bf16, m, v, grads, norm, rates, n_decay,
                                  beta1, beta2, eps, weight_decay, clip):
    ORACLE["adamw"].update(weights, weights_bf16, m, v, grads, norm, rates, n_decay, beta1, beta2,
                           eps, 0.0, clip)
    weights[:n_decay] *= 1 - rates[0] * weight_decay


def adamw_ignores_the_norm(weights, weights_bf16, m, v, grads, norm, n_decay, *options):
    *options, _ = options
    ORACLE["adamw"].update(weights, weights_bf16, m, v, grads, norm, n_decay, *options, 0.0)


def adamw_updates_when_the_norm_is_not_finite(weights, weights_bf16, m, v, grads, norm, *options):
    finite = norm if np.isfinite(norm[0]) else np.ones_like(norm)
    ORACLE["adamw"].update(weights, weights_bf16, m, v, grads, finite, *options)


def grad_norm_without_the_root(norm, grads, previous):
    ORACLE["grad_norm"].forward(norm, grads, previous)
    norm **= 2


def grad_norm_drops_the_last_element(norm, grads, previous):
    ORACLE["grad_norm"].forward(norm, grads[:-1], previous)


def grad_norm_forgets_what_was_not_finite(norm, grads, previous):
    ORACLE["grad_norm"].forward(norm, grads, None)


def differs_between_calls(norm, grads, previous, calls=[0]):  # noqa: B006 (the state is the fault)
    ORACLE["grad_norm"].forward(norm, grads, previous)
    calls[0] += 1
    norm[0] = np.nextafter(norm[0], np.float32(calls[0] % 2 * 9e9))


# One control per line: op, function, wrong kernel, and a word of the fault it must be caught by.
CONTROLS = [
    ("embedding", "forward", embedding_ignores_start, "error"),
    ("embedding", "backward", embedding_sets_instead_of_adding, "dwte: error"),
    ("embedding", "backward", embedding_loses_repeated_ids, "dwte: error"),
    ("layernorm", "forward", layernorm_swaps_gamma_and_beta, "y: error"),
    ("layernorm", "forward", layernorm_forgets_eps, "rstd: error"),
    ("layernorm", "forward", layernorm_divides_by_d_minus_1, "rstd: error"),
    ("layernorm", "forward", layernorm_variance_in_one_pass, "error"),
    ("layernorm", "forward", layernorm_drops_the_last_row, "finite"),
    ("layernorm", "backward", layernorm_drops_the_last_row_of_dgamma, "dgamma: error"),
    ("layernorm", "backward", layernorm_forgets_the_path_through_rstd, "dx: error"),
    ("layernorm", "backward", layernorm_sets_instead_of_adding, "dgamma: error"),
    ("layernorm", "backward", layernorm_forgets_the_residual, "dx: error"),
    ("layernorm", "backward", layernorm_reads_the_residual_after_writing_dx, "with dx = residual"),
    ("matmul", "forward", matmul_forgets_the_bias, "y: error"),
    ("matmul", "forward", matmul_forgets_the_residual, "y: error"),
    ("matmul", "forward", matmul_stores_gelu_in_pre_gelu, "pre_gelu: error"),
    ("matmul", "forward", matmul_in_half_precision, "y: error"),
    ("matmul", "forward", matmul_writes_past_the_end, "memory beside"),
    ("matmul", "forward", matmul_changes_an_input, "input was changed"),
    ("matmul", "backward", matmul_adds_to_dx, "finite"),
    ("matmul", "backward", matmul_forgets_the_slope, "dx: error"),
    ("matmul", "backward", matmul_sets_dw, "dw: error"),
    ("gelu", "forward", gelu_by_sigmoid, "error"),
    ("gelu", "backward", gelu_reads_dy_after_writing_dx, "with dx = dy"),
    ("attention", "forward", attention_scaled_by_head_dim, "out: error"),
    ("attention", "forward", attention_sees_the_future, "out: error"),
    ("attention", "forward", attention_swaps_heads, "out: error"),
    ("attention", "forward", attention_lse_in_base_2, "lse: error"),
    ("attention", "backward", attention_forgets_delta, "dqkv: error"),
    ("attention", "append", attention_appends_at_the_start, "finite"),
    ("attention", "decode", attention_decodes_one_row_short, "error"),
    ("attention", "decode", attention_decodes_the_whole_cache, "finite"),
    ("cross_entropy", "forward", cross_entropy_reads_the_padding, "losses: error"),
    ("cross_entropy", "forward", cross_entropy_counts_ignored_rows, "losses: error"),
    ("cross_entropy", "forward", cross_entropy_without_the_maximum, "losses"),
    ("cross_entropy", "backward", cross_entropy_forgets_the_scale, "dlogits: error"),
    ("cross_entropy", "backward", cross_entropy_leaves_the_padding, "finite"),
    ("cross_entropy", "backward", cross_entropy_forgets_the_target, "dlogits: error"),
    ("adamw", "update", adamw_without_bias_correction, "weights: error"),
    ("adamw", "update", adamw_decays_everything, "weights: error"),
    ("adamw", "update", adamw_decays_through_the_gradient, "weights: error"),
    ("adamw", "update", adamw_decays_after_the_update, "weights: error"),
    ("adamw", "update", adamw_ignores_the_norm, "m: error"),
    ("adamw", "update", adamw_updates_when_the_norm_is_not_finite, "m: error"),
    ("grad_norm", "forward", grad_norm_without_the_root, "error"),
    ("grad_norm", "forward", grad_norm_drops_the_last_element, "error"),
    ("grad_norm", "forward", grad_norm_forgets_what_was_not_finite, "finite"),
    ("grad_norm", "forward", differs_between_calls, "other bits"),
]


def on_the_device(wrong):
    """A wrong kernel for device arrays: it is run on copies of the arrays and their guards."""
    from numba import cuda

    def implementation(*arguments):
        copies, host = {}, []
        for argument in arguments:
            if not isinstance(argument, DeviceArray):
                host.append(argument)
                continue
            guard = 4 * GUARD_WORDS
            place = argument.address - guard
            if place not in copies:  # an array given twice is one array here too
                whole = cuda.as_cuda_array(SimpleNamespace(__cuda_array_interface__={
                    "data": (place, False), "shape": (argument.nbytes + 2 * guard,),
                    "typestr": "|u1", "version": 3}))
                copy = whole.copy_to_host()
                stored = copy[guard:-guard].view(argument.dtype).reshape(argument.shape)
                # The oracle computes in the dtype it is given, and bfloat16 is for memory only.
                array = stored.astype(np.float32) if is_bf16(stored) else stored
                copies[place] = whole, copy, stored, array
            host.append(copies[place][-1])
        wrong(*host)
        for whole, copy, stored, array in copies.values():
            stored[...] = array
            whole.copy_to_device(copy)

    return implementation


@pytest.mark.parametrize(
    ("op", "name", "wrong", "fault"), CONTROLS, ids=[wrong.__name__ for _, _, wrong, _ in CONTROLS]
)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_comparison_refuses(op, name, wrong, fault, backend):
    if backend == "gpu":
        pytest.importorskip("numba_cuda")
        wrong = on_the_device(wrong)
    faults = [found for case in cases_of(load_spec(op), name)
              for found in verify(op, name, case, wrong, backend)]
    assert any(fault in found for found in faults), faults
