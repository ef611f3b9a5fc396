"""Attention in bf16 on the tensor cores: tiles and edges, memory accesses, and its barriers."""

import re

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

import vgpu
from ml_dtypes import bfloat16

from kernels.attention import gpu_tensor, gpu_tensor_backward
from kernels.attention.gpu_tensor_tile import THREADS, make_tensor_functions
from kernels.common.unroll import unroll, unrolled
from kernels.common.verify import download, upload
from kernels.registry import op_table

GPU = op_table("gpu").attention
ORACLE = op_table("oracle").attention
virtual = pytest.mark.skipif(not vgpu.installed(), reason="counted by the virtual GPU only")


def normal(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(bfloat16)


def at(position):
    return np.array([position], np.int32)


def run(name, *arrays):
    """The arrays after a call of the GPU's function."""
    memory = [upload(array, "gpu") for array in arrays]
    getattr(GPU, name)(*memory)
    return [array if array is None else download(array, "gpu") for array in memory]


def forward(qkv, B, H):
    """out and lse of the GPU."""
    out = np.full((len(qkv), qkv.shape[1] // 3), np.nan, bfloat16)
    out, lse, _ = run("forward", out, np.full((B, H, len(qkv) // B), np.nan, np.float32), qkv)
    return out.astype(np.float32), lse


def backward(dout, out, lse, qkv):
    out = out.astype(bfloat16)
    return run("backward", np.full_like(qkv, np.nan), dout, out, lse, qkv)[0].astype(np.float32)


def expected(qkv, dout, B, H):
    """out, lse and dqkv of the oracle in float64; its out is rounded before it goes back."""
    exact = qkv.astype(np.float64)
    out, lse = np.empty(dout.shape), np.empty((B, H, len(qkv) // B))
    ORACLE.forward(out, lse, exact)
    dqkv = np.empty(qkv.shape)
    ORACLE.backward(dqkv, dout.astype(np.float64), out.astype(bfloat16).astype(np.float64), lse,
                    exact)
    return out, lse, dqkv


def check_against_the_oracle(B, T, H, D, scale=1.0):
    """Errors stay below two roundings of the largest element; a sum over float32 is nearer."""
    qkv = normal(B * T, 3 * H * D, seed=T, scale=scale)
    dout = normal(B * T, H * D, seed=1)
    right_out, right_lse, right_dqkv = expected(qkv, dout, B, H)
    out, lse = forward(qkv, B, H)
    assert np.abs(out - right_out).max() <= 2**-7 * np.abs(right_out).max()
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=2e-5)
    dqkv = backward(dout, out, lse, qkv)
    assert np.abs(dqkv - right_dqkv).max() <= 2**-7 * np.abs(right_dqkv).max()


@pytest.mark.parametrize("T", [1, 2, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 200])
def test_lengths_around_the_tiles(T):
    """A sharp softmax shows a key that is missing or seen too early."""
    with vgpu.options(global_race=True):
        check_against_the_oracle(1, T, 1, 64, scale=1.5)


@pytest.mark.parametrize("D", [1, 8, 11, 24, 32, 33, 72, 100, 128])
def test_every_width_of_a_head(D):
    """What does not divide by 8 goes by way of wider rows."""
    check_against_the_oracle(2, 67, 2, D)


def test_rows_at_any_address():
    """An array that begins 2 bytes after a multiple of 16 gives the same bits."""
    T, H, D = 66, 2, 64
    qkv, dout = normal(T, 3 * H * D), normal(T, H * D, seed=1)
    out, lse = forward(qkv, 1, H)
    dqkv = backward(dout, out, lse, qkv)

    def moved(array):
        memory = upload(np.concatenate([np.zeros(1, array.dtype), array.ravel()]), "gpu")
        return memory, memory[1:].reshape(array.shape)

    places = [moved(a) for a in (np.empty_like(dout), np.empty_like(qkv), dout, qkv)]
    on_out, on_dqkv, on_dout, on_qkv = (view for _, view in places)
    on_lse = upload(np.empty_like(lse), "gpu")
    GPU.forward(on_out, on_lse, on_qkv)
    GPU.backward(on_dqkv, on_dout, on_out, on_lse, on_qkv)
    assert (download(places[0][0], "gpu")[1:] == out.ravel().astype(bfloat16)).all()
    assert (download(places[1][0], "gpu")[1:] == dqkv.ravel().astype(bfloat16)).all()
    assert (download(on_lse, "gpu") == lse).all()


@pytest.mark.parametrize("D", [32, 128])
def test_the_lowest_scores_are_above_those_of_later_keys(D):
    """Scores of -1e32 and -2e32: the first key wins, and neither hidden keys nor padding count."""
    T, q = 5, 1e16 / D**0.25
    qkv = np.zeros((T, 3, D), bfloat16)
    qkv[:, 0, 0], qkv[0, 1, 0], qkv[1:, 1, 0] = q, -q, -2 * q
    qkv[:, 2] = 1 + np.arange(T)[:, None]
    out, lse = forward(qkv.reshape(T, 3 * D), 1, 1)
    assert (out == 1).all()
    score = float(qkv[0, 0, 0]) * float(qkv[0, 1, 0]) / D**0.5
    np.testing.assert_allclose(lse, score, rtol=1e-6)
    caches = [np.ascontiguousarray(qkv[None, None, :, part]) for part in (1, 2)]
    token = np.ascontiguousarray(qkv[:1].reshape(1, 3 * D))
    out = run("decode", np.zeros((1, D), bfloat16), token, *caches, at(3))[0]
    assert (out == 1).all()


@pytest.mark.parametrize("size", [1e3, -1e3, 1e18, -1e18])
def test_huge_equal_scores_are_averaged(size):
    """q · k = size for every pair: each softmax is uniform, whatever rounding does to the scale."""
    T, D = 70, 32
    qkv = normal(T, 3 * D)
    qkv[:, :D], qkv[:, D : 2 * D] = size, 1
    out, lse = forward(qkv, 1, 1)
    positions = np.arange(1, T + 1)
    means = np.cumsum(qkv[:, 2 * D :].astype(np.float64), axis=0) / positions[:, None]
    np.testing.assert_allclose(out, means, atol=2**-7)
    score = float(bfloat16(size)) * np.sqrt(D)
    np.testing.assert_allclose(lse[0, 0], score + np.log(positions), rtol=1e-6)


def test_nan_reaches_the_tokens_that_see_it():
    B, T, H, D = 2, 70, 3, 16
    qkv = normal(B * T, 3 * H * D)
    qkv.reshape(B, T, 3, H, D)[0, 40, 1, 1] = np.nan  # one key of sequence 0, head 1
    out, lse = forward(qkv, B, H)
    out = out.reshape(B, T, H, D)
    assert np.isnan(out[0, 40:, 1]).all() and np.isnan(lse[0, 1, 40:]).all()
    out[0, 40:, 1] = lse[0, 1, 40:] = 0
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("changed", [31, 63, 64, 127, 128])
def test_the_past_does_not_see_the_future(changed):
    """Neither forward nor backward: other later tokens leave earlier results as they are."""
    T, H, D = 131, 1, 32
    qkv, dout = normal(T, 3 * H * D), normal(T, H * D, seed=1)
    other, silent = qkv.copy(), dout.copy()
    other[changed:], silent[changed:] = 100, 0
    results = []
    for tokens in (qkv, other):
        out, lse = forward(tokens, 1, H)
        dqkv = backward(silent, out, lse, tokens)
        assert (dqkv[changed:] == 0).all()
        results.append((out[:changed], lse[..., :changed], dqkv[:changed]))
    for before, after in zip(*results, strict=True):
        assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("D", [32, 12])
def test_a_later_gradient_of_the_same_shape_gets_the_same_bits(D):
    """Scratch memory that still holds another call's rows must not matter."""
    T, H = 66, 2
    qkv, other = normal(T, 3 * H * D), normal(T, 3 * H * D, seed=1)
    dout = normal(T, H * D, seed=2)
    first = backward(dout, *forward(qkv, 1, H), qkv)
    backward(-dout, *forward(other, 1, H), other)
    assert backward(dout, *forward(qkv, 1, H), qkv).tobytes() == first.tobytes()


@pytest.mark.parametrize("D", [5, 32, 36, 64, 128])
def test_decoding_with_the_cache_equals_the_last_row_of_forward(D):
    """But for the rounding of p, which decoding keeps in float32."""
    B, T, H = 2, 69, 2
    d = H * D
    qkv = normal(B * T, 3 * d, seed=D).reshape(B, T, 3 * d)
    full, _ = forward(qkv.reshape(B * T, 3 * d), B, H)
    caches = [np.full((B, H, T + 3, D), np.nan, bfloat16) for _ in range(2)]
    prompt = np.ascontiguousarray(qkv[:, : T - 1]).reshape(B * (T - 1), 3 * d)
    token = np.ascontiguousarray(qkv[:, T - 1])
    caches = run("append", *caches, prompt, None)[:2]
    k_cache, v_cache = run("append", *caches, token, at(T - 1))[:2]
    out = run("decode", np.full((B, d), np.nan, bfloat16), token, k_cache, v_cache, at(T - 1))[0]
    last = full.reshape(B, T, d)[:, -1]
    np.testing.assert_allclose(out.astype(np.float32), last, rtol=2**-6, atol=2**-8)
    for cache, part in ((k_cache, 1), (v_cache, 2)):
        rows = qkv.reshape(B, T, 3, H, D)[:, :, part].transpose(0, 2, 1, 3)
        assert cache[:, :, :T].tobytes() == np.ascontiguousarray(rows).tobytes()
        assert np.isnan(cache[:, :, T:].astype(np.float32)).all()


@pytest.mark.parametrize("position", [-1, 3, 2**31 - 1])
def test_positions_outside_the_cache_do_no_harm(position):
    token, cache = np.zeros((1, 24), bfloat16), np.ones((1, 1, 3, 8), bfloat16)
    assert (run("append", cache, cache.copy(), token, at(position))[0] == 1).all()
    out = run("decode", np.zeros((1, 8), bfloat16), token, cache, cache.copy(), at(position))[0]
    assert np.isnan(out.astype(np.float32)).all()


def test_a_head_that_is_too_wide_is_refused():
    arrays = [np.zeros((1, 129), bfloat16), np.zeros((1, 1, 1), np.float32),
              np.zeros((1, 387), bfloat16)]
    with pytest.raises(ValueError, match="head_dim 129 is more than the 128 columns"):
        run("forward", *arrays)


@virtual
@pytest.mark.parametrize("D", [32, 64, 128])
def test_no_bank_conflict_and_no_sector_too_many(D):
    """Whole tiles: of rows that are not there copies read nothing, which would count as waste."""
    T = 128
    qkv, dout = normal(T, 3 * D), normal(T, D, seed=1)
    vgpu.forget_launches()
    with vgpu.options(count=True):
        backward(dout, *forward(qkv, 1, 1), qkv)
    launches = vgpu.launches()
    assert [launch.kernel for launch in launches] == ["forward", "backward_queries",
                                                      "backward_keys"]
    for launch in launches:
        sites = launch.statistics.sites
        assert [s for s in sites if s.space == "shared" and s.used != s.ideal] == []
        wide = [s for s in sites if s.space == "global" and re.search(r"cp\.async|\.v4", s.text)]
        assert wide and [s for s in wide if s.used != s.ideal] == []


def test_loops_are_written_out_with_their_numbers():
    rows, columns = 2, 3

    @unrolled
    def add(sums, values):
        for i in unroll(rows):
            for j in unroll(columns + i):
                sums[columns * i + j] += values[2 * i] * columns
            for j in range(i):
                sums[j] -= 1

    sums = [0] * 7
    add.py_func(sums, [1, 2, 3])
    assert sums == [2, 3, 3, 9, 9, 9, 9]
    assert "unroll" not in add.py_func.__code__.co_names
    assert add.py_func.__code__.co_firstlineno > 1, "errors name the line of the source"


def compiled(kernel):
    """The PTX text and the kernel's name in it."""
    library = kernel.dispatcher.compile(kernel.signature.args)._codelibrary
    return library.get_cubin().ptx, library._entry_name


@virtual
@pytest.mark.parametrize(("kernel", "products", "fragments", "exponentials"), [
    # q·kᵀ and p·v of two row tiles; fragments of q, then of k and v; p, and a factor for each row
    (gpu_tensor._FORWARD[64], 128, 8 + 32, 64 + 4),
    (gpu_tensor_backward._QUERIES[64], 96, 8 + 48, 32),
    (gpu_tensor_backward._KEYS[64], 128, 8 + 64, 32),
])
def test_instructions_of_a_turn(kernel, products, fragments, exponentials):
    """All loops over fragments are written out, and no product is computed twice."""
    text, _ = compiled(kernel)
    assert text.count("mma.sync") == products
    assert text.count("ldmatrix.sync") == fragments
    assert text.count("ex2.approx") == exponentials
    assert ".local" not in text


# Three tiles of keys for the last queries, and three of queries for the first keys: the last one
# lies in the first stage, whose memory the results then go through.
T, D = 130, 32
SUBJECTS = {
    "forward": gpu_tensor._FORWARD[D],
    "backward_queries": gpu_tensor_backward._QUERIES[D],
    "backward_keys": gpu_tensor_backward._KEYS[D],
}


def problem(subject):
    """(grid, dynamic shared memory, arguments, {argument: what it holds afterwards})."""
    qkv, dout = normal(T, 3 * D), normal(T, D, seed=1)
    out, lse, dqkv = expected(qkv, dout, 1, 1)
    bits = [a.astype(bfloat16).view(np.uint16) for a in (dout, out, qkv)]
    sizes = np.int32(T), np.int32(1), np.int32(D)
    result = np.full(dqkv.shape, np.nan, bfloat16).view(np.uint16)
    scale, lse = 1 / np.sqrt(D), lse.astype(np.float32)
    if subject == "forward":
        tiles = make_tensor_functions(D, *gpu_tensor.SHAPES[D])
        arguments = [np.full_like(bits[1], result[0, 0]), np.full_like(lse, np.nan), bits[2],
                     *sizes, np.float32(scale * np.log2(np.e))]
        shared = tiles.stationary_bytes + 4 * tiles.streamed_bytes
        return 2, shared, arguments, {0: (out, slice(None)), 1: (lse, slice(None))}
    rows = 3 * gpu_tensor_backward.ROWS
    statistics = np.full((rows, 2), [gpu_tensor_backward.NOT_THERE, 0], np.float32)
    statistics[:T, 0] = lse[0, 0] * np.log2(np.e)
    statistics[:T, 1] = -(dout.astype(np.float64) * out.astype(bfloat16).astype(np.float64)).sum(1)
    shared = gpu_tensor_backward._memory_bytes(D, 64)
    if subject == "backward_queries":
        arguments = [result, np.full_like(statistics, np.nan), *bits[:2], lse, bits[2], *sizes,
                     np.float32(scale)]
        return 3, shared, arguments, {0: (dqkv, slice(0, D)), 1: (statistics, slice(None))}
    arguments = [result, bits[0], statistics, bits[2], *sizes, np.float32(scale)]
    shared += 2 * 64 * gpu_tensor_backward.STATISTICS_BYTES
    return 3, shared, arguments, {0: (dqkv, slice(D, None))}


def symptom(text, name, subject):
    """What a run of damaged code shows: a report, a wrong result, or ""."""
    grid, shared, arguments, results = problem(subject)
    try:
        vgpu.run_ptx(text, name, grid, THREADS, arguments, dynamic_shared=shared)
    except vgpu.VirtualGPUError as error:
        return error.kind
    for number, (right, columns) in results.items():
        found = arguments[number]
        if found.dtype == np.uint16:
            found = found.view(bfloat16).astype(np.float32)
        error = np.abs(found - right)[..., columns]
        if not error.max() <= 2**-7 * np.abs(right)[np.abs(right) < 1e38].max():
            return "wrong result"
    return ""


@virtual
@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_barrier_and_wait_is_needed(subject):
    text, name = compiled(SUBJECTS[subject])
    assert symptom(text, name, subject) == ""
    lines = text.splitlines()
    places = [i for i, line in enumerate(lines)
              if re.search(r"bar(rier)?\.(cta\.)?(sync|warp\.sync)|cp\.async\.wait_group", line)]
    assert len(places) >= 5
    survivors = [lines[place] for place in places
                 if not symptom("\n".join([*lines[:place], *lines[place + 1:]]), name, subject)]
    assert survivors == []
