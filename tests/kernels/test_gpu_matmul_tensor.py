"""The linear layer on the tensor cores: exact sums, edges, memory accesses, and its barriers."""

import itertools
import re

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

import vgpu
from ml_dtypes import bfloat16

from kernels.common.cuda import address
from kernels.common.verify import download, upload
from kernels.matmul import gpu, gpu_bf16, oracle
from kernels.matmul.gpu_bf16 import LARGE, SMALL
from kernels.matmul.gpu_epilogue import PLAIN
from kernels.matmul.gpu_tensor import ROWS, shared_bytes

virtual = pytest.mark.skipif(not vgpu.installed(), reason="counted by the virtual GPU only")
BIG, MEDIUM, ODD = (LARGE, True), (SMALL, True), (SMALL, False)


def integers(seed, *shape, dtype=bfloat16):
    """Small whole numbers: sums of their products are exact in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def wide(array):
    return array.astype(np.float32)


def device(array):
    return None if array is None else upload(array, "gpu")


def nans(*shape, dtype=bfloat16):
    return device(np.full(shape, np.nan, dtype))


def host(array):
    """What a device array holds, as float32."""
    return wide(download(array, "gpu"))


def rounded(array):
    """An array of float32 as bf16 stores it."""
    return wide(array.astype(bfloat16))


def stored(w, transpose):
    return np.ascontiguousarray(w.T) if transpose else w


def tiles(rows, columns, size):
    return -(-rows // ROWS) * -(-columns // size)


def launch_linear(kind, transpose_w, x, w):
    """y = x·w, by the tiles of one kind; x and w are on the host, w [K, N]."""
    (M, K), N = x.shape, w.shape[1]
    y = nans(M, N)
    gpu_bf16._linears[transpose_w, *kind].launch(
        tiles(M, N, kind[0]), y, y, None, None, device(x), device(stored(w, transpose_w)), None,
        M, N, K, False, PLAIN, shared=shared_bytes(kind[0]))
    return host(y)


def launch_add_product(kind, a, b):
    """1 + aᵀ·b, by the tiles of one kind; a [M, rows] and b [M, columns] are on the host."""
    (M, rows), columns = a.shape, b.shape[1]
    dw, count = device(np.ones((rows, columns), np.float32)), tiles(rows, columns, kind[0])
    gpu_bf16._add_products[kind].launch(count, dw, device(a), device(b), rows, columns, M, M, count,
                                        True, shared=shared_bytes(kind[0]))
    return host(dw)


WHOLE_OCTETS = [(8, 8, 8), (136, 264, 40), (120, 256, 104)]
ODD_SIZES = [(1, 1, 1), (130, 129, 33), (127, 63, 70)]


@pytest.mark.parametrize(("kind", "sizes"), [
    *itertools.product((BIG, MEDIUM), WHOLE_OCTETS), *itertools.product((ODD,), ODD_SIZES)])
def test_tiles_of_every_kind_cover_the_product_exactly(kind, sizes):
    """Each array is an allocation of its own: a step outside is reported."""
    M, N, K = sizes
    x, w = integers(0, M, K), integers(1, K, N)
    with vgpu.options(global_race=True):
        for transpose_w in (False, True):
            assert (launch_linear(kind, transpose_w, x, w) == rounded(wide(x) @ wide(w))).all()
        x, dy = integers(2, K + 1, M), integers(3, K + 1, N)
        assert (launch_add_product(kind, x, dy) == 1 + wide(x).T @ wide(dy)).all()


def test_all_tiles_give_the_same_bits():
    rng = np.random.default_rng(4)
    x, w = (rng.standard_normal(shape).astype(bfloat16) for shape in ((136, 104), (104, 136)))
    for transpose_w in (False, True):
        medium = launch_linear(MEDIUM, transpose_w, x, w)
        assert (launch_linear(BIG, transpose_w, x, w) == medium).all()
        assert (launch_linear(ODD, transpose_w, x, w) == medium).all()
    a, b = np.ascontiguousarray(x.T), w
    medium = launch_add_product(MEDIUM, a, b)
    assert (launch_add_product(BIG, a, b) == medium).all()
    assert (launch_add_product(ODD, a, b) == medium).all()


# Few rows and many, whole octets and odd rows, in either orientation of the weights.
LAYERS = [(1, 40, 96), (8, 31, 33), (5, 520, 24), (9, 40, 264), (131, 33, 65)]


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("M", "K", "N"), LAYERS)
def test_every_epilogue(M, K, N, transpose_w):
    x, w = integers(0, M, K), integers(1, K, N)
    bias, residual = (integers(seed, *shape, dtype=np.float32) for seed, shape
                      in ((2, (N,)), (3, (M, N))))
    on_device = device(x), device(stored(w, transpose_w)), device(bias)
    linear = wide(x) @ wide(w) + bias
    y = nans(M, N)
    gpu.forward(y, None, *on_device, None, transpose_w)
    assert (host(y) == rounded(linear)).all()
    y = nans(M, N, dtype=np.float32)
    gpu.forward(y, None, *on_device, device(residual), transpose_w)
    assert (host(y) == linear + residual).all()
    y, pre_gelu = nans(M, N), nans(M, N)
    gpu.forward(y, pre_gelu, *on_device, None, transpose_w)
    assert (host(pre_gelu) == rounded(linear)).all()
    expected = np.empty((M, N))
    oracle.gelu(expected, linear.astype(np.float64))
    assert (np.abs(host(y) - expected) <= 2**-8 * np.abs(expected) + 1e-6).all()


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("M", "K", "N"), [*LAYERS, (1100, 16, 9), (2100, 8, 24)])
def test_gradients_are_exact(M, K, N, transpose_w):
    """The last two sizes split the rows of a weight gradient."""
    x, w, dy = integers(0, M, K), stored(integers(1, K, N), transpose_w), integers(2, M, N)
    expected = np.empty((M, K), np.float32), np.ones(w.shape, np.float32), np.ones(N, np.float32)
    oracle.backward(*expected, wide(dy), wide(x), wide(w), None, transpose_w)
    on_device = device(dy), device(x), device(w)
    dx, dw, dbias = nans(M, K), *(device(np.ones_like(e)) for e in expected[1:])
    with vgpu.options(global_race=True):
        gpu.backward(dx, dw, dbias, *on_device, None, transpose_w)
    assert (host(dx) == rounded(expected[0])).all()
    assert (host(dw) == expected[1]).all() and (host(dbias) == expected[2]).all()


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("M", [3, 40])
def test_gradient_before_the_gelu(M, transpose_w):
    pre_gelu = np.random.default_rng(5).standard_normal((M, 24)).astype(bfloat16)
    x, w, dy = integers(0, M, 24), stored(integers(1, 24, 16), transpose_w), integers(2, M, 16)
    expected, dw = np.empty((M, 24)), np.zeros(w.shape)
    oracle.backward(expected, dw, None, wide(dy), wide(x), wide(w), pre_gelu.astype(np.float64),
                    transpose_w)
    dx = nans(M, 24)
    gpu.backward(dx, device(np.zeros(w.shape, np.float32)), None, device(dy), device(x), device(w),
                 device(pre_gelu), transpose_w)
    assert (np.abs(host(dx) - expected) <= 2**-8 * np.abs(expected) + 1e-5).all()


def test_split_sums_give_the_same_bits_twice():
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal((1600, n)).astype(bfloat16) for n in (16, 8))
    first, second = (device(np.zeros((16, 8), np.float32)) for _ in range(2))
    for dw in (first, second):
        gpu_bf16.add_product(dw, device(a), device(b))
    if vgpu.installed():
        assert [launch.kernel for launch in vgpu.launches()[-2:]] == ["_add_product",
                                                                      "_add_partials"]
    assert host(first).tobytes() == host(second).tobytes()
    exact = a.astype(np.float64).T @ b.astype(np.float64)
    assert np.abs(host(first) - exact).max() < 1e-4


@pytest.mark.parametrize("M", [3, 10])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_nan_stays_in_its_row_and_column(M, transpose_w):
    x, w = integers(0, M, 40), integers(1, 40, 72)
    x[1, 39], w[0, 71] = np.nan, np.nan
    y = nans(M, 72)
    gpu.forward(y, None, device(x), device(stored(w, transpose_w)), None, None, transpose_w)
    wrong = np.isnan(host(y))
    assert wrong[1].all() and wrong[:, 71].all() and wrong.sum() == 72 + M - 1


def sites(space, launch, *arguments):
    """(instruction, used, ideal) of the accesses to one space during a launch."""
    with vgpu.options(count=True):
        launch(*arguments)
    found = [(site.text, site.used, site.ideal)
             for site in vgpu.launches()[-1].statistics.sites if site.space == space]
    assert found
    return found


def wasteful(space, launch, *arguments):
    return [site for site in sites(space, launch, *arguments) if site[1] != site[2]]


@virtual
@pytest.mark.parametrize("kind", [BIG, MEDIUM])
@pytest.mark.parametrize("form", ["NN", "NT", "TN"])
def test_no_bank_conflict_and_no_sector_too_many(form, kind):
    """Two rows of tiles; float32 results go out in two halves of a sector, so not for TN."""
    K = 96
    a, b = integers(0, 2 * ROWS, K), integers(1, K, kind[0])
    if form == "TN":
        launch = launch_add_product, kind, np.ascontiguousarray(a.T), b
    else:
        launch = launch_linear, kind, form == "NT", a, b
    assert wasteful("shared", *launch) == []
    assert [s for s in wasteful("global", *launch) if form != "TN" or "cp.async" in s[0]] == []


@virtual
@pytest.mark.parametrize("transpose_w", [False, True])
def test_few_rows_read_whole_sectors(transpose_w):
    x, w = device(integers(0, 1, 1040)), device(stored(integers(1, 1040, 32), transpose_w))
    found = wasteful("global", gpu.forward, nans(1, 32), None, x, w, None, None, transpose_w)
    assert [site for site in found if site[0].startswith("ld")] == []


@virtual
def test_column_sums_read_whole_sectors():
    dbias, dy = device(integers(0, 32, dtype=np.float32)), device(integers(1, 520, 32))
    columns, add_column_sums = gpu._add_column_sums[True]
    assert wasteful("global", add_column_sums.launch, 32 // columns, dbias, dy, 520, 32) == []


def test_the_choice_of_tiles():
    at_2 = address(device(integers(0, 16))) + 2

    def choice(rows, columns, row_of_a, *arrays, processors=108):
        return gpu_bf16._choose(rows, columns, row_of_a, processors, *arrays)

    assert choice(8192, 8192, 768, None) == BIG
    assert choice(8192, 768, 3072) == BIG, "192 large tiles are two waves, 384 small ones too"
    assert choice(1024, 768, 768) == MEDIUM, "24 large tiles would leave 84 processors idle"
    assert {choice(8192, 8192, 767), choice(8192, 8190, 768),
            choice(8192, 8192, 768, at_2)} == {ODD}


@pytest.mark.parametrize("processors", [108, 128, 132])
@pytest.mark.parametrize(("rows", "columns", "M"), [
    (768, 3072, 16384), (768, 768, 8192), (8576, 768, 16384), (768, 768, 100), (8, 8, 1 << 20),
])
def test_a_weight_gradient_keeps_the_gpu_busy(rows, columns, M, processors):
    size, splits, terms = gpu_bf16._choose_gradient(rows, columns, M, processors)
    assert terms % 32 == 0 and (splits - 1) * terms < M <= splits * terms
    blocks = splits * gpu_bf16._tiles(rows, columns, size)
    ideal = 10 * rows * columns * M / (ROWS * LARGE * processors)
    if M >= 8192 and rows > 8:
        assert gpu_bf16._turns(blocks, size, processors) * terms < 1.45 * ideal
    if M == 100:
        assert splits == 1, "partial sums would cost more than they save"


# What the pipeline's order hangs on. Removed one at a time, every one must be missed.
BARRIER = r"bar(rier)?\.(sync|warp\.sync)"
BARRIER_OR_WAIT = BARRIER + r"|cp\.async\.wait_group"
MUTANTS = {
    "BIG": (gpu_bf16._linears[True, *BIG], LARGE),
    "MEDIUM": (gpu_bf16._linears[False, *MEDIUM], SMALL),
    "ODD": (gpu_bf16._linears[False, *ODD], SMALL),
}


def symptom(text, name, size, K, transpose_w):
    """What a run of damaged code shows: a report, a wrong result, or ""."""
    M, N = ROWS, size
    x, w = integers(0, M, K), integers(1, K, N)
    y = np.full((M, N), np.nan, bfloat16).view(np.uint16)
    w_memory = stored(w, transpose_w).view(np.uint16)
    nothing, flag = np.uint64(0), np.int32(0)
    try:
        vgpu.run_ptx(text, name, 1, 256, [y, nothing, nothing, nothing, x.view(np.uint16), w_memory,
                                          nothing, np.int32(M), np.int32(N), np.int32(K), flag,
                                          flag], dynamic_shared=shared_bytes(size))
    except vgpu.VirtualGPUError as error:
        return error.kind
    right = (wide(y.view(bfloat16)) == rounded(wide(x) @ wide(w))).all()
    return "" if right else "wrong result"


@virtual
@pytest.mark.parametrize("subject", MUTANTS)
def test_every_barrier_and_wait_is_needed(subject):
    kernel, size = MUTANTS[subject]
    library = kernel.dispatcher.compile(kernel.signature.args)._codelibrary
    text, name = library.get_cubin().ptx, library._entry_name
    needed = BARRIER if subject == "ODD" else BARRIER_OR_WAIT  # it stores: nothing to wait for
    lines = text.splitlines()
    places = [i for i, line in enumerate(lines) if re.search(needed, line)]
    assert len(places) >= 5
    # Tiles of K end in another place of the ring: so do the last copies.
    for K in (128, 160):
        assert symptom(text, name, size, K, subject == "BIG") == ""
    survivors = []
    for place in places:
        mutant = "\n".join([*lines[:place], *lines[place + 1:]])
        if not any(symptom(mutant, name, size, K, subject == "BIG") for K in (128, 160)):
            survivors.append(lines[place])
    assert survivors == []
