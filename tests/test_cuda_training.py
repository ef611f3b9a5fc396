"""Training and decoding on CUDA: the CPU's numbers, the same bits again, and no stop on the way."""

import contextlib
import dataclasses
import re

import numpy as np
import pytest
import vgpu
from helpers import dataset, tiny_config

from andrea_numba import checkpoint, device, self_check, start
from andrea_numba.decoder import Decoder
from andrea_numba.errors import UserError
from andrea_numba.generate import generate_text
from andrea_numba.memory import HOST
from andrea_numba.program import run_program
from andrea_numba.sampler import Sampling
from andrea_numba.score import Scorer
from andrea_numba.trainer import Diverged, Trainer
from kernels.registry import op_table

pytest.importorskip("numba_cuda")

# One process: the runs below are made once, and used by several tests.
pytestmark = pytest.mark.xdist_group("cuda_training")
SIZE = dict(d_model=8, n_head=2, n_layer=1, context=8, batch_size=2, steps=20, clip=0.5)
STOPS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuMemcpyDtoH", "cuMemcpyHtoD")
ALLOCATIONS = ("cuMemAlloc", "cuMemHostAlloc", "cuMemAllocAsync")


@pytest.fixture(scope="module")
def cuda():
    return device.choose("cuda", "fp32")


@pytest.fixture(scope="module", autouse=True)
def queue(cuda):
    """Kernels go to the memory's stream; on the virtual GPU all work runs as late as it may."""
    late = vgpu.options(lazy_streams=True, race=False) if vgpu.installed() else \
        contextlib.nullcontext()
    with late, cuda.memory.queue():
        yield
        cuda.memory.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def make(cuda, folder):
    """Trainers on `"cpu"` or `"cuda"`, new or resumed."""
    def trainer(place, resumed=None, **changes):
        config = resumed.config if resumed else tiny_config(**{**SIZE, **changes})
        ops, memory = (cuda.ops, cuda.memory) if place == "cuda" else (op_table("cpu"), HOST)
        return Trainer(config, ops, dataset(config, folder), resumed, memory)
    return trainer


def advance(trainer, steps):
    """The figures of some updates, asked for without waiting for one another."""
    results, record = [], trainer._record

    def keep(result):
        results.append(result)
        record(result)

    trainer._record = keep
    for _ in range(steps):
        trainer.advance()
    trainer.wait()
    trainer._record = record
    return results


def final(trainer):
    return [trainer.memory.get(array).tobytes()
            for array in (trainer.weights, trainer.optimizer.m, trainer.optimizer.v)]


@contextlib.contextmanager
def counted(names):
    """How often the driver is called by these names."""
    from kernels.common.cuda import driver

    counts = dict.fromkeys(names, 0)
    original = {name: getattr(driver, name) for name in names}

    def counting(name):
        def call(*arguments):
            counts[name] += 1
            return original[name](*arguments)
        return call

    for name in names:
        setattr(driver, name, counting(name))
    try:
        yield counts
    finally:
        for name in names:
            setattr(driver, name, original[name])


@pytest.fixture(scope="module")
def straight(make, queue, folder):
    """The trainers and figures of 20 steps by place, and a checkpoint of the tenth on CUDA."""
    cpu, cuda = make("cpu"), make("cuda")
    first = advance(cuda, 10)
    half = cuda.save(folder / "half", "x")
    return {"cpu": (cpu, advance(cpu, 20)), "cuda": (cuda, first + advance(cuda, 10)),
            "half": half}


def test_twenty_steps_are_the_cpus(straight):
    cpu, cuda = straight["cpu"][0], straight["cuda"][0]
    for ours, theirs in zip(straight["cuda"][1], straight["cpu"][1], strict=True):
        assert (ours.step, ours.lr) == (theirs.step, theirs.lr)
        assert ours.loss == pytest.approx(theirs.loss, abs=2e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-5)
    np.testing.assert_allclose(cuda.memory.get(cuda.weights), cpu.weights, atol=2e-5)
    assert cuda.average.value == pytest.approx(cpu.average.value, abs=2e-6)


def test_a_resumed_run_is_the_same_run(make, straight):
    resumed = make("cuda", checkpoint.load(straight["half"]))
    assert advance(resumed, 10) == straight["cuda"][1][10:]
    assert final(resumed) == final(straight["cuda"][0])
    assert resumed.average == straight["cuda"][0].average


def test_a_checkpoint_changes_the_device(make, straight, folder):
    on_cpu = make("cpu", checkpoint.load(straight["half"]))
    expected = straight["cuda"][1]
    assert [r.loss for r in advance(on_cpu, 3)] == pytest.approx(
        [r.loss for r in expected[10:13]], abs=2e-6)
    back = make("cuda", checkpoint.load(on_cpu.save(folder / "back", "x")))
    assert back.step().loss == pytest.approx(expected[13].loss, abs=2e-6)
    assert back.step_count == 14


def test_validation_is_the_cpus(straight):
    for score in ("score", "score_with_context"):
        ours, theirs = (getattr(straight[place][0].evaluator(), score)()
                        for place in ("cuda", "cpu"))
        assert ours.tokens == theirs.tokens
        assert ours.loss == pytest.approx(theirs.loss, abs=5e-6)


@pytest.mark.parametrize("cache", [True, False])
def test_greedy_text_is_the_cpus(cuda, straight, cache):
    trainer = straight["cpu"][0]
    tokenizer, texts = trainer.dataset.tokenizer, []
    for ops, memory in ((op_table("cpu"), HOST), (cuda.ops, cuda.memory)):
        p = trainer.table.views(memory.put(trainer.weights))
        decoder = Decoder(trainer.config.model, p, ops, cache, memory=memory)
        texts.append(generate_text(decoder, tokenizer, "The ", 8, Sampling(temperature=0),
                                   np.random.default_rng(0)).tokens)
    assert texts[0] == texts[1]


