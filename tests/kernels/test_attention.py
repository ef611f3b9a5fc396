"""What is special about attention: causality, the cache, and scores of any size."""

import ml_dtypes
import numpy as np
import pytest
from helpers import guarded_scratch

from kernels.attention import cpu_blas, cpu_vector, cpu_vector_backward
from kernels.common.cpu_features import BF16, VECTORS
from kernels.common.host_array import aligned_zeros
from kernels.common.spec import cases_of
from kernels.common.verify import verify
from kernels.registry import load_spec, op_table

TABLES = {"oracle": op_table("oracle").attention, "cpu": op_table("cpu").attention}
needs_bf16 = pytest.mark.skipif(not BF16, reason="no products of bfloat16 here")
B, T, H, D = 2, 37, 3, 10
d = H * D


@pytest.fixture(params=TABLES)
def attention(request):
    return TABLES[request.param]


def at(position):
    return np.array([position], np.int32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def forward(attention, qkv, n_sequences=B):
    length = len(qkv) // n_sequences
    out = np.full((len(qkv), d), np.nan, np.float32)
    lse = np.full((n_sequences, H, length), np.nan, np.float32)
    attention.forward(out, lse, qkv)
    return out, lse


@pytest.mark.parametrize("changed", [0, 1, 17, T - 1])
def test_the_past_does_not_see_the_future(attention, changed):
    """Changing token `changed` leaves the output of earlier tokens as it was, bit for bit."""
    qkv = normal(B * T, 3 * d)
    before, _ = forward(attention, qkv)
    after_qkv = qkv.copy()
    after_qkv.reshape(B, T, 3 * d)[:, changed] = 100
    after, _ = forward(attention, after_qkv)
    before, after = before.reshape(B, T, d), after.reshape(B, T, d)
    assert before[:, :changed].tobytes() == after[:, :changed].tobytes()
    assert (before[:, changed:] != after[:, changed:]).any(axis=(0, 2)).all()


def test_a_gradient_reaches_no_later_token(attention):
    qkv = normal(B * T, 3 * d)
    out, lse = forward(attention, qkv)
    dout = np.zeros((B, T, d), np.float32)
    dout[:, :10] = 1
    dqkv = np.full_like(qkv, np.nan)
    attention.backward(dqkv, dout.reshape(B * T, d), out, lse, qkv)
    dqkv = dqkv.reshape(B, T, 3 * d)
    assert (dqkv[:, 10:] == 0).all()
    assert np.abs(dqkv[:, :10]).sum() > 0


def test_the_first_token_attends_to_itself_alone(attention):
    qkv = normal(B * T, 3 * d)
    out, _ = forward(attention, qkv)
    values = qkv.reshape(B, T, 3 * d)[:, 0, 2 * d :]
    np.testing.assert_allclose(out.reshape(B, T, d)[:, 0], values, rtol=1e-6)


@pytest.mark.parametrize("size", [1e3, -1e3])
def test_huge_equal_scores_are_averaged(attention, size):
    """q · k = size for every pair: each softmax is uniform (exp without the maximum fails)."""
    qkv = normal(B * T, 3 * d)
    qkv[:, :d] = size
    qkv[:, d : 2 * d] = 1
    out, lse = forward(attention, qkv)
    values = qkv.reshape(B, T, 3 * d)[:, :, 2 * d :].astype(np.float64)
    means = np.cumsum(values, axis=1) / np.arange(1, T + 1)[:, None]
    np.testing.assert_allclose(out.reshape(B, T, d), means, atol=1e-4)
    expected = size * np.sqrt(D) + np.log(np.arange(1, T + 1))
    np.testing.assert_allclose(lse, np.broadcast_to(expected, lse.shape), rtol=1e-6)


@pytest.mark.parametrize("length", [T, 70])
@pytest.mark.parametrize("size", [1e32, 1e35])
def test_the_lowest_scores_are_above_those_of_later_keys(attention, length, size):
    """Scores of -size and -2 * size: the first key wins; no later key counts, no padding."""
    q = size**0.5 / D**0.25
    qkv = np.zeros((length, 3, H, D), np.float32)
    qkv[:, 0, :, 0], qkv[0, 1, :, 0], qkv[1:, 1, :, 0] = q, -q * D, -2 * q * D
    qkv[:, 2] = 1 + np.arange(length)[:, None, None]
    out, lse = forward(attention, qkv.reshape(length, 3 * d), n_sequences=1)
    assert (out == 1).all()
    np.testing.assert_allclose(lse, -size, rtol=1e-5)
    k_cache, v_cache = (qkv[None, :, part].transpose(0, 2, 1, 3).copy() for part in (1, 2))
    out = np.full((1, d), np.nan, np.float32)
    attention.decode(out, qkv[:1].reshape(1, 3 * d), k_cache, v_cache, at(length - 1))
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def test_nan_reaches_the_tokens_that_see_it(attention):
    qkv = normal(B * T, 3 * d)
    qkv.reshape(B, T, 3, H, D)[0, 20, 1, 1] = np.nan  # one key of sequence 0, head 1
    out, _ = forward(attention, qkv)
    out = out.reshape(B, T, H, D)
    assert np.isnan(out[0, 20:, 1]).all()
    out[0, 20:, 1] = 0
    assert np.isfinite(out).all()


@pytest.mark.parametrize("prompt", [1, 7, T - 1])
def test_decoding_with_the_cache_equals_full_attention(attention, prompt):
    """Append a prompt at once, then one token at a time: every output as in one full forward."""
    qkv = normal(B * T, 3 * d).reshape(B, T, 3 * d)
    full, _ = forward(attention, qkv.reshape(B * T, 3 * d))
    full = full.reshape(B, T, d)
    k_cache = np.full((B, H, T + 3, D), np.nan, np.float32)
    v_cache = k_cache.copy()
    chunk = np.ascontiguousarray(qkv[:, :prompt]).reshape(B * prompt, 3 * d)
    attention.append(k_cache, v_cache, chunk, None)
    for position in range(prompt, T):
        token = np.ascontiguousarray(qkv[:, position])
        attention.append(k_cache, v_cache, token, at(position))
        out = np.full((B, d), np.nan, np.float32)
        attention.decode(out, token, k_cache, v_cache, at(position))
        np.testing.assert_allclose(out, full[:, position], rtol=1e-5, atol=1e-6)
    keys = qkv[:, :, d : 2 * d].reshape(B, T, H, D).transpose(0, 2, 1, 3)
    assert k_cache[:, :, :T].tobytes() == np.ascontiguousarray(keys).tobytes()
    assert np.isnan(k_cache[:, :, T:]).all() and np.isnan(v_cache[:, :, T:]).all()


def test_a_cache_in_bfloat16_beside_float32():
    """Rows are rounded to nearest even, and then as good as float32 ones of these numbers."""
    qkv = normal(B * 3, 3 * d)
    caches = [np.full((B, H, 5, D), np.nan, dtype) for dtype in
              (np.float32, np.float32, ml_dtypes.bfloat16, ml_dtypes.bfloat16)]
    rounded = qkv.astype(ml_dtypes.bfloat16).astype(np.float32)
    TABLES["cpu"].append(*caches[:2], rounded, at(1))
    TABLES["cpu"].append(*caches[2:], qkv, at(1))
    for exact, stored in zip(caches[:2], caches[2:], strict=True):
        assert np.array_equal(exact, stored.astype(np.float32), equal_nan=True)
        exact[:, :, 0], stored[:, :, 0] = 1, 1
    outs = np.full((2, B, d), np.nan, np.float32)
    query = np.ascontiguousarray(qkv[:B])
    for out, pair in zip(outs, (caches[:2], caches[2:]), strict=True):
        TABLES["cpu"].decode(out, query, *pair, at(3))
    assert outs[0].tobytes() == outs[1].tobytes()


@pytest.mark.skipif(not VECTORS, reason="no vectors that kernels use")
@pytest.mark.parametrize(("name", "module"),
                         [("forward", cpu_vector), ("backward", cpu_vector_backward)])
def test_scratch_is_not_read_or_written_beyond_its_end(name, module, monkeypatch):
    with guarded_scratch(monkeypatch, module):
        for case in cases_of(load_spec("attention"), name, "cpu"):
            assert verify("attention", name, case, getattr(module, name)) == []


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_numpy_computes_it_where_there_are_no_vectors(name):
    for case in cases_of(load_spec("attention"), name):
        if "precision" not in case:
            assert verify("attention", name, case, getattr(cpu_blas, name)) == []


@pytest.mark.skipif(not VECTORS, reason="no vectors that kernels use")
def test_many_heads_are_taken_some_at_a_time(monkeypatch):
    """Their keys and values are packed for as many at once as PACKED allows, or for each thread."""
    out, lse = forward(op_table("cpu").attention, normal(B * T, 3 * d))
    monkeypatch.setattr(cpu_vector, "PACKED", 1)
    some_out, some_lse = forward(op_table("cpu").attention, normal(B * T, 3 * d))
    assert out.tobytes() == some_out.tobytes() and lse.tobytes() == some_lse.tobytes()


@pytest.mark.skipif(not VECTORS, reason="no vectors that kernels use")
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=needs_bf16)])
@pytest.mark.parametrize("width", [16, 48, 24])  # of a head: whole vectors, and not
def test_outputs_that_do_not_begin_with_a_cache_line_get_the_same_bits(width, precision):
    """Whole vectors are written past the caches, where they do."""
    dtype = np.float32 if precision == "fp32" else ml_dtypes.bfloat16
    attention, row = TABLES["cpu"], H * width
    qkv, dout = normal(B * T, 3 * row).astype(dtype), normal(B * T, row, seed=1).astype(dtype)
    lse = np.empty((B, H, T), np.float32)
    results = []
    for shift in (0, 1):
        out, out_guards = shifted(B * T, row, dtype, shift)
        dqkv, dqkv_guards = shifted(B * T, 3 * row, dtype, shift)
        attention.forward(out, lse, qkv)
        attention.backward(dqkv, dout, out, lse, qkv)
        assert (out_guards() == 7).all() and (dqkv_guards() == 7).all()
        results.append((out.tobytes(), dqkv.tobytes()))
    assert results[0] == results[1]


def shifted(rows, columns, dtype, shift):
    """An array `shift` elements behind a cache line; what gives the sevens around it."""
    flat, size = aligned_zeros(rows * columns + 64, dtype), rows * columns
    flat[:] = 7
    return (flat[shift:shift + size].reshape(rows, columns),
            lambda: np.concatenate([flat[:shift], flat[shift + size:]]))


@pytest.mark.skipif(not VECTORS, reason="no vectors that kernels use")
def test_nan_in_values_to_come_reaches_no_gradient_of_the_past():
    """On the diagonal a tile computes scores that no query may see."""
    qkv = normal(B * T, 3 * d)
    out, lse = forward(op_table("cpu").attention, qkv)
    dout, dqkv = normal(B * T, d, seed=1), np.full_like(qkv, np.nan)
    qkv.reshape(B, T, 3, d)[0, T - 1, 2] = np.nan
    op_table("cpu").attention.backward(dqkv, dout, out, lse, qkv)
    assert np.isfinite(dqkv.reshape(B, T, 3, d)[0, :T - 1, 0]).all()
