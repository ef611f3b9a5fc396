"""What is special about the GPU's embedding, layernorm, gelu, cross-entropy, AdamW and norm: how
they read memory, and what happens to indexes that the host does not check."""

import ml_dtypes
import numpy as np
import pytest
import vgpu

pytest.importorskip("numba_cuda")

from numba import cuda

import kernels.cross_entropy.gpu as cross_entropy
import kernels.gelu.gpu as gelu
import kernels.layernorm.gpu as layernorm
from kernels.common.access import BFLOATS, FLOATS
from kernels.common.cuda import address
from kernels.common.verify import download, upload
from kernels.registry import op_table

OPS = op_table("gpu")


def on_device(array, dtype=np.float32):
    return cuda.to_device(np.asarray(array, dtype))


def empty(*shape):
    return on_device(np.full(shape, np.nan))


def bfloats(*shape, seed=0):
    """Random numbers in bfloat16, in device memory."""
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return upload(numbers.astype(ml_dtypes.bfloat16), "gpu")


@pytest.mark.parametrize(("offset", "size", "words"), [(0, 64, 4), (4, 64, 4), (1, 64, 1),
                                                       (2, 64, 1), (0, 63, 1), (0, 62, 1)])
def test_128_bits_are_read_only_where_address_and_size_allow(offset, size, words):
    x = on_device(np.zeros(80))[offset : offset + size]
    assert address(x) % 16 == 4 * offset % 16
    chosen, kernel = gelu._forward.choose(size, x, None)
    assert chosen == words
    assert kernel is (gelu._forward.wide if words == 4 else gelu._forward.narrow)


def test_one_unaligned_array_is_enough_for_single_words():
    aligned, unaligned = on_device(np.zeros(64)), on_device(np.zeros(65))[1:]
    assert gelu._backward.choose(64, aligned, aligned, unaligned)[0] == 1


@pytest.mark.parametrize(("offset", "size", "words"), [(0, 64, 8), (8, 64, 8), (4, 64, 1),
                                                       (1, 64, 1), (0, 63, 1), (0, 60, 1)])
def test_128_bits_of_bfloat16_are_eight_numbers(offset, size, words):
    x = bfloats(80)[offset : offset + size]
    access, _ = cross_entropy._forward.choose(size, x)
    assert access is BFLOATS[words]
    assert cross_entropy._forward.choose(64, on_device(np.zeros(64)))[0] is FLOATS[4]


