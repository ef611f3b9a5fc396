"""The parameter table: exact counts, layout, padding, tying."""

import numpy as np
import pytest
from helpers import ODD_MODEL

from andrea_numba.config import PRESETS, ModelConfig
from andrea_numba.initialize import initialize
from andrea_numba.parameters import ParameterTable
from kernels.common.host_array import ALIGNMENT


def preset(name: str, **changes) -> ModelConfig:
    return ModelConfig(**{**PRESETS[name]["model"], **changes})


BARE = dict(tied=False, bias=False, norm_affine=False)


@pytest.mark.parametrize(("model", "count"), [
    (preset("andrea-120m"), 92_331_264),
    (preset("andrea-120m", **BARE), 98_698_752),  # the published figure of the 120M model
    (preset("andrea-12m", **BARE), 12_780_288),  # and of the 12M model
    (preset("andrea-120m", bias=False, norm_affine=False), 92_209_920),
    (preset("andrea-480m"), 467_857_920),
    (preset("gpt2-124m"), 124_439_808),
])
def test_unique_parameters_are_exact(model, count):
    assert ParameterTable(model).count == count


def test_block_matrices_of_120m():
    table = ParameterTable(preset("andrea-120m"))
    matrices = [t for n, t in table.tensors.items() if n.startswith("blocks.") and "w_" in n]
    assert sum(t.size for t in matrices) == 84_934_656


def test_counting_the_tied_table_twice():
    table = ParameterTable(preset("andrea-120m"))
    assert table.count_untied == 92_331_264 + 8449 * 768
    untied = ParameterTable(preset("andrea-120m", tied=False))
    assert untied.count_untied == untied.count == table.count_untied


def test_120m_has_25_layernorms():
    table = ParameterTable(preset("andrea-120m"))
    assert sum(name.endswith("_gamma") for name in table.tensors) == 25


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_aligned_and_disjoint(tied):
    table = ParameterTable(ModelConfig(**ODD_MODEL, tied=tied))
    flat = table.zeros()
    assert flat.ctypes.data % ALIGNMENT == 0
    covered = np.zeros(table.size, int)
    for tensor in table.tensors.values():
        assert tensor.offset * flat.itemsize % ALIGNMENT == 0
        covered[tensor.offset:tensor.offset + tensor.size] += 1
    assert covered.max() == 1


def test_decay_covers_exactly_the_matrices():
    table = ParameterTable(ModelConfig(**ODD_MODEL, tied=False))
    for name, tensor in table.tensors.items():
        assert (tensor.offset < table.n_decay) == (len(tensor.shape) == 2), name
        assert (tensor.offset + tensor.size <= table.n_decay) == (len(tensor.shape) == 2), name


def test_padding_stays_out_of_names_and_counts():
    table = ParameterTable(ModelConfig(**ODD_MODEL))
    flat = np.ones(table.size, np.float32)
    assert table.view(flat, "wte").shape == (128, 30)
    assert table.unpadded(flat)["wte"].shape == (61, 30)
    assert sum(t.size for t in table.unpadded(flat).values()) == table.count


def test_tied_head_is_the_token_table():
    config = ModelConfig(**ODD_MODEL)
    table = ParameterTable(config)
    views = table.views(table.zeros())
    assert views.head.shape == views.wte.shape and np.shares_memory(views.head, views.wte)
    assert "w_head" not in table.tensors
    views = ParameterTable(ModelConfig(**ODD_MODEL, tied=False)).views(
        ParameterTable(ModelConfig(**ODD_MODEL, tied=False)).zeros())
    assert not np.shares_memory(views.head, views.wte)


def test_switched_off_parameters_are_none():
    table = ParameterTable(ModelConfig(**ODD_MODEL, bias=False, norm_affine=False))
    views = table.views(table.zeros())
    assert views.blocks[1].b_qkv is None and views.ln_f_gamma is None
    assert views.blocks[1].w_qkv.shape == (30, 90)


def test_initial_values():
    config = ModelConfig(d_model=64, n_head=4, n_layer=3, context=32, vocab_size=200)
    table = ParameterTable(config)
    weights = table.zeros()
    initialize(table, weights, np.random.default_rng(0))
    for name, tensor in table.unpadded(weights).items():
        if name.endswith("_gamma"):
            assert (tensor == 1).all()
        elif tensor.ndim == 1:
            assert (tensor == 0).all()
        else:
            std = 0.02 / np.sqrt(6) if name.endswith((".w_o", ".w_2")) else 0.02
            # The standard error of a sample deviation is std/sqrt(2n): five of them.
            assert abs(tensor.std() - std) < 5 * std / np.sqrt(2 * tensor.size), name
    assert (table.view(weights, "wte")[200:] == 0).all()


def test_initialisation_repeats():
    table = ParameterTable(ModelConfig(**ODD_MODEL))
    first, second = table.zeros(), table.zeros()
    initialize(table, first, np.random.default_rng(7))
    initialize(table, second, np.random.default_rng(7))
    assert first.tobytes() == second.tobytes()
