"""What is special about attention on the GPU: tiles, their boundaries, and shared memory."""

import numpy as np
import pytest
import vgpu

pytest.importorskip("numba_cuda")

from kernels.common.cuda import cuda
from kernels.registry import op_table

GPU = op_table("gpu").attention
ORACLE = op_table("oracle").attention


def at(position):
    return cuda.to_device(np.array([position], np.int32))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def forward(qkv, B, H, device=True):
    """out and lse of the GPU in float32, or of the oracle in float64."""
    out = np.full((len(qkv), qkv.shape[1] // 3), np.nan)
    lse = np.full((B, H, len(qkv) // B), np.nan)
    if not device:
        ORACLE.forward(out, lse, qkv.astype(np.float64))
        return out, lse
    arrays = [cuda.to_device(a.astype(np.float32)) for a in (out, lse, qkv)]
    GPU.forward(*arrays)
    return arrays[0].copy_to_host(), arrays[1].copy_to_host()


def backward(dout, out, lse, qkv):
    arrays = [cuda.to_device(a) for a in (np.full_like(qkv, np.nan), dout, out, lse, qkv)]
    GPU.backward(*arrays)
    return arrays[0].copy_to_host()


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129])
def test_lengths_around_the_tiles(length):
    """A sharp softmax shows a key that is missing or seen too early."""
    B, H, D = 2, 1, 32
    qkv = 2 * normal(B * length, 3 * H * D, seed=length)
    out, lse = forward(qkv, B, H)
    expected_out, expected_lse = forward(qkv, B, H, device=False)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=1e-4)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-4)
    dout = normal(B * length, H * D, seed=1)
    expected = np.empty((B * length, 3 * H * D))
    ORACLE.backward(expected, dout, expected_out, expected_lse, qkv.astype(np.float64))
    np.testing.assert_allclose(backward(dout, out, lse, qkv), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("D", [3, 32])
def test_the_lowest_scores_are_above_those_of_later_keys(D):
    """Scores of -1e32 and -2e32: the first key wins, and neither hidden keys nor padding count."""
    T, q = 5, 1e16 / D**0.25
    qkv = np.zeros((T, 3, D), np.float32)
    qkv[:, 0, 0], qkv[0, 1, 0], qkv[1:, 1, 0] = q, -q, -2 * q
    qkv[:, 2] = 1 + np.arange(T)[:, None]
    out, lse = forward(qkv.reshape(T, 3 * D), 1, 1)
    assert (out == 1).all()
    np.testing.assert_allclose(lse, -1e32 / D, rtol=1e-5)
    caches = [cuda.to_device(qkv[None, None, :, part].copy()) for part in (1, 2)]
    out = cuda.to_device(np.zeros((1, D), np.float32))
    GPU.decode(out, cuda.to_device(qkv[:1].reshape(1, 3 * D)), *caches, at(3))
    assert (out.copy_to_host() == 1).all()


@pytest.mark.parametrize("changed", [31, 32, 63, 64, 65])
def test_the_past_does_not_see_the_future(changed):
    """Neither forward nor backward: other later tokens leave earlier results as they are."""
    T, H, D = 67, 2, 20
    qkv, dout = normal(T, 3 * H * D), normal(T, H * D, seed=1)
    other = qkv.copy()
    other[changed:] = 100
    silent = dout.copy()
    silent[changed:] = 0
    results = []
    for tokens in (qkv, other):
        out, lse = forward(tokens, 1, H)
        results.append((out, lse[..., :changed], backward(silent, out, lse, tokens)))
    for before, after in zip(*results, strict=True):
        rows = slice(None) if before.ndim == 3 else slice(0, changed)
        assert before[rows].tobytes() == after[rows].tobytes()
    assert (results[0][2][changed:] == 0).all()


def test_nan_reaches_the_tokens_that_see_it():
    B, T, H, D = 2, 70, 3, 10
    qkv = normal(B * T, 3 * H * D)
    qkv.reshape(B, T, 3, H, D)[0, 40, 1, 1] = np.nan  # one key of sequence 0, head 1
    out, lse = forward(qkv, B, H)
    out = out.reshape(B, T, H, D)
    assert np.isnan(out[0, 40:, 1]).all() and np.isnan(lse[0, 1, 40:]).all()
    out[0, 40:, 1] = lse[0, 1, 40:] = 0
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("size", [1e3, -1e3])
def test_huge_equal_scores_are_averaged(size):
    T, D = 70, 10
    qkv = normal(T, 3 * D)
    qkv[:, :D], qkv[:, D : 2 * D] = size, 1
    out, lse = forward(qkv, 1, 1)
    positions = np.arange(1, T + 1)
    means = np.cumsum(qkv[:, 2 * D :].astype(np.float64), axis=0) / positions[:, None]
    np.testing.assert_allclose(out, means, atol=1e-4)
    np.testing.assert_allclose(lse[0, 0], size * np.sqrt(D) + np.log(positions), rtol=1e-6)


@pytest.mark.parametrize("D", [5, 32, 36, 64, 128])
def test_decoding_with_the_cache_equals_the_last_row_of_forward(D):
    B, T, H = 2, 69, 2
    d = H * D
    qkv = normal(B * T, 3 * d, seed=D).reshape(B, T, 3 * d)
    full, _ = forward(qkv.reshape(B * T, 3 * d), B, H)
    k_cache = cuda.to_device(np.full((B, H, T + 3, D), np.nan, np.float32))
    v_cache = cuda.to_device(np.full((B, H, T + 3, D), np.nan, np.float32))
    prompt = cuda.to_device(qkv[:, : T - 1].reshape(B * (T - 1), 3 * d))
    token = cuda.to_device(np.ascontiguousarray(qkv[:, T - 1]))
    out = cuda.to_device(np.full((B, d), np.nan, np.float32))
    GPU.append(k_cache, v_cache, prompt, None)
    GPU.append(k_cache, v_cache, token, at(T - 1))
    GPU.decode(out, token, k_cache, v_cache, at(T - 1))
    np.testing.assert_allclose(out.copy_to_host(), full.reshape(B, T, d)[:, -1], rtol=1e-5,
                               atol=1e-6)
    keys = k_cache.copy_to_host()
    expected = qkv[:, :, d : 2 * d].reshape(B, T, H, D).transpose(0, 2, 1, 3)
    assert keys[:, :, :T].tobytes() == np.ascontiguousarray(expected).tobytes()
    assert np.isnan(keys[:, :, T:]).all()


def test_a_later_gradient_of_the_same_shape_gets_the_same_bits():
    """Scratch memory that still holds another call's delta must not matter."""
    B, T, H, D = 1, 66, 2, 12
    qkv, other = normal(T, 3 * H * D), normal(T, 3 * H * D, seed=1)
    dout = normal(T, H * D, seed=2)
    first = backward(dout, *forward(qkv, B, H), qkv)
    backward(-dout, *forward(other, B, H), other)
    assert backward(dout, *forward(qkv, B, H), qkv).tobytes() == first.tobytes()


def test_a_head_that_is_too_wide_is_refused():
    arrays = [cuda.device_array(shape, np.float32) for shape in [(1, 129), (1, 1, 1), (1, 387)]]
    with pytest.raises(ValueError, match="head_dim 129 is more than the 128 columns"):
        GPU.forward(*arrays)


@pytest.mark.parametrize("position", [-1, 3, 2**31 - 1])
def test_positions_outside_the_cache_do_no_harm(position):
    token, cache = (cuda.to_device(np.ones(shape, np.float32)) for shape in [(1, 12), (1, 1, 3, 4)])
    out = cuda.to_device(np.zeros((1, 4), np.float32))
    GPU.append(cache, cache, cuda.to_device(np.zeros((1, 12), np.float32)), at(position))
    assert (cache.copy_to_host() == 1).all()
    GPU.decode(out, token, cache, cache, at(position))
    assert np.isnan(out.copy_to_host()).all()


def test_more_tokens_than_the_cache_holds_are_refused():
    tokens, cache = (cuda.device_array(shape, np.float32) for shape in [(4, 12), (1, 1, 3, 4)])
    with pytest.raises(ValueError, match="4 positions do not fit a key/value cache of 3"):
        GPU.append(cache, cache, tokens, None)


@pytest.mark.skipif(not vgpu.installed(), reason="bank conflicts are counted on the virtual GPU")
@pytest.mark.parametrize("D", [32, 64, 128])
def test_shared_memory_without_bank_conflicts_and_launches_without_waste(D):
    T = 65
    qkv, dout = normal(T, 3 * D), normal(T, D, seed=1)
    vgpu.forget_launches()
    with vgpu.options(count=True):
        out, lse = forward(qkv, 1, 1)
        backward(dout, out, lse, qkv)
    launches = vgpu.launches()
    assert len(launches) == 3
    for launch in launches:
        sites = launch.statistics.sites
        wavefronts = [site for site in sites if site.space == "shared"]
        used, ideal = (sum(getattr(s, kind) for s in wavefronts) for kind in ("used", "ideal"))
        assert used <= 1.03 * ideal, launch.kernel
        vectors = [site for site in sites if site.space == "global" and ".v4" in site.text]
        assert vectors and sum(site.used for site in vectors) == sum(s.ideal for s in vectors)
