"""Small models, data and program calls that several tests use."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from andrea_numba import checkpoint, model
from andrea_numba.buffers import Buffers
from andrea_numba.checkpoint import Checkpoint
from andrea_numba.config import ModelConfig, TrainConfig
from andrea_numba.data import Dataset, Document, prepare
from andrea_numba.log import read_events
from andrea_numba.parameters import ParameterTable
from kernels.registry import op_table

ROOT = Path(__file__).resolve().parents[1]
TEXT = "".join(f"The {a} {b} sat on the {c} mat.\n" for a in ("old", "red", "big", "shy")
               for b in ("cat", "dog", "hen", "fox", "owl") for c in ("mossy", "warm", "tiny"))
NEEDS_BPE = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None,
                               reason="the library tokenizers is not installed")
ALL_TOKENIZERS = ["byte", "char", "harris", pytest.param("bpe", marks=NEEDS_BPE)]

# Odd everywhere: head width 10, context 7, a vocabulary that is no multiple of anything.
ODD_MODEL = dict(d_model=30, n_head=3, n_layer=2, context=7, vocab_size=61)


def random_parameters(table: ParameterTable, rng, scale: float = 0.3) -> np.ndarray:
    """A flat float64 array of random values whose padding is zero, as training keeps it."""
    flat = table.zeros(np.float64)
    for name, tensor in table.unpadded(flat).items():
        tensor[...] = scale * rng.standard_normal(tensor.shape) + name.endswith("gamma")
    return flat


def random_checkpoint(shape: ModelConfig, tokenizer=None, scale: float = 0.15) -> Checkpoint:
    """A random model that was never saved."""
    table = ParameterTable(shape)
    weights = table.zeros()
    weights[:] = random_parameters(table, np.random.default_rng(5), scale)
    return Checkpoint(Path("random"), 0, TrainConfig(model=shape), tokenizer, weights)


def logits(model_and_weights: Checkpoint, ids: np.ndarray) -> np.ndarray:
    """What the CPU computes for token ids [B, T]: [B, T, vocabulary]."""
    shape, ops = model_and_weights.model, op_table("cpu")
    p = ParameterTable(shape).views(model_and_weights.weights)
    a = Buffers(shape, *ids.shape, training=True).views(*ids.shape)
    model.forward(ops, p, a, ids)
    model.head(ops, p, a.logits, a.ln_f)
    return a.logits.reshape(*ids.shape, -1)[..., :shape.vocab_size]


def loss_and_gradient(backend: str, config: ModelConfig, weights: np.ndarray, ids, targets,
                      ops=None) -> tuple[float, np.ndarray]:
    """Mean loss over all targets and its flat gradient, in the dtype of `weights`."""
    ops = ops or op_table(backend)
    table = ParameterTable(config)
    grads = table.zeros(weights.dtype)
    a = Buffers(config, *ids.shape, training=True, dtype=weights.dtype).views(*ids.shape)
    model.forward_backward(ops, table.views(weights), table.views(grads), a, ids,
                           targets.reshape(-1), config.vocab_size, 1.0 / targets.size)
    return float(a.losses.sum(dtype=np.float64)) / targets.size, grads


def random_batch(config: ModelConfig, rng, batch: int, length: int | None = None):
    shape = (batch, length or config.context)
    return (rng.integers(0, config.vocab_size, shape, dtype=np.int32),
            rng.integers(0, config.vocab_size, shape, dtype=np.int32))


def tiny_config(**changes) -> TrainConfig:
    """A run of seconds: two narrow blocks on a short window; `changes` by field name."""
    config = TrainConfig()
    settings = dict(d_model=16, n_head=2, n_layer=2, context=16, batch_size=4, steps=10,
                    warmup=2, eval_every=0, sample_every=0, save_every=0, sample_tokens=8)
    for name, value in {**settings, **changes}.items():
        part = next(p for p in vars(config).values() if hasattr(p, name))
        setattr(part, name, value)
    return config


def dataset(config: TrainConfig, folder: Path, text: str = TEXT) -> Dataset:
    """`text` prepared for `config`, whose vocabulary is set to the tokenizer's."""
    data = prepare([Document.from_text("text", text)], config.data.tokenizer,
                   config.data.val_fraction, config.model.context, cache_dir=folder)
    config.model.vocab_size = config.model.vocab_size or data.tokenizer.vocab_size
    return data


def without_residuals(ops) -> SimpleNamespace:
    """The same kernels with `x = f(x)` in the place of `x = x + f(x)`."""
    def forward(y, pre_gelu, x, w, bias, residual, transpose_w):
        ops.matmul.forward(y, pre_gelu, x, w, bias, None, transpose_w)

    def backward(*arguments):
        ops.layernorm.backward(*arguments[:-1], None)

    return SimpleNamespace(**{**vars(ops), "matmul": _with(ops.matmul, forward=forward),
                              "layernorm": _with(ops.layernorm, backward=backward)})


def _with(op, **replaced) -> SimpleNamespace:
    return SimpleNamespace(**{**{name: getattr(op, name) for name in ("forward", "backward")},
                              **replaced})


def heed_signals():
    """A job under nohup, or in the background of a script, has inherited to ignore some."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def run_program(program: str, *arguments, cwd: Path, **options) -> subprocess.CompletedProcess:
    """Start `andrea-train` or `andrea-generate` from the checkout, capturing its output."""
    environment = {**os.environ, **options.pop("env", {})}
    environment.pop("PYTHONUNBUFFERED", None)  # would hide what is lost in a buffer at exit
    with open(options.pop("stdout_to", os.devnull), "w") as file:
        stdout = file if file.name != os.devnull else subprocess.PIPE
        return subprocess.run([sys.executable, str(ROOT / "bin" / program), *map(str, arguments)],
                              cwd=cwd, env=environment, stdout=stdout, stderr=subprocess.PIPE,
                              text=True, timeout=options.pop("timeout", 300), **options)


@contextlib.contextmanager
def guarded_scratch(monkeypatch, module):
    """Scratch memory of a module of CPU kernels that holds NaN in float32 and bfloat16, and so do
    256 bytes on either side, which must not be written."""
    guarded = []

    def scratch(name, dtype, size):
        memory = np.full(size + 128, 0x7FC07FC0, np.uint32)
        guarded.append((memory, size))
        return memory[64:64 + size].view(dtype)

    monkeypatch.setattr(module, "scratch", scratch)
    yield
    assert guarded
    for memory, size in guarded:
        assert (memory[:64] == 0x7FC07FC0).all() and (memory[64 + size:] == 0x7FC07FC0).all()


TINY = ["--d-model", 16, "--n-head", 2, "--n-layer", 1, "--context", 16, "--batch-size", 4,
        "--sample-tokens", 20, "--threads", 1, "--device", "cpu"]


def refused(result, *words):
    """One readable line on stderr, exit code 2, no traceback, nothing on stdout."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("device:")]
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1 and lines[0].startswith("andrea-train: error: "), result.stderr
    assert result.stdout == ""
    for word in words:
        assert str(word) in lines[0]


def events(folder: Path, event: str) -> list[dict]:
    return read_events(folder / "log.jsonl", event)


def final_weights(run: Path) -> bytes:
    return checkpoint.load(checkpoint.find(str(run))).weights.tobytes()