@pytest.mark.parametrize("bad", [-1, 7, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_table_gives_nan_and_no_gradient(bad):
    ids = on_device([[0, bad, 6]], np.int32)
    wte, wpe, x = on_device(np.ones((7, 5))), on_device(np.ones((3, 5))), empty(3, 5)
    OPS.embedding.forward(x, ids, wte, wpe, None)
    result = x.copy_to_host()
    assert np.isnan(result[1]).all() and (result[[0, 2]] == 2).all()
    dwte, dwpe = on_device(np.zeros((7, 5))), on_device(np.zeros((3, 5)))
    OPS.embedding.backward(dwte, dwpe, wpe, ids)
    assert dwte.copy_to_host().sum(axis=1).tolist() == [5, 0, 0, 0, 0, 0, 5]
    assert (dwpe.copy_to_host() == 1).all()


def test_more_positions_than_the_table_has_are_refused():
    ids, table, x = on_device([[0] * 4], np.int32), on_device(np.ones((3, 4))), empty(4, 4)
    with pytest.raises(ValueError, match="outside the position table of 3 rows"):
        OPS.embedding.forward(x, ids, table, table, None)
    with pytest.raises(ValueError, match="outside the position table of 3 rows"):
        OPS.embedding.backward(table, table, x, ids)


@pytest.mark.parametrize(("start", "bad"), [(-1, [True, False]), (2, [False, True]),
                                            (2**31 - 2, [True, True])])
def test_a_position_outside_the_table_gives_nan(start, bad):
    ids, table, x = on_device([[0, 0]], np.int32), on_device(np.ones((3, 4))), empty(2, 4)
    OPS.embedding.forward(x, ids, table, table, on_device([start], np.int32))
    assert np.isnan(x.copy_to_host()).all(axis=1).tolist() == bad


def test_a_sequence_may_have_more_blocks_than_a_grid_has_rows():
    vgpu = pytest.importorskip("vgpu")
    T = 8 * 65535 + 1
    ids, table, x = (cuda.device_array(shape, dtype) for shape, dtype
                     in (((1, T), np.int32), ((T, 1), np.float32), ((T, 1), np.float32)))
    with vgpu.options(execute=False):
        OPS.embedding.forward(x, ids, table, table, None)
        OPS.embedding.backward(x, table, table, ids)


def test_token_gradients_are_added_up_in_the_order_of_the_rows():
    """Two thousand rows of one token, more than a block finds at once: the bits of a loop."""
    rows = np.random.default_rng(0).standard_normal((2000, 3)).astype(np.float32)
    ids = np.ones((1, 2000), np.int32)
    ids[0, ::7] = 0
    dwte, dwpe = on_device(np.zeros((2, 3))), on_device(np.zeros((2000, 3)))
    OPS.embedding.backward(dwte, dwpe, on_device(rows), on_device(ids, np.int32))
    for token in (0, 1):
        expected = np.zeros(3, np.float32)
        for row in rows[ids[0] == token]:
            expected += row
        assert dwte.copy_to_host()[token].tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [-2, 65, 127, 2**31 - 1])
def test_a_target_outside_the_vocabulary_gives_a_nan_loss(bad):
    logits = on_device(np.zeros((3, 128)))
    targets, losses, dlogits = on_device([0, bad, 64], np.int32), empty(3), empty(3, 128)
    OPS.cross_entropy.backward(losses, dlogits, logits, targets, 65, 1.0)
    assert np.isnan(losses.copy_to_host()).tolist() == [False, True, False]


def test_layernorm_without_parameters_needs_no_second_launch(monkeypatch):
    monkeypatch.setattr(layernorm._add_partials, "launch", None)
    x, dx = on_device(np.random.default_rng(1).standard_normal((5, 32))), empty(5, 32)
    mean, rstd, y = empty(5), empty(5), empty(5, 32)
    OPS.layernorm.forward(y, mean, rstd, x, None, None, 1e-5)
    OPS.layernorm.backward(dx, None, None, None, x, x, mean, rstd, None, None)
    assert np.isfinite(dx.copy_to_host()).all()


def test_the_norm_goes_from_kernel_to_kernel():
    """Gradients [3, 4] with clip 1 count as [0.6, 0.8]; one NaN stops the whole update."""
    weights, m, v, norm = (on_device(np.zeros(2)) for _ in range(4))
    for gradients, expected in (([3, 4], [0.06, 0.08]), ([np.nan, 4], [0.06, 0.08])):
        grads = on_device(gradients)
        OPS.grad_norm.forward(norm, grads, None)
        OPS.adamw.update(weights, None, m, v, grads, norm, on_device([0.1, 0.1, 0.05]), 0, 0.9,
                         0.95, 1e-8, 0.1, 1.0)
        np.testing.assert_allclose(m.copy_to_host(), expected, rtol=1e-6)


def test_a_gradient_whose_square_is_beyond_float32_makes_the_norm_infinite():
    norm = empty(1)
    OPS.grad_norm.forward(norm, on_device([1.0, 2e19, 1.0]), None)
    assert norm.copy_to_host()[0] == np.inf


@pytest.mark.parametrize("size", [(5, 64), (7, 33)])
def test_dx_in_bfloat16_beside_operands_in_float32(size):
    x, dy = (on_device(np.random.default_rng(seed).standard_normal(size)) for seed in (2, 3))
    mean, rstd, dx = empty(size[0]), empty(size[0]), empty(*size)
    OPS.layernorm.forward(empty(*size), mean, rstd, x, None, None, 1e-5)
    rounded = bfloats(*size)
    OPS.layernorm.backward(dx, rounded, None, None, dy, x, mean, rstd, None, x)
    expected = dx.copy_to_host().astype(ml_dtypes.bfloat16)
    assert download(rounded, "gpu").tobytes() == expected.tobytes()


def sectors(launch):
    """Sectors of 32 bytes that a launch reads and writes in global memory; and that no access of
    shared memory waits for another bank."""
    sites = launch.statistics.sites
    assert [site.text for site in sites if site.space == "shared" and site.used != site.ideal] == []
    written = [site for site in sites if site.space == "global" and site.text.startswith("st.")]
    read = [site for site in sites if site.space == "global" and site not in written]
    return [sum(site.used for site in group) for group in (read, written)]


virtual = pytest.mark.skipif(not vgpu.installed(), reason="sectors are counted on the virtual GPU")


@virtual
@pytest.mark.parametrize("width", [256, 768, 1024])
def test_layernorm_reads_each_row_once(width):
    rows = 8
    x, residual, y = empty(rows, width), empty(rows, width), bfloats(rows, width)
    mean, rstd, dx, rounded = empty(rows), empty(rows), empty(rows, width), bfloats(rows, width)
    x.copy_to_device(np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32))
    residual.copy_to_device(x)
    with vgpu.options(count=True):
        OPS.layernorm.forward(y, mean, rstd, x, None, None, 1e-5)
        OPS.layernorm.backward(dx, rounded, None, None, y, x, mean, rstd, None, residual)
    forward, backward = map(sectors, vgpu.launches()[-2:])
    numbers = rows * width // 32
    assert forward == [4 * numbers, 2 * numbers + 2 * rows]
    of_warps = 2 * rows * layernorm.WARPS  # mean and rstd
    assert backward == [(4 + 4 + 2) * numbers + of_warps, (4 + 2) * numbers]


@virtual
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_cross_entropy_touches_each_logit_once(dtype):
    rows, columns, size = 3, 8576, np.dtype(dtype).itemsize
    numbers = np.random.default_rng(0).standard_normal((rows, columns)).astype(dtype)
    logits, losses = upload(numbers, "gpu"), empty(rows)
    targets = on_device([0, 100, 8575], np.int32)
    with vgpu.options(count=True):
        OPS.cross_entropy.forward(losses, logits, targets, columns)
        OPS.cross_entropy.backward(losses, logits, logits, targets, columns, 1.0)
    forward, backward = map(sectors, vgpu.launches()[-2:])
    once = rows * columns * size // 32
    of_warps = 2 * rows * cross_entropy.WARPS  # the target, and its logit
    assert forward == [once + of_warps, rows]
    assert backward == [once + of_warps, once + rows]