def test_token_scores_are_the_cpus(cuda, straight):
    trainer = straight["cpu"][0]
    text, found = trainer.dataset.val[:27], []  # the last window is shorter
    for ops, memory in ((op_table("cpu"), HOST), (cuda.ops, cuda.memory)):
        p = trainer.table.views(memory.put(trainer.weights))
        losses = []
        total = Scorer(trainer.config.model, p, ops, memory).score(
            text, trainer.dataset.tokenizer, lambda _, nats, to=losses: to.extend(nats.tolist()))
        assert total.tokens == len(losses) == 27
        found.append(losses)
    assert found[0] == pytest.approx(found[1], abs=5e-6)


def test_a_step_neither_stops_nor_allocates(make):
    trainer = make("cuda", grad_accum=2)
    trainer.step()
    with counted(STOPS + ALLOCATIONS) as counts:
        for _ in range(3):
            trainer.advance()
        assert set(counts.values()) == {0}, counts
        trainer.wait()
        assert set(counts.values()) == {0}, counts
    assert trainer.last.step == trainer.step_count == 4


def test_looking_neither_allocates_nor_changes_the_run(make):
    quiet, looked_at = make("cuda"), make("cuda")
    looked_at.evaluator().score(8)
    looked_at.decoder().prefill(np.array([1, 2, 3]))
    with counted(ALLOCATIONS) as counts:
        looked_at.evaluator().score(8)
        decoder = looked_at.decoder()
        decoder.prefill(np.array([1, 2, 3]))
        decoder.step(4)
    assert set(counts.values()) == {0}, counts
    assert quiet.step() == looked_at.step()


def test_accumulation_does_not_change_the_step(make):
    whole, parts = make("cuda", batch_size=4), make("cuda", batch_size=2, grad_accum=2)
    one, other = whole.step(), parts.step()
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


def test_a_bad_norm_changes_nothing_and_is_found_soon(make):
    trainer = make("cuda")
    poisoned = trainer.table.zeros()
    poisoned[:] = np.nan
    trainer.weights = trainer.memory.put(poisoned)
    trainer.p = trainer.table.views(trainer.weights)
    moments = final(trainer)[1:]
    with pytest.raises(Diverged, match=r"step 1: loss nan, gradient norm nan"):
        for _ in range(6):
            trainer.advance()
    assert trainer.step_count < 6 and trainer.last is None
    assert final(trainer)[1:] == moments


def test_views_lie_in_the_array_they_are_of(cuda):
    values = np.arange(24, dtype=np.float32)
    array = cuda.memory.put(values)
    rows = array.reshape(6, 4)[1:-2]
    assert rows.shape == (3, 4) and len(rows) == 3 and rows.nbytes == 48
    assert (cuda.memory.get(rows) == values.reshape(6, 4)[1:-2]).all()
    cuda.memory.clear(rows)
    values[4:16] = 0
    assert (cuda.memory.get(array.reshape((2, -1))) == values.reshape(2, 12)).all()
    assert cuda.memory.get(array[20:]).shape == (4,) and array[9:3].size == 0
    with pytest.raises(ValueError, match="cannot become"):
        array.reshape(5, 5)
    with pytest.raises(ValueError, match="step 2"):
        array[::2]


def test_a_full_device_is_one_line(cuda):
    with pytest.raises(UserError, match=r"the GPU has no .* bytes left; a smaller --batch-size"):
        cuda.memory.empty(1 << 44)


def test_the_self_check_names_the_kernel_that_is_wrong(cuda, monkeypatch, capsys, tmp_path):
    """One line and exit code 1; a shape that was found right is not checked again."""
    class Wrong:
        def __getattr__(self, name):
            return getattr(cuda.ops.layernorm, name)

        def forward(self, y, mean, rstd, x, gamma, beta, eps):
            cuda.ops.layernorm.forward(y, mean, rstd, x, beta, gamma, eps)

    wrong = device.SimpleNamespace(**{**vars(cuda.ops), "layernorm": Wrong()})
    broken = dataclasses.replace(cuda, ops=wrong)
    model = tiny_config(**SIZE, vocab_size=40).model
    monkeypatch.setenv("ANDREA_CACHE_DIR", str(tmp_path))
    assert run_program("andrea-train", lambda: start.load_kernels(broken, model, 2)) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("first use of this model on this GPU") and len(said) == 2
    assert re.match(r"andrea-train: error: a kernel is wrong .*: layernorm.forward: y is off by "
                    r".*, allowed .*; use --device cpu", said[1])
    for training, expected in ((False, 1), (False, 0), (True, 1)):
        start.load_kernels(cuda, model, 2, training)
        assert capsys.readouterr().err.count("first use") == expected


def test_what_is_remembered_of_a_check(monkeypatch, tmp_path):
    """Training's check covers generation; another compiler is checked anew."""
    monkeypatch.setenv("ANDREA_CACHE_DIR", str(tmp_path))
    model = tiny_config(**SIZE, vocab_size=40).model
    self_check.Record(model, "fp32", training=True).write()
    monkeypatch.setattr(start, "warm_up", lambda *arguments: pytest.fail("checked again"))
    start._check(device.Device("cuda", None, HOST, ""), model, training=False)
    assert not self_check.Record(model, "bf16", training=True).exists()
    monkeypatch.setattr("kernels.common.cuda.linker_version", lambda: "another")
    assert not self_check.Record(model, "fp32", training=True).exists()


def test_looking_at_the_weights_counts_the_steps_it_waits_for(make):
    trainer = make("cuda")
    trainer.advance()
    trainer.check_finite()
    assert trainer.last.step == 1
