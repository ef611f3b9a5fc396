"""What is special about the linear layer on a GPU: its tiles, and how they touch memory."""

import itertools

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

import vgpu

from kernels.common.cuda import cuda
from kernels.matmul import gpu, oracle

virtual = pytest.mark.skipif(not vgpu.installed(), reason="counted by the virtual GPU only")
SMALL, LARGE, ODD = (64, True), (128, True), (64, False)


def integers(seed, *shape):
    """Small whole numbers: sums of their products are exact in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def device(array, shift=0):
    """A copy on the device, `shift` words off the beginning of its memory."""
    buffer = cuda.to_device(np.concatenate([np.zeros(shift, np.float32), array.ravel()]))
    return buffer[shift:].reshape(array.shape)


def nans(*shape, shift=0):
    return device(np.full(shape, np.nan, np.float32), shift)


def stored(w, transpose):
    return np.ascontiguousarray(w.T) if transpose else w


def launch_linear(kind, transpose_w, x, w, shift=0):
    """y = x·w, by the tiles of one kind; x and w are on the host, w [K, N]."""
    (M, K), N = x.shape, w.shape[1]
    y = nans(M, N, shift=shift)
    gpu._linear[transpose_w][kind].launch(
        gpu._tiles(M, N, kind[0]), y, None, device(x, shift), device(stored(w, transpose_w), shift),
        None, M, N, K, False, False)
    return y.copy_to_host()


def launch_add_product(kind, a, b, shift=0):
    """1 + aᵀ·b, by the tiles of one kind; a [M, rows] and b [M, columns] are on the host."""
    (M, rows), columns = a.shape, b.shape[1]
    dw = device(np.ones((rows, columns), np.float32), shift)
    gpu._add_product[kind].launch(gpu._tiles(rows, columns, kind[0]), dw, device(a, shift),
                                  device(b, shift), rows, columns, M)
    return dw.copy_to_host()


WHOLE_QUADS = [(4, 4, 4), (64, 64, 8), (68, 124, 12), (132, 128, 4), (256, 132, 20)]
ODD_SIZES = [(1, 1, 1), (9, 63, 7), (65, 64, 8), (63, 66, 9), (130, 65, 17)]


@pytest.mark.parametrize(("kind", "sizes"), [
    *itertools.product((SMALL, LARGE), WHOLE_QUADS), *itertools.product((ODD,), ODD_SIZES)])
def test_tiles_of_every_kind_cover_the_product_exactly(kind, sizes):
    """Each array is an allocation of its own: a step outside is reported."""
    M, N, K = sizes
    x, w = integers(0, M, K), integers(1, K, N)
    with vgpu.options(global_race=True):
        for transpose_w in (False, True):
            assert (launch_linear(kind, transpose_w, x, w) == x @ w).all()
        x, dy = integers(2, K + 1, M), integers(3, K + 1, N)
        assert (launch_add_product(kind, x, dy) == 1 + x.T @ dy).all()


def test_all_tiles_give_the_same_bits():
    rng = np.random.default_rng(4)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((72, 100), (100, 76)))
    for transpose_w in (False, True):
        small = launch_linear(SMALL, transpose_w, x, w)
        assert (launch_linear(LARGE, transpose_w, x, w) == small).all()
        assert (launch_linear(ODD, transpose_w, x, w, shift=1) == small).all()
    a, b = np.ascontiguousarray(x.T), w
    small = launch_add_product(SMALL, a, b)
    assert (launch_add_product(LARGE, a, b) == small).all()
    assert (launch_add_product(ODD, a, b, shift=3) == small).all()


def wasteful(launch, *arguments):
    """The instructions that take more wavefronts or sectors than their bytes need."""
    with vgpu.options(count=True):
        launch(*arguments)
    sites = vgpu.launches()[-1].statistics.sites
    assert sum(site.warps for site in sites) > 0
    return [(site.text, site.used, site.ideal) for site in sites if site.used != site.ideal]


@virtual
@pytest.mark.parametrize("kind", [SMALL, LARGE])
@pytest.mark.parametrize("form", ["NN", "NT", "TN"])
def test_no_bank_conflict_and_no_sector_too_many(form, kind):
    """With one wavefront for each 128 bytes of shared memory, and two row tiles of blocks."""
    tile, K = kind[0], 24
    a, b = integers(0, 2 * tile, K), integers(1, K, tile)
    if form == "TN":
        assert wasteful(launch_add_product, kind, np.ascontiguousarray(a.T), b) == []
    else:
        assert wasteful(launch_linear, kind, form == "NT", a, b) == []


@virtual
@pytest.mark.parametrize("transpose_w", [False, True])
def test_few_rows_read_whole_sectors(transpose_w):
    x, w = device(integers(0, 1, 520)), device(stored(integers(1, 520, 24), transpose_w))
    assert wasteful(gpu.forward, nans(1, 24), None, x, w, None, None, transpose_w) == []


@virtual
def test_column_sums_read_whole_sectors():
    dbias, dy = device(integers(0, 24)), device(integers(1, 520, 24))
    _, add_column_sums = gpu._add_column_sums[False]
    assert wasteful(add_column_sums.launch, 3, dbias, dy, 520, 24) == []


TRUE_WIDTHS = [  # rows, in, out, transposed
    (1, 768, 2304, False), (2, 3072, 768, False), (8, 64, 3072, False), (1, 768, 8576, True),
    (9, 8, 2304, False), (9, 12, 8576, True), (65, 16, 768, False), (9, 768, 4, False),
]


@pytest.mark.parametrize(("M", "K", "N", "transpose_w"), TRUE_WIDTHS)
def test_widths_of_real_models(M, K, N, transpose_w):
    x, w, bias = integers(0, M, K), integers(1, K, N), integers(2, N)
    y = nans(M, N)
    gpu.forward(y, None, device(x), device(stored(w, transpose_w)), device(bias), None, transpose_w)
    assert (y.copy_to_host() == x @ w + bias).all()


@pytest.mark.parametrize(("M", "K", "N", "transpose_w"), [
    (3, 768, 2304, False), (3, 128, 8576, True), (200, 20, 768, False), (1030, 8, 9, True)])
def test_gradients_at_widths_of_real_models(M, K, N, transpose_w):
    x, w, dy = integers(0, M, K), stored(integers(1, K, N), transpose_w), integers(2, M, N)
    expected = np.empty_like(x), np.ones_like(w), np.ones(N, np.float32)
    oracle.backward(*expected, dy, x, w, None, transpose_w)
    dx, dw, dbias = nans(M, K), device(np.ones_like(w)), device(np.ones(N, np.float32))
    with vgpu.options(global_race=True):
        gpu.backward(dx, dw, dbias, device(dy), device(x), device(w), None, transpose_w)
    for got, right in zip((dx, dw, dbias), expected, strict=True):
        assert (got.copy_to_host() == right).all()


@virtual
def test_backward_is_three_launches():
    x, w, dy = device(integers(0, 10, 4)), device(integers(1, 4, 8)), device(integers(2, 10, 8))
    dw, dbias = device(integers(3, 4, 8)), device(integers(4, 8))
    gpu.forward(nans(1, 8), None, x[:1], w, dbias, None, False)
    gpu.backward(nans(10, 4), dw, dbias, dy, x, w, None, False)
    names = [launch.kernel for launch in vgpu.launches()[-4:]]
    assert names == ["_few_rows", "_linear", "_add_product", "_add_column_sums"]


@pytest.mark.parametrize("M", [3, 10])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_nan_stays_in_its_row_and_column(M, transpose_w):
    x, w = integers(0, M, 33), integers(1, 33, 66)
    x[1, 32], w[0, 65] = np.nan, np.nan
    y = nans(M, 66)
    gpu.forward(y, None, device(x), device(stored(w, transpose_w)), None, None, transpose_w)
    wrong = np.isnan(y.copy_to_host())
    assert wrong[1].all() and wrong[:, 65].all() and wrong.sum() == 66 + M - 1


def test_the_choice_of_tiles():
    kernels = {SMALL: "small", LARGE: "large", ODD: "odd"}
    at_4 = cuda.device_array(8, np.float32)[1:]

    def choice(rows, columns, row_of_a, *arrays):
        return gpu._choose(kernels, rows, columns, row_of_a, *arrays)[0]

    assert choice(8192, 8192, 768, None) == "large"
    assert choice(128, 128, 768) == "small"
    assert {choice(8192, 8192, 767), choice(8192, 8190, 768),
            choice(8192, 8192, 768, at_4)} == {"odd"}
