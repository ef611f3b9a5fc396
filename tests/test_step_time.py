"""The predicted step: its ops are the model's own calls, and its figures add up."""

import pytest

pytest.importorskip("numba_cuda")

from andrea_numba import args, time_model
from andrea_numba.config import PRESETS, ModelConfig, TrainConfig
from andrea_numba.metrics import flops_per_token
from kernels.common.gpus import CHIPS
from kernels.registry import load_spec

TINY = ModelConfig(d_model=128, n_head=2, n_layer=2, context=128, vocab_size=100)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_calls_of_a_step_are_all_its_work(precision):
    """Arrays have shapes and no memory: a step of the largest preset is a matter of seconds."""
    config = TrainConfig()
    args.apply(config, PRESETS["andrea-480m"], "andrea-480m")
    model = config.model
    calls = time_model.calls_of_a_step(model, 32, precision)
    flops = 0
    for op, name, given in calls:
        if op == "matmul":
            (M, K), N = given["x"].shape, given["y" if name == "forward" else "dy"].shape[1]
            flops += load_spec(op).FUNCTIONS[name].flops({"M": M, "N": N, "K": K})
            assert str(given["w"].dtype) == ("bfloat16" if precision == "bf16" else "float32")
    attention = 6 * model.context * model.d_model * model.n_layer
    tokens = 32 * model.context
    assert flops == tokens * (flops_per_token(model, model.context) - attention)
    assert [(op, name) for op, name, _ in calls[-2:]] == [("grad_norm", "forward"),
                                                         ("adamw", "update")]


@pytest.mark.parametrize("gpu", CHIPS)
def test_a_step_is_the_sum_of_its_groups(gpu):
    groups = time_model.step(TINY, 4, "bf16", gpu)
    assert {"matmul.forward", "matmul.backward", "attention.forward", "attention.backward",
            "adamw.update", time_model.CLEAR} <= groups.keys()
    for group in groups.values():
        assert 0 < group.seconds <= group.apart and group.launches
        assert sum(group.bounds.values()) == pytest.approx(group.seconds)
    seconds = sum(group.seconds for group in groups.values())
    assert time_model.seconds_of_a_step(TINY, 4, "bf16", gpu) == seconds
    assert time_model.seconds_of_a_step(TINY, 4, "bf16", "NVIDIA L4") is None
    assert f"{1e3 * seconds:.1f} ms a step" in time_model.report(TINY, 4, "bf16", gpu)


def test_the_command_line(capsys):
    assert time_model.main(["andrea-120m", "--batch-size", "2", "--gpu", "NVIDIA H200"]) == 0
    first = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NVIDIA")]
    assert len(first) == 2 and "H200, fp32" in first[0] and "H200, bf16" in first[1]
    assert time_model.main(["pico"]) == 2 and time_model.main(["--batch-size", "0"]) == 2
    assert "no preset pico" in capsys.readouterr().err
