"""The matrix unit: tiles are loaded, multiplied and stored as amx.py says."""

import ml_dtypes
import numpy as np
import pytest

from kernels.common import amx, cpu_features
from kernels.common.cache import njit
from kernels.common.cpu_tile import make_add_products

if not cpu_features.TILES:
    pytest.skip("this processor has no tiles, or the system refuses them", allow_module_level=True)

rng = np.random.default_rng(0)


@njit()
def _multiply(c, a, b, a_row, b_row, c_row):
    amx.configure()
    amx.zero(0)
    amx.zero(7)
    amx.load(3, a, 5, a_row)
    amx.load(4, b, 2, b_row)
    amx.multiply_add(0, 3, 4)
    amx.store(0, c, 1, c_row)
    amx.load(7, c, 1, c_row)
    amx.multiply_add(7, 3, 4)
    amx.store(7, c, 1 + 16 * c_row, c_row)
    amx.release()


def test_one_product_of_tiles():
    """Rows apart, starts that are not aligned, nothing written beside the tile; integers: exact."""
    a, b = (rng.integers(-4, 5, (16, 32)).astype(np.float32) for _ in range(2))
    a_words, b_words = np.zeros((17, 20), np.int32), np.zeros((17, 19), np.int32)
    pairs = [x.astype(ml_dtypes.bfloat16).view(np.int32) for x in (a, b)]
    a_words.reshape(-1)[5:5 + 16 * 20].reshape(16, 20)[:, :16] = pairs[0]
    b_words.reshape(-1)[2:2 + 16 * 19].reshape(16, 19)[:, :16] = pairs[1]
    c = np.full(1 + 32 * 18, np.nan, np.float32)
    _multiply(c, a_words.reshape(-1), b_words.reshape(-1), 20, 19, 18)
    # Word w of B's row is the pair of terms 2w and 2w + 1 of column j.
    terms = b.reshape(16, 16, 2).transpose(0, 2, 1).reshape(32, 16)
    rows = c[1:].reshape(32, 18)
    assert np.array_equal(rows[:16, :16], a @ terms)
    assert np.array_equal(rows[16:, :16], 2 * (a @ terms))
    assert np.isnan(c[0]) and np.isnan(rows[:, 16:]).all()


_add_products = make_add_products(1, 1, 16, 40)


@njit()
def _add(c, a, b, words, fresh):
    amx.configure()
    _add_products(c, 33, a, words, 1, b, words, fresh)
    amx.release()


@pytest.mark.parametrize("words", [16, 48])
def test_a_tile_of_sums(words):
    a = rng.integers(-4, 5, (32, 2 * words)).astype(np.float32)
    b = rng.integers(-4, 5, (2 * words, 32)).astype(np.float32)
    b_words = np.zeros((words, 40), np.int32)
    zipped = np.ascontiguousarray(b.reshape(words, 2, 32).transpose(0, 2, 1))
    b_words[:, :32] = zipped.astype(ml_dtypes.bfloat16).view(np.int32)[..., 0]
    c = np.full((32, 33), np.nan, np.float32)
    for fresh in (True, False):
        _add(c.reshape(-1), a.astype(ml_dtypes.bfloat16).view(np.int32).reshape(-1),
             b_words.reshape(-1), words, fresh)
        assert np.array_equal(c[:, :32], (1 if fresh else 2) * (a @ b))
    assert np.isnan(c[:, 32]).all()


def test_numbers_of_tiles_are_constants():
    @njit()
    def wrong(n):
        amx.zero(n)

    with pytest.raises(Exception, match="must be a constant"):
        wrong(1)
