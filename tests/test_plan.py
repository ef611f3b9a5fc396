"""The plan: what it counts is what gets allocated, and what does not fit is refused."""

import gc
import itertools

import pytest
import vgpu
from helpers import dataset, tiny_config

from andrea_numba import cli_train, device, metrics, plan, start
from andrea_numba.buffers import Buffers, arenas
from andrea_numba.buffers import plan as buffer_plan
from andrea_numba.config import PRESETS, ModelConfig
from andrea_numba.errors import UserError
from andrea_numba.memory import HOST, HostMemory
from andrea_numba.parameters import ParameterTable
from andrea_numba.trainer import Trainer
from kernels.common.spec import BFLOAT16


def config_with_vocabulary():
    config = tiny_config()
    config.model.vocab_size = 65
    return config


@pytest.mark.parametrize("memory", [HOST, HostMemory("bf16")])
@pytest.mark.parametrize("training", [True, False])
def test_buffers_take_what_the_plan_says(training, memory):
    model = config_with_vocabulary().model
    buffers = Buffers(model, 4, 16, training, memory=memory)
    entries = buffer_plan(model, 4, 16, training, memory.precision)
    assert {kind: arena.size for kind, arena in buffers._arenas.items()} == arenas(entries)
    for one, other in itertools.combinations(entries, 2):
        if one.dtype == other.dtype and one.start < other.end and other.start < one.end:
            assert other.name == "logits"  # in its place lie gradients, but for its own
            assert one.group == "activation gradients" and one.name != "dln"


def test_in_bf16_only_operands_are_halved():
    entries = {precision: buffer_plan(config_with_vocabulary().model, 4, 16, True, precision)
               for precision in ("fp32", "bf16")}
    halved = {b.name.split(".")[-1] for b in entries["bf16"] if b.dtype == BFLOAT16}
    assert halved == {"ln_1", "qkv", "attn", "ln_2", "fc", "fc_gelu", "ln_f", "logits", "dln",
                      "dattn", "dqkv", "dfc", "dx_bf16"}
    views = Buffers(config_with_vocabulary().model, 4, 16, True,
                    memory=HostMemory("bf16")).views(4, 16)
    assert views.dx_operand is views.dx_bf16 and views.blocks[0].qkv.dtype == BFLOAT16


def test_views_of_a_smaller_batch_lie_inside():
    model = config_with_vocabulary().model
    buffers = Buffers(model, 4, 16, training=True)
    views = buffers.views(1, 5)
    assert views.blocks[1].qkv.shape == (5, 48) and views.logits.shape == (5, 128)
    views.blocks[1].qkv.fill(7)
    assert (buffers.views(4, 16).blocks[1].qkv.reshape(-1)[:5 * 48] == 7).all()


def test_without_training_blocks_share_their_buffers():
    views = Buffers(config_with_vocabulary().model, 1, 16, training=False).views(1, 16)
    assert views.blocks[0] is views.blocks[1]
    assert views.logits.shape == (1, 128)


def test_groups_cover_parameters_and_buffers():
    config = config_with_vocabulary()
    groups = plan.memory(config, baseline=1000)
    size = ParameterTable(config.model).size
    assert groups["weights"] == groups["gradients"] == 4 * size
    assert groups["AdamW moments"] == 8 * size
    [elements] = arenas(buffer_plan(config.model, 4, 16, training=True)).values()
    assert (groups["activations"] + groups["logits, then gradients of activations"]
            == 4 * elements)
    assert 1000 in groups.values()


def test_what_does_not_fit_is_refused_with_the_batch_that_would(monkeypatch):
    config = config_with_vocabulary()
    config.run.batch_size = 100
    needed = sum(plan.memory(config, 0).values())
    monkeypatch.setattr(HOST, "free_bytes", lambda: needed)
    plan.check_fits(config)
    monkeypatch.setattr(HOST, "free_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match="--batch-size 99 would fit"):
        plan.check_fits(config)
    monkeypatch.setattr(HOST, "free_bytes", lambda: 1000)
    with pytest.raises(UserError, match="lower --context"):
        plan.check_fits(config)
    monkeypatch.setattr(HOST, "free_bytes", lambda: 0)  # the system does not say
    plan.check_fits(config)


def test_a_run_on_a_gpu_takes_what_the_plan_says(tmp_path):
    """Once its kernels were tried: their scratch memory is part of the baseline then."""
    pytest.importorskip("numba_cuda")
    cuda = device.choose("cuda")
    config = tiny_config(d_model=8, n_layer=1, context=8, batch_size=2)
    text = dataset(config, tmp_path)
    gc.collect()  # what other tests have left
    with cuda.memory.queue():
        first = cuda.memory.held_bytes()
        start.load_kernels(cuda, config.model, config.run.batch_size)
        gc.collect()
        baseline = cuda.memory.held_bytes()
        assert baseline > first
        planned = plan.memory(config, baseline, cuda.memory)
        trainer = Trainer(config, cuda.ops, text, memory=cuda.memory)
        trainer.step()
        trainer.evaluator().score(100)
        trainer.decoder().prefill(text.train[:4])
        held = cuda.memory.held_bytes()
    assert planned["token ids on their way"] == 4 * 2 * 2 * (2 * 8 + 8 + 3)
    if vgpu.installed():  # a real one gives memory out in large pieces
        assert held - baseline == pytest.approx(sum(planned.values()) - baseline, rel=0.03)
    else:
        assert held <= sum(planned.values()) + (32 << 20)


def test_a_gpu_is_asked_again_when_the_kernels_were_tried(monkeypatch):
    """What they took may be what is missing."""
    class Full:
        kind, precision = "GPU memory", "fp32"

        def free_bytes(self):
            return free[0]

        def transfer_bytes(self, size):
            return 16 * size

    def load_kernels(*arguments):
        free[0] -= 1
        return 0.0

    config, place = config_with_vocabulary(), Full()
    free = [sum(plan.memory(config, 0, place).values())]
    monkeypatch.setattr(start, "load_kernels", load_kernels)
    plan.check_fits(config, place)
    with pytest.raises(UserError, match=r"of GPU memory .*--batch-size 3 would fit"):
        cli_train._load_kernels(device.SimpleNamespace(name="cuda", memory=place), config)


def test_flops_of_120m():
    """Against the products of one step counted one by one: forward once, backward twice."""
    model = ModelConfig(**PRESETS["andrea-120m"]["model"])
    t, d, v = 1024, model.d_model, model.padded_vocab_size
    block = 2 * t * d * (3 * d + d + 4 * d + 4 * d) + 2 * 2 * (t * t / 2) * d
    forward = 12 * block + 2 * t * d * v
    assert metrics.flops_per_token(model, t) * t == pytest.approx(3 * forward)


@pytest.mark.parametrize(("seconds", "text"), [
    (0.04, "0.0 s"), (59.94, "59.9 s"), (61, "1m01s"), (3600, "1h00m"), (90061, "1d01h")])
def test_durations(seconds, text):
    assert metrics.duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [
    (512, "0.5 KiB"), (3 << 20, "3.0 MiB"), (3 << 29, "1.50 GiB")])
def test_byte_sizes(size, text):
    assert metrics.byte_size(size) == text
